"""kill -9 of Agent Lightning 1.0's controller, of its supervisor, and of its agents at random moments of a real
``train.py``; then: has each rollout one end, was none trained on twice, and was none lost?

With ``train_kills`` it is ``train.py`` itself that is killed that many times and resumed; ``outside`` lets a controller
that was started separately live through that.

The agents note their steps in a file, and the ends are read from the API's own ``/api/rollouts/terminal``: both are
compared with the run's ledger and with the trained rollouts, and the run is audited.
"""

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.report.files import iter_jsonl
from agl_slime.runner.controller_process import agents_of
from agl_slime.support.net import free_port
from agl_slime.tools.audit import audit
from tests.harness.agl1 import local_controller
from tests.harness.train_process import Run, train

KEY = "the-key"
_AGENTS = Path(__file__).with_name("agents")
_GROUP = 4
_FLAGS = (
    "--runners controller --agent controller_agent:Agent --env-map QUESTION=input.question "
    f"--n-samples-per-prompt {_GROUP} --max-new-tokens 8 --max-staleness 2 --eval-interval 0 "
    "--keep-rollouts none"
)
# Words of a command line for each kind of process: the first that fits.
_KINDS = {
    "agent": "_run_local_reconciler_worker",
    "over": "agl_slime.runner.controller_process",
    "controller": "-m agentlightning.controller",
}


@dataclass
class Result:
    """Numbers, and a sentence for each fault."""

    kills: Counter[str] = field(default_factory=Counter)
    trained: int = 0
    wrong: list[str] = field(default_factory=list)


def run(
    directory: Path,
    *,
    rollouts: int,
    kills: int,
    seed: int,
    limit_s: float,
    batch: int = 8,
    train_kills: int = 0,
    outside: bool = False,
) -> Result:
    """A run of ``rollouts`` rollouts and the replacements of lost groups, in iterations of ``batch`` groups."""
    rng, began, result = random.Random(seed), time.monotonic(), Result()
    output, witness, tasks = directory / "run", directory / "witness", directory / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"What is {n}?"}) + "\n" for n in range(100)))
    witness.touch()
    port = free_port()
    flags = [*_FLAGS.split(), "--controller-port", port, "--save-interval", 2 if train_kills else 20]
    flags += ["--tasks", tasks, "--model-path", LOOKUP_POLICY, "--output-dir", output]
    flags += ["--rollout-batch-size", batch, "--num-iterations", -(-rollouts // (batch * _GROUP))]
    path = os.pathsep.join((str(_AGENTS), os.environ.get("PYTHONPATH", "")))
    environment = {"AGL_KEY": KEY, "WITNESS": str(witness), "PYTHONPATH": path}
    # in numbers of rewards; a run whose first rollouts fail all together ends
    moments = sorted(rng.uniform(batch * _GROUP, 0.8 * rollouts) for _ in range(kills + train_kills))
    kinds = rng.choices(["agent", "controller", "over"], [5, 4, 1], k=kills) + ["train"] * train_kills
    rng.shuffle(kinds)
    all_ends: list[str] = []
    url, code, text = f"http://127.0.0.1:{port}", -signal.SIGKILL, ""
    with ExitStack() as stack:
        api = stack.enter_context(httpx.Client(base_url=url, headers={"x-api-key": KEY}, timeout=10))
        if outside:
            options: dict[str, Any] = {"paths": _AGENTS, "key": KEY, "at_once": 20, "environment": environment}
            stack.enter_context(local_controller(url, directory / "controller.log", **options))
            environment["AGL_CONTROLLER_PYTHON"] = ""
        while code == -signal.SIGKILL:  # our own
            resumed = ["--resume"] if (output / "config.json").exists() else []
            ends: list[str] = []
            with train(*flags, *resumed, environment=environment) as process:
                while process.process.poll() is None:
                    if time.monotonic() - began > limit_s:
                        raise TimeoutError(f"the run takes too long: {process.text[-2000:]}")
                    time.sleep(rng.uniform(0.0, 0.3))
                    with suppress(httpx.TransportError):  # it does not run yet, or has ended
                        ends += _ended_since(api, len(ends))
                    rewarded = len(_notes(witness, "rewarded"))
                    if kinds and rewarded >= moments[0] and _kill(process, kinds[0], rng):
                        result.kills[kinds.pop(0)] += 1
                        # some rollout succeeds before the next: three deaths without one end a run
                        moments = [max(moment, rewarded + 1) for moment in moments[1:]]
                code, _ = process.end()
                text = process.text[-2000:]
            all_ends += ends
    if code != 0:
        result.wrong.append(f"the run ended with {code}: {text}")
        return result
    if kinds:
        result.wrong.append(f"{len(kinds)} kills met nothing to kill")
    if alive := list(agents_of(url)):
        result.wrong.append(f"{len(alive)} agents still run: {alive[:3]}")
    _check(result, output, witness, all_ends)
    return result


def _kill(run: Run, kind: str, rng: random.Random) -> bool:
    """SIGKILL to one process of this kind, or to up to three agents."""
    if kind == "train":
        run.process.kill()
        run.process.wait()
        return True
    candidates = []
    for child in run.children():
        with suppress(psutil.Error):
            words = " ".join(child.cmdline())
            if next((name for name, word in _KINDS.items() if word in words), None) == kind:
                candidates.append(child)
    chosen = rng.sample(candidates, min(len(candidates), rng.randint(1, 3) if kind == "agent" else 1))
    for child in chosen:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    return bool(chosen)


def _ended_since(api: httpx.Client, position: int) -> list[str]:
    answer = api.get("/api/rollouts/terminal", params={"after": position, "limit": 10_000})
    answer.raise_for_status()
    return [item["rollout_id"] for item in answer.json()["items"]]


def _notes(witness: Path, step: str) -> Counter[str]:
    """How often the agents of each rollout have noted this step."""
    lines = (line.split() for line in witness.read_text().splitlines())
    return Counter(rollout for rollout, noted, _ in lines if noted == step)


def _check(result: Result, output: Path, witness: Path, ends: list[str]) -> None:
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        known = {rollout for (rollout,) in ledger.execute("SELECT rollout_id FROM ledger_rollouts")}
    trained = {rollout for line in iter_jsonl(output / "trained.jsonl") for rollout in line["rollouts"]}
    begun, rewarded = _notes(witness, "begun"), _notes(witness, "rewarded")
    result.trained = len(trained)
    for rollouts, sentence in (
        ({rollout for rollout, times in Counter(ends).items() if times > 1}, "ended twice"),
        (set(ends) - known, "ended and are not in the ledger"),
        (set(begun) - known, "were run by an agent and are not in the ledger"),
        (
            {rollout for rollout in trained if not begun[rollout] == rewarded[rollout] == 1},
            "were trained on that not exactly one agent ran to its end",
        ),
    ):
        if rollouts:
            result.wrong.append(f"{len(rollouts)} rollouts {sentence}: {sorted(rollouts)[:5]}")
    audited = audit(output)  # each rollout has one end, and the ledger, the trainer and the reports agree
    result.wrong += audited.findings + ([] if audited.finished else ["the run did not finish"])
