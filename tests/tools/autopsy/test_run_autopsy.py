"""``train.py --autopsy N``: a clean run raises no alarm, and a planted fault raises the one that names it."""

from __future__ import annotations

import asyncio
import io
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.cli.local import run_training
from agl_slime.cli.settings import train_config
from agl_slime.engine.client import replay
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.engine.scoring import ScoringClient
from agl_slime.errors import EngineServerError
from agl_slime.report import read_metrics
from agl_slime.report.alarms import Alarm, find_alarms
from tests.harness.engine_servers import engine_in_thread
from tests.harness.moe_policy import save_moe
from tests.tools.runs import needs_torch

pytestmark = needs_torch

ITERATIONS = 3


class Trained:
    """Runs of the tiny policy on the shared engine, which has its first weights back afterwards."""

    def __init__(self, policy: Path, url: str, directory: Path) -> None:
        self._policy, self._url, self._directory = policy, url, directory

    def __call__(self, **settings: Any) -> tuple[list[dict[str, Any]], list[Alarm], str]:
        """The lines of metrics.jsonl, the alarms of mismatches, and the output."""
        few: dict[str, Any] = {"num_iterations": ITERATIONS, "rollout_batch_size": 4, "eval_interval": 0}
        model = {"model_path": self._policy, "sglang_url": self._url, "output_dir": self._directory}
        out = io.StringIO()
        asyncio.run(run_training(train_config(**{**few, **model, **settings}), console=Console(file=out, width=400)))
        rows = read_metrics(self._directory / "metrics.jsonl")
        return rows, [alarm for alarm in find_alarms(rows, []) if alarm.kind == "mismatch"], out.getvalue()


@pytest.fixture
def trained(policy_dir: Path, embedded_engine: str, tmp_path: Path) -> Iterator[Trained]:
    push = DiskWeightSync.push
    yield Trained(policy_dir, embedded_engine, tmp_path / "run")
    asyncio.run(push(DiskWeightSync(base_url=embedded_engine), str(policy_dir), "0"))


def figures(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[f"autopsy/{name}"] for row in rows if f"autopsy/{name}" in row]


def assert_clean(rows: list[dict[str, Any]], alarms: list[Alarm], out: str, *, iterations: int) -> None:
    assert alarms == []
    assert "engine and trainer differ" not in out
    for name in ("sampler", "decode"):
        assert len(figures(rows, name)) == iterations
        assert max(figures(rows, name)) < 1e-4


def test_a_clean_run_has_small_differences_and_no_alarm(trained: Trained) -> None:
    rows, alarms, out = trained(autopsy=3)
    assert_clean(rows, alarms, out, iterations=ITERATIONS)


def test_weights_that_came_late_are_named(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    push = DiskWeightSync.push

    async def late(self: DiskWeightSync, path: str, version: str) -> None:
        previous = Path(path).with_name(f"v{int(version) - 1:06d}")
        await push(self, str(previous if previous.exists() else path), version)

    monkeypatch.setattr(DiskWeightSync, "push", late)
    # rewards that differ in every group move the policy in the first step
    rewards = itertools.cycle([0.0, 1.0])
    monkeypatch.setattr(LookupAgent, "compute_reward", lambda self, task, response: next(rewards))
    rows, (alarm,), out = trained(autopsy=16)  # a single short turn may hardly have moved
    assert (alarm.about, alarm.iteration) == ("late_weights", 2)
    assert alarm.text.startswith("late_weights explains")
    assert "late_weights: the engine had the weights of version 0" in out
    assert "Worst token" in out
    assert figures(rows, "sampler")[0] < 1e-4 < 1e-3 < figures(rows, "sampler")[1]
    assert max(figures(rows, "decode")) < 1e-4  # the engine agrees with itself


def test_another_temperature_of_the_engine_is_named(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = SamplingParams.to_payload

    def cooler(self: SamplingParams) -> dict[str, Any]:
        return payload(self) | {"temperature": 0.7}

    monkeypatch.setattr(SamplingParams, "to_payload", cooler)
    rows, (alarm,), out = trained(num_iterations=1)
    assert (alarm.about, alarm.iteration) == ("temperature", 1)
    assert "the log-probs are at temperature 0.7 and not 1" in out
    assert figures(rows, "decode")[0] > 1e-3


def test_a_wrong_replay_of_the_router_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a run of a mixture of experts that is clean without it."""
    policy, parse = save_moe(tmp_path / "moe"), replay.parse_experts

    def late(*args: Any, **options: Any) -> Any:
        """The rows one token late."""
        experts = parse(*args, **options)
        return experts and replace(experts, rows=np.r_[experts.rows[:1], experts.rows[:-1]])

    with engine_in_thread(policy) as url:
        assert_clean(*Trained(policy, url, tmp_path / "clean")(autopsy=3, num_iterations=2), iterations=2)
    with engine_in_thread(policy) as url:
        monkeypatch.setattr("agl_slime.engine.client.generation.parse_experts", late)
        rows, (alarm,), out = Trained(policy, url, tmp_path / "run")(autopsy=3, num_iterations=1)
    assert (alarm.about, alarm.iteration) == ("routing", 1)
    assert "routing: the engine used the experts that are recorded for the next token" in out
    assert max(figures(rows, "decode")) < 1e-4 < 1e-3 < figures(rows, "sampler")[0]


def test_an_engine_that_does_not_score_costs_only_its_figures(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise EngineServerError("no scores today")

    monkeypatch.setattr(ScoringClient, "_send", refuse)
    rows, alarms, _ = trained(num_iterations=1)
    assert (figures(rows, "decode"), alarms) == ([], [])
    assert figures(rows, "sampler")[0] < 1e-4


def test_without_turns_nothing_is_scored(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScoringClient, "_send", None)
    rows, _, _ = trained(autopsy=0, num_iterations=1)
    assert not [name for name in rows[0] if name.startswith("autopsy")]
