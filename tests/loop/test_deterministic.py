"""Runs of ``--deterministic``: equal to the last bit whatever was slow, full or killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.cli.wiring import RunInputs
from agl_slime.engine.client import generation
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.report.files import iter_jsonl
from agl_slime.report.rollouts import pack
from agl_slime.tools.compare.command import compare
from agl_slime.tools.kept_rollouts import unpack
from agl_slime.train.local.settings import LocalTrainerSettings
from tests.harness.engine_servers import engine_in_thread, real_sglang
from tests.harness.training import needs_torch, train
from tests.harness.waiting import until

pytestmark = needs_torch

ROOT = Path(__file__).parents[2]


def content_of(run: Path) -> tuple[str, list[Any]]:
    """The digest of the trained model, and the groups in the order of draw without times and ids: tokens, log-probs and
    versions of each Sample by its seal."""
    groups = [
        (int(row["instance_id"]), row["iteration"], row["rewards"], row["outcomes"], [sorted(s) for s in row["sealed"]])
        for row in iter_jsonl(run / "groups.jsonl")
    ]
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest(), sorted(groups)


class Unsteady(LookupAgent):
    """Waits for another time before each rollout of each run, and asks and answers by draws of the session's."""

    def question(self, session: Any) -> str:
        return f"{session.rng.random():.3f}"

    tool = question
    options: dict[str, Any] = {}

    async def run(self, task: dict[str, Any], session: Any) -> Any:
        await asyncio.sleep(random.random() * 0.05)
        await session.ask({"role": "user", "content": self.question(session)}, **self.options)
        await session.ask({"role": "tool", "content": self.tool(session)})

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return sum(response.encode()) % 3 / 2


def edited(_: Any, session: Any) -> str:
    """A tool that changes the history, too."""
    session.messages[0]["content"] += "!"
    return f"{session.rng.random():.3f}"


def broken(_: Any, session: Any) -> str:
    if (number := session.rng.random()) > 0.8:
        raise OSError("the tool is away")
    return f"{number:.3f}"


def repeatable(
    run: Path, policy: Path, *, agent: Any = None, limits: Any = None, url: str | None = None, **settings: Any
) -> Path:
    tasks = [{"key": f"k{n}", "answer": f"{n}"} for n in range(6)]
    small = {"num_iterations": 3, "rollout_batch_size": 3, "n_samples_per_prompt": 3, "max_new_tokens": 12}
    engine = engine_in_thread(policy, deterministic=True, **(limits or {})) if url is None else nullcontext(url)
    with engine as url:
        options = {**small, "seed": 5, "deterministic": True, "eval_interval": 0, "keep_rollouts": "all", **settings}
        inputs = RunInputs(agent=agent or Unsteady(), tasks=tasks)
        train(inputs=inputs, model_path=policy, sglang_url=url, output_dir=run, **options)
    return run


