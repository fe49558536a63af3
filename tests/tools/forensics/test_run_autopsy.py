"""``train.py --autopsy N``: a clean run raises no alarm, and a planted fault raises the one that names it."""

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.engine.scoring import ScoringClient
from agl_slime.errors import EngineServerError
from agl_slime.report import read_metrics
from agl_slime.report.alarms import Alarm, find_alarms
from tests.harness import training
from tests.harness.training import needs_torch, weights_restored

pytestmark = needs_torch


def trained(directory: Path, policy: Path, url: str, **settings: Any) -> tuple[list[dict[str, Any]], list[Alarm], str]:
    """The lines of metrics.jsonl of a run of two iterations, the alarms of mismatches, and the output."""
    settings = {"num_iterations": 2, "rollout_batch_size": 4, "eval_interval": 0, **settings}
    with weights_restored(url, policy):
        out = training.train(model_path=policy, sglang_url=url, output_dir=directory, **settings)
    rows = read_metrics(directory / "metrics.jsonl")
    return rows, [alarm for alarm in find_alarms(rows, []) if alarm.kind == "mismatch"], out


@pytest.fixture
def train(policy_dir: Path, embedded_engine: str, tmp_path: Path) -> Any:
    return partial(trained, tmp_path / "run", policy_dir, embedded_engine)


def figures(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[f"autopsy/{name}"] for row in rows if f"autopsy/{name}" in row]


def test_a_clean_run_has_small_differences_and_no_alarm(train: Any) -> None:
    rows, alarms, out = train(autopsy=3)
    assert (alarms, "engine and trainer differ" in out) == ([], False)
    for name in ("sampler", "decode"):
        assert len(figures(rows, name)) == 2
        assert max(figures(rows, name)) < 1e-4


def test_weights_that_came_late_are_named(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    push = DiskWeightSync.push

    async def late(self: DiskWeightSync, path: str, version: str) -> None:
        previous = Path(path).with_name(f"v{int(version) - 1:06d}" if version.isdigit() else "none")
        await push(self, str(previous if previous.exists() else path), version)

    monkeypatch.setattr(DiskWeightSync, "push", late)
    # rewards that differ in every group move the policy in the first step
    rewards = itertools.cycle([0.0, 1.0])
    monkeypatch.setattr(LookupAgent, "compute_reward", lambda self, task, response: next(rewards))
    rows, (alarm,), out = train(autopsy=16)  # a single short turn may hardly have moved
    assert (alarm.about, alarm.iteration) == ("late_weights", 2)
    assert alarm.text.startswith("late_weights explains")
    assert "late_weights: the engine had the weights of version 0" in out
    assert "Worst token" in out
    assert figures(rows, "sampler")[0] < 1e-4 < 1e-3 < figures(rows, "sampler")[1]
    assert max(figures(rows, "decode")) < 1e-4  # the engine agrees with itself


def test_an_engine_that_does_not_score_costs_only_its_figures(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any) -> None:
        raise EngineServerError("no scores today")

    monkeypatch.setattr(ScoringClient, "_send", refuse)
    rows, alarms, _ = train(num_iterations=1)
    assert (figures(rows, "decode"), alarms) == ([], [])
    assert figures(rows, "sampler")[0] < 1e-4
