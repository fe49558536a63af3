"""kill -9 of Agent Lightning 1.0's controller, of what stands over it, and of its agents at random moments of a real
``train.py``; then: has each rollout one end, was none trained on twice, and was none lost?

AGL_CONTROLLER_PYTHON=DIR/bin/python python -m tests.programs.kill_controller --rollouts 2000 --kills 50

With ``--train-kills`` it is ``train.py`` itself that is killed, so often, and goes on with ``--resume``; ``--outside``
lets a controller that somebody else has started live through that.

The agents note what they do in a file, and the ends are followed by the API's own ``/api/rollouts/terminal``: both are
compared with the run's ledger and with what was trained, and the run is audited.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.report.audit import audit
from agl_slime.runner.controller_process import agents_of
from tests.harness.agl1 import local_controller
from tests.harness.train_process import Run, train

KEY = "the-key"
_GROUP = 4
_FLAGS = (
    "--runners controller --agent controller_agent:Agent --env-map QUESTION=input.question "
    f"--n-samples-per-prompt {_GROUP} --max-new-tokens 8 --max-staleness 2 --eval-interval 0 "
    "--keep-rollouts none"
)
# Words of a command line, and what it is: the first that fits.
_KINDS = {
    "agent": "_run_local_reconciler_worker",
    "over": "agl_slime.runner.controller_process",
    "controller": "-m agentlightning.controller",
}


@dataclass
class Result:
    """Numbers, and sentences about what is wrong; there are none when all is well."""

    kills: Counter[str] = field(default_factory=Counter)
    rollouts: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """By outcome and reason."""
    trained: int = 0
    processes: int = 0
    """Agents that have begun."""
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


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
    """A run of so many ``rollouts``, and those that take the place of groups that are lost, in iterations of ``batch``
    groups."""
    rng, began, result = random.Random(seed), time.monotonic(), Result()
    output, witness, tasks = directory / "run", directory / "witness", directory / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"What is {n}?"}) + "\n" for n in range(100)))
    witness.touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = [*_FLAGS.split(), "--controller-port", port, "--save-interval", 2 if train_kills else 20]
    flags += ["--tasks", tasks, "--model-path", LOOKUP_POLICY, "--output-dir", output]
    flags += ["--rollout-batch-size", batch, "--num-iterations", -(-rollouts // (batch * _GROUP))]
    path = os.pathsep.join((str(Path(__file__).with_name("agents")), os.environ.get("PYTHONPATH", "")))
    given = {"AGL_KEY": KEY, "WITNESS": str(witness), "PYTHONPATH": path}
    # after so many rewards; a run whose first rollouts fail all together ends
    moments = sorted(rng.uniform(batch * _GROUP, 0.8 * rollouts) for _ in range(kills + train_kills))
    kinds = rng.choices(["agent", "controller", "over"], [5, 4, 1], k=kills)
    kinds += ["train"] * train_kills
    rng.shuffle(kinds)
    all_ends: list[str] = []
    url, code, said = f"http://127.0.0.1:{port}", -signal.SIGKILL, ""
    with ExitStack() as stack:
        api = stack.enter_context(httpx.Client(base_url=url, headers={"x-api-key": KEY}, timeout=10))
        if outside:
            log, here = directory / "controller.log", Path(__file__).with_name("agents")
            stack.enter_context(local_controller(url, log, paths=here, key=KEY, at_once=20, environment=given))
            given["AGL_CONTROLLER_PYTHON"] = ""
        while code == -signal.SIGKILL:  # our own
            resumed = ["--resume"] if (output / "config.json").exists() else []
            ends: list[str] = []
            with train(*flags, *resumed, environment=given) as process:
                while process.process.poll() is None:
                    if time.monotonic() - began > limit_s:
                        raise TimeoutError(f"the run takes too long: {process.text[-2000:]}")
                    time.sleep(rng.uniform(0.0, 0.3))  # a moment that nobody has chosen
                    with suppress(httpx.TransportError):  # not yet, or no more
                        ends += _ended_since(api, len(ends))
                    rewarded = len(_notes(witness, "rewarded"))
                    if kinds and rewarded >= moments[0] and _kill(process, kinds[0], rng):
                        result.kills[kinds.pop(0)] += 1
                        # some rollout succeeds before the next: three deaths without one end a run
                        moments = [max(one, rewarded + 1) for one in moments[1:]]
                code, _ = process.end()
                said = process.text[-2000:]
            all_ends += ends
    result.seconds = time.monotonic() - began
    if code != 0:
        result.wrong.append(f"the run ended with {code}: {said}")
        return result
    if kinds:
        result.wrong.append(f"{len(kinds)} kills found nothing to kill")
    if left := list(agents_of(url)):
        result.wrong.append(f"{len(left)} agents are left: {left[:3]}")
    _check(result, output, witness, all_ends)
    return result


def _kill(run: Run, kind: str, rng: random.Random) -> bool:
    """SIGKILL to one process of this kind, or to up to three agents."""
    if kind == "train":
        run.process.kill()
        run.process.wait()
        return True
    found = []
    for child in run.children():
        with suppress(psutil.Error):
            words = " ".join(child.cmdline())
            if next((kind for kind, word in _KINDS.items() if word in words), None) == kind:
                found.append(child)
    chosen = rng.sample(found, min(len(found), rng.randint(1, 3) if kind == "agent" else 1))
    for child in chosen:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    return bool(chosen)


def _ended_since(api: httpx.Client, after: int) -> list[str]:
    answer = api.get("/api/rollouts/terminal", params={"after": after, "limit": 10_000})
    answer.raise_for_status()
    return [item["rollout_id"] for item in answer.json()["items"]]


def _notes(witness: Path, what: str) -> Counter[str]:
    """How often the agents of each rollout have noted this."""
    lines = (line.split() for line in witness.read_text().splitlines())
    return Counter(rollout for rollout, noted, _ in lines if noted == what)


def _check(result: Result, output: Path, witness: Path, ends: list[str]) -> None:
    wrong = result.wrong
    with sqlite3.connect(output / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT rollout_id, state, outcome, reason FROM ledger_rollouts").fetchall()
        counts = dict(ledger.execute("SELECT kind, sum(n) FROM ledger_counts GROUP BY kind").fetchall())
    outcomes = {rollout: outcome for rollout, _, outcome, _ in rows}
    result.rollouts = len(rows)
    result.ends = Counter(f"{outcome} {reason or ''}".strip() for _, _, outcome, reason in rows)
    if unfinished := [rollout for rollout, state, *_ in rows if state != 2]:
        wrong.append(f"{len(unfinished)} rollouts have no end: {unfinished[:5]}")
    closed = sum(n for kind, n in counts.items() if kind.startswith("closed:"))
    if not counts["opened"] == closed == len(rows):
        wrong.append(f"the ledger counts {counts['opened']} rollouts and {closed} ends, and has {len(rows)}")
    if twice := [rollout for rollout, times in Counter(ends).items() if times > 1]:
        wrong.append(f"{len(twice)} rollouts ended twice: {twice[:5]}")
    if unknown := set(ends) - set(outcomes):
        wrong.append(f"{len(unknown)} rollouts that ended are not in the ledger: {sorted(unknown)[:5]}")
    lines = (json.loads(line) for line in (output / "trained.jsonl").read_text().splitlines())
    trained = Counter(rollout for line in lines for rollout in line["rollouts"])
    result.trained = len(trained)
    if twice := [rollout for rollout, times in trained.items() if times > 1]:
        wrong.append(f"{len(twice)} rollouts were trained on twice: {twice[:5]}")
    if (said := {rollout for rollout, outcome in outcomes.items() if outcome == "trained"}) != set(trained):
        wrong.append(f"of {len(trained)} rollouts that were trained on the ledger has {len(said)}")
    begun, rewarded = _notes(witness, "begun"), _notes(witness, "rewarded")
    result.processes = sum(begun.values())
    if again := [rollout for rollout in trained if begun[rollout] != 1 or rewarded[rollout] != 1]:
        told = [(rollout, begun[rollout], rewarded[rollout]) for rollout in again[:5]]
        wrong.append(f"{len(again)} rollouts were trained on that not exactly one agent ran to its end: {told}")
    if unknown := set(begun) - set(outcomes):
        wrong.append(f"{len(unknown)} rollouts that an agent ran are not in the ledger: {sorted(unknown)[:5]}")
    looked = audit(output)
    wrong += looked.findings + ([] if looked.finished else ["the run did not finish"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2_000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--train-kills", type=int, default=0)
    parser.add_argument("--outside", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        limit_s = 300 + 3.0 * options.rollouts
        result = run(
            Path(directory),
            rollouts=options.rollouts,
            kills=options.kills,
            seed=options.seed,
            limit_s=limit_s,
            train_kills=options.train_kills,
            outside=options.outside,
        )
    load = f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, seed {options.seed}"
    print(f"{result.rollouts} rollouts, {dict(result.kills)} killed in {result.seconds:.0f} s ({load})")
    print(f"  {result.processes} agents begun, {result.trained} rollouts trained on")
    for end, count in result.ends.most_common():
        print(f"  {end:<40}{count:>8}")
    for sentence in result.wrong:
        print(f"WRONG: {sentence}")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