@pytest.fixture(scope="module")
def reference(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repeatable(tmp_path_factory.mktemp("deterministic") / "run", policy_dir)


def test_two_runs_are_equal_whatever_the_engine_has_room_for(
    reference: Path, policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With room for 3 rows and no cache of prefixes, and with room for 128; also asynchronous."""
    limits = {"max_running": 3, "prefix_cache": False}
    small = repeatable(tmp_path / "small", policy_dir, limits=limits)
    assert content_of(small) == content_of(reference)
    assert len(content_of(small)[1]) == 9
    compare(small, reference)
    assert "are equal: 9 groups, and the weights" in capsys.readouterr().out
    one, two = (repeatable(tmp_path / str(n), policy_dir, max_staleness=1, limits=limits if n else {}) for n in (0, 1))
    assert content_of(one) == content_of(two) != content_of(reference)


@pytest.mark.sglang
def test_a_real_sglang_repeats_the_tokens_of_a_run(policy_dir: Path, tmp_path: Path) -> None:
    """Of equal prompts, by their seeds; on a CPU without the last bits of log-probs, which depend on a batch's rows."""
    tokens: list[Counter[tuple[str, ...]]] = []
    with real_sglang(policy_dir, tmp_path / "sglang.log", ["--enable-deterministic-inference"]) as server:
        for seed in (5, 5, 6):
            agent = type("Constant", (Unsteady,), {"question": lambda *_: "?", "tool": lambda *_: "!"})()
            options: Any = {"url": server.url, "seed": seed, "num_iterations": 1}
            run = repeatable(tmp_path / f"{len(tokens)}", policy_dir, agent=agent, **options)
            rollouts = iter_jsonl(run / "rollouts.jsonl")
            tokens.append(Counter(tuple(sample["tokens"] for sample in row["samples"]) for row in rollouts))
    assert [len(each) for each in tokens] == [9, 9, 9]  # the members of a group differ
    assert tokens[0] == tokens[1]
    assert not tokens[0].keys() & tokens[2].keys()


def seed_by_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        SamplingParams, "seeded", lambda self, *_: replace(self, extra={"sampling_seed": random.getrandbits(30)})
    )


def last_bit(patch: pytest.MonkeyPatch) -> None:
    from agl_slime.engine import engine
    from agl_slime.engine.sampling import sample

    def changed(*arguments: Any) -> Any:
        ids, log_probs, *more = sample(*arguments)
        return ids, log_probs.nextafter(log_probs - 1), *more

    patch.setattr(engine, "sample", changed)


def by_end(patch: pytest.MonkeyPatch) -> None:
    """A batch takes the groups that were drawn last."""
    patch.setattr("agl_slime.loop.admission._by_age", lambda admitted: sorted(admitted, reverse=True))


def late_version(patch: pytest.MonkeyPatch) -> None:
    original = generation._weight_spans
    patch.setattr(
        generation, "_weight_spans", lambda *about: tuple(replace(span, version="0") for span in original(*about))
    )


def heavier_tokens(patch: pytest.MonkeyPatch) -> None:
    from agl_slime.train.local import trainer

    original = trainer.token_weights

    def changed(*about: Any, **options: Any) -> Any:
        weights = original(*about, **options)
        weights[0] *= 2
        return weights

    patch.setattr(trainer, "token_weights", changed)


ROLLOUT = "iteration 1, task 0, rollout 0 of its group"
PLANTED: dict[str, tuple[Any, str]] = {
    "setting": ({"seed": 6}, r"setting seed: 5 and 6$"),
    "clock": ({"question": lambda *_: f"{time.time()}"}, rf"{ROLLOUT}, prompt of turn 0: token \d+ is .* after "),
    "tool's clock": ({"tool": lambda *_: f"{time.time()}"}, rf"{ROLLOUT}, prompt of turn 1: token \d+ is .* after "),
    "seed by arrival": (seed_by_arrival, rf"{ROLLOUT}, turn 0: sampled token \d+ is .* after "),
    "log-prob": (last_bit, rf"{ROLLOUT}, equal tokens, and log-probs -\d.* of token \d+"),
    "version": (late_version, r"iteration 2, task 3, .* equal tokens, and weight versions \[\['1', .* and \[\['0', "),
    "fork": ({"tool": edited}, rf"{ROLLOUT}, 1 and 2 Samples, with forks \[\] and \['edited"),
    "mask": (
        {"options": {"untrained": "planted"}},
        rf"{ROLLOUT}, equal tokens, and trained \[.*, (\[\d+, \d+\])\] and \[\1\]$",
    ),
    "failure": (  # of a group that one failure drops, the others are filtered, or cancelled where they were slower
        {"tool": broken},
        r"iteration 1, task \d, rollout \d of its group: (equal.* )?outcomes 'trained' and '(fail|filter|cancell)ed'",
    ),
    "reward": ({"compute_reward": lambda *_: random.random()}, rf"{ROLLOUT}: equal tokens, and rewards "),
    "order": (by_end, "iteration 1: equal rollouts, and another order of the groups in training"),
    "order, asynchronous": (
        by_end,
        "order: iteration 1 has the group of task 0 in one run alone, there in iteration 2",
    ),
    "training": (heavier_tokens, r"iteration 1: equal batches, and train/\w+ \S+ and "),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_the_first_difference_is_named(reference: Path, policy_dir: Path, tmp_path: Path, kind: str) -> None:
    planted, named = PLANTED[kind]
    first, settings = reference, {"num_iterations": 1 + (kind == "version")}
    if kind == "training":  # in one step, whose scores are of the weights before it
        settings |= {"local": LocalTrainerSettings(n_minibatches=1)}
    if kind == "order, asynchronous":
        settings = {"max_staleness": 1}
    if kind in ("training", "order, asynchronous"):
        first = repeatable(tmp_path / "first", policy_dir, **settings)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "setting":
            settings |= planted
        elif isinstance(planted, dict):
            settings |= {"agent": type("Planted", (Unsteady,), planted)()}
        else:
            planted(patch)
        second = repeatable(tmp_path / "second", policy_dir, **settings)
    with pytest.raises(AglSlimeError, match=named):
        compare(first, second)


def one_image(value: str, row: dict[str, Any]) -> None:
    row["messages"][0]["content"] = f"\ufdd0image {value * 64}\ufdd1 What is it?"
    row["samples"][0]["engine_log_probs"] = pack(unpack(row["samples"][0]["engine_log_probs"]) - (value == "b"))


def one_seal(value: str, row: dict[str, Any]) -> None:
    row["sealed"][0][0][0] = value


EDITS: dict[str, tuple[list[tuple[str, Any]], str]] = {
    "image": (
        [("rollouts", one_image), ("groups", one_seal)],
        rf"{ROLLOUT}, .* images \['a{{64}}'\] and \['b{{64}}'\]",
    ),
    "validation": (
        [("metrics", lambda value, row: row.update({"val/reward_mean": value}))],
        "iteration 1: equal batches, and val/reward_mean 'a' and 'b'",
    ),
    "scores": (
        [("trained", lambda value, row: row.update(scores=[value]))],
        "iteration 1: equal rollouts, and another log-prob or advantage of the trainer in training",
    ),
}


@pytest.mark.parametrize("kind", EDITS)
def test_a_difference_in_a_record_is_named(reference: Path, tmp_path: Path, kind: str) -> None:
    """Of what the local trainer and the embedded engine do not have, or not without another difference."""
    edits, named = EDITS[kind]
    for value in "ab":
        run = Path(shutil.copytree(reference, tmp_path / value))
        for name, edit in edits:
            rows = [*iter_jsonl(path := run / f"{name}.jsonl")]
            edit(value, rows[0])
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(AglSlimeError, match=named):
        compare(tmp_path / "a", tmp_path / "b")


def test_other_weights_of_equal_rollouts_are_named(reference: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(reference, tmp_path / "other"))
    model = other / "model" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x01")
    with pytest.raises(AglSlimeError, match="all rollouts are equal, and the trained weights are not"):
        compare(reference, other)
    model.write_bytes((reference / "model" / "model.safetensors").read_bytes())
    (other / "model" / "model-00002.safetensors").touch()  # of a model in several files
    with pytest.raises(AglSlimeError, match="the trained weights are not"):
        compare(reference, other)
    (other / "config.json").unlink()
    with pytest.raises(ConfigError, match="holds no run"):
        compare(reference, other)


FLAGS = "--deterministic --seed 5 --num-iterations 6 --rollout-batch-size 6 --n-samples-per-prompt 4 --save-interval 2"


def begin(run: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "train.py", *FLAGS.split(), "--view", "lines", "--output-dir", str(run), *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "seed"),
    [
        ("--max-staleness 0", 1),
        ("--max-staleness 1", 2),
        ("--max-staleness 2", 3),
        ("--runners process:2", 4),
        ("--max-staleness 1 --task-sampling learnable", 5),
    ],
)
async def test_a_run_that_was_killed_and_resumed_is_the_one_that_was_not(tmp_path: Path, flags: str, seed: int) -> None:
    rng = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert begin(whole, flags.split()).wait(600) == 0
    for iteration in sorted(rng.sample(range(1, 5), 3)):
        resume = ["--resume"] if (killed / "config.json").exists() else []
        with begin(killed, [*flags.split(), *resume]) as process:
            metrics = killed / "metrics.jsonl"
            await until(lambda m=metrics, n=iteration: m.exists() and m.read_bytes().count(b"\n") >= n, 600)
            with pytest.raises(subprocess.TimeoutExpired):  # somewhere in the next iteration
                process.wait(rng.random() * 0.5)
            process.send_signal(signal.SIGKILL)
    assert begin(killed, [*flags.split(), "--resume"]).wait(600) == 0
    assert content_of(whole) == content_of(killed)
