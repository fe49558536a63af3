"""Runs of ``--deterministic``: equal to the last bit whatever was slow, full or killed."""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.cli.wiring import RunInputs
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.report.files import iter_jsonl
from agl_slime.tools.compare.command import compare
from tests.harness.engine_servers import engine_in_thread
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
    """Waits for another time before each rollout of each run, and flips a coin of the session's."""

    async def run(self, task: dict[str, Any], session: Any) -> Any:
        await asyncio.sleep(random.random() * 0.05)
        session.add({"role": "user", "content": f"{session.rng.random():.3f}"})
        return await super().run(task, session)


class Clock(LookupAgent):
    async def run(self, task: dict[str, Any], session: Any) -> Any:
        session.add({"role": "user", "content": f"It is {time.time()}."})
        return await super().run(task, session)


class Coin(LookupAgent):
    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return random.random()


def repeatable(run: Path, policy: Path, *, agent: Any = None, limits: Any = None, **settings: Any) -> Path:
    tasks = [{"key": f"k{n}", "answer": f"{n}"} for n in range(6)]
    small = {"num_iterations": 3, "rollout_batch_size": 3, "n_samples_per_prompt": 3, "max_new_tokens": 12}
    with engine_in_thread(policy, deterministic=True, **(limits or {})) as url:
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


@pytest.mark.parametrize(
    ("planted", "settings", "named"),
    [
        (None, {"seed": 6}, r"setting seed: 5 and 6$"),
        (None, {"agent": Clock()}, r"rollout 0 of its group, prompt \d+ is .* after "),
        (None, {"agent": Coin()}, r"equal tokens, and rewards "),
        (seed_by_arrival, {}, r"turn \d: sampled token \d+ is .* after "),
        (last_bit, {}, r"iteration 1, task 0, rollout 0 .* equal tokens, and log-probs -\d.* of token \d+"),
        (
            by_end,
            {"max_staleness": 1},
            r"order: iteration 1 has the group of task 0 in one run alone, there in iteration 2",
        ),
    ],
    ids=["setting", "clock", "reward", "seed", "log-prob", "order"],
)
def test_the_first_difference_is_named(
    reference: Path, policy_dir: Path, tmp_path: Path, planted: Any, settings: Any, named: str
) -> None:
    first = reference
    if "agent" in settings:
        first = repeatable(tmp_path / "first", policy_dir, num_iterations=1, **settings)
        settings = {"num_iterations": 1, **settings}
    elif "max_staleness" in settings:
        first = repeatable(tmp_path / "first", policy_dir, **settings)
    with pytest.MonkeyPatch.context() as patch:
        if planted is not None:
            planted(patch)
        second = repeatable(tmp_path / "second", policy_dir, **settings)
    with pytest.raises(AglSlimeError, match=named):
        compare(first, second)


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
    [("--max-staleness 0", 1), ("--max-staleness 1", 2), ("--max-staleness 2", 3), ("--runners process:2", 4)],
)
async def test_a_run_that_was_killed_and_resumed_is_the_one_that_was_not(tmp_path: Path, flags: str, seed: int) -> None:
    rng = random.Random(seed)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert begin(whole, flags.split()).wait(120) == 0
    for iteration in sorted(rng.sample(range(1, 6), 3)):
        resume = ["--resume"] if (killed / "config.json").exists() else []
        with begin(killed, [*flags.split(), *resume]) as process:
            metrics = killed / "metrics.jsonl"
            await until(lambda m=metrics, n=iteration: m.exists() and m.read_bytes().count(b"\n") >= n, 90)
            with pytest.raises(subprocess.TimeoutExpired):  # somewhere in the next iteration
                process.wait(rng.random() * 0.5)
            process.send_signal(signal.SIGKILL)
    assert begin(killed, [*flags.split(), "--resume"]).wait(120) == 0
    assert content_of(whole) == content_of(killed)
