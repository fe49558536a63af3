"""``agl-slime replay``, and a run's own autopsy: a step from files is the recorded one, or the one with a change."""

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.engine.scoring import ScoringClient
from agl_slime.errors import ConfigError, EngineServerError
from agl_slime.report import read_metrics
from agl_slime.report.alarms import Alarm, find_alarms
from agl_slime.report.files import IterationFile, jsonable
from agl_slime.report.rollouts import describe_batch, describe_tokens, pack
from agl_slime.tools.forensics.replay import main, replay
from agl_slime.tools.forensics.steps import ReplayConfig, print_influences
from agl_slime.tools.kept_rollouts import unpack
from agl_slime.train.local import LocalTrainerSettings
from agl_slime.types import Sample
from tests.harness import training
from tests.harness.trainer_policy import make_model, make_samples
from tests.harness.trainers import trainer
from tests.harness.training import needs_torch, run_of, weights_restored

pytestmark = needs_torch

SETTINGS = LocalTrainerSettings(n_minibatches=2, lr=1e-3, epochs=2, kl_coef=0.05, aggregation="rollout")
Batch = list[list[Sample]]


def batch_of(iteration: int) -> Batch:
    samples = make_samples(make_model(), groups=2, seed=iteration)
    for number, sample in enumerate(samples):
        sample.rollout_id, name = number, f"r{iteration}.{number}"
        sample.metadata = {"agl_rollout_id": name, "instance_id": str(number // 4), "weight_spans": []}
    return [samples[:4], samples[4:]]


@pytest.fixture(scope="module")
def run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run of two iterations."""
    directory = tmp_path_factory.mktemp("run")
    config = {"trainer": "local", "temperature": 1.0, "seed": 0, "local": jsonable(SETTINGS)}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "start.json").write_text(json.dumps({"model": str(policy)}))
    ours = trainer(policy, SETTINGS)
    metrics, trained, rollouts = (IterationFile(directory / f"{n}.jsonl") for n in ("metrics", "trained", "rollouts"))
    for iteration in (1, 2):
        batch = batch_of(iteration)
        metrics.append(iteration, [ours.train(batch, iteration=iteration)])
        trained.append(iteration, describe_batch(batch, ours.scores))
        lines = [
            {"rollout_id": s.metadata["agl_rollout_id"], "samples": [describe_tokens(s, lambda _: [])]}  # type: ignore[arg-type]
            for group in batch
            for s in group
        ]
        rollouts.append(iteration, lines)
    for file in (metrics, trained, rollouts):
        file.close()
    return directory


def step_two(policy: Path, change: Callable[[Batch], None] | None, **settings: Any) -> dict[str, float]:
    """The second step of a trainer that never saw the files."""
    ours = trainer(policy, SETTINGS)
    ours.train(batch_of(1), iteration=1)
    ours.settings, batch = replace(SETTINGS, **settings), batch_of(2)
    if change is not None:
        change(batch)
    return ours.train(batch, iteration=2)


def test_steps_from_files_equal_the_recorded_ones_bit_by_bit(run: Path, policy: Path, tmp_path: Path):
    """The start model that has moved is named by its flag."""
    for step in (1, 2):
        result = replay(ReplayConfig(run_dir=run, step=step))
        assert (result.difference, result.changed, result.influences) == (0.0, None, None)
        assert result.recorded["train/grad_norm"] > 0
    moved = shutil.copytree(run, tmp_path / "moved")
    (moved / "start.json").unlink()
    with pytest.raises(ConfigError, match=r"give --model$"):
        replay(ReplayConfig(run_dir=moved, step=1))
    assert replay(ReplayConfig(run_dir=moved, step=1, model=policy)).difference == 0.0


def drop(batch: Batch) -> None:
    batch[0][1].remove_sample = True


def reward(batch: Batch) -> None:
    for sample in (sample for group in batch for sample in group):
        sample.reward = int(sample.metadata["agl_rollout_id"][-1]) / 2


CHANGES: list[tuple[dict[str, Any], Callable[[Batch], None] | None, dict[str, Any]]] = [
    ({"without": ("r2.1",)}, drop, {}),
    ({"reward": "mine.py:last"}, reward, {}),
    ({"loss": "cispo", "clip": 0.5}, None, {"loss": "cispo", "clip": 0.5}),
    ({"advantages": "mean"}, None, {"std_normalization": False}),
    ({"advantages": "reward"}, None, {"rewards_normalization": False}),
]


@pytest.mark.parametrize(("flags", "change", "settings"), CHANGES)
def test_a_changed_step_equals_training_with_the_change(run, policy, tmp_path, flags, change, settings):
    (tmp_path / "mine.py").write_text("def last(line):\n    return int(line['rollout_id'][-1]) / 2\n")
    if "reward" in flags:
        flags = {"reward": f"{tmp_path}/{flags['reward']}"}
    result, expected = replay(ReplayConfig(run_dir=run, step=2, **flags)), step_two(policy, change, **settings)
    assert result.difference == 0.0
    assert result.changed == {name: expected[name] for name in result.recorded}
    assert expected["train/loss"] != result.recorded["train/loss"]


def test_influences_of_a_step_name_its_rollouts_and_moved_tokens(run: Path, capsys: pytest.CaptureFixture[str]):
    result = replay(ReplayConfig(run_dir=run, step=2, influences=3))
    assert result.difference == 0.0  # the step stays the recorded one
    influences = result.influences
    assert influences is not None
    assert [*influences.rollouts] == [f"r2.{number}" for number in range(8)]
    assert (influences.gradients.sketch, influences.lr) == (0, SETTINGS.lr)
    assert influences.gradients.shares.sum() == pytest.approx(1.0)
    assert len(influences.tokens) == sum(sum(sample.loss_mask or ()) for group in batch_of(2) for sample in group)
    changes = [token.size for token in influences.tokens]
    assert changes == sorted(changes, reverse=True)
    print_influences(influences, most=3)
    output = capsys.readouterr().out
    assert "exact" in output
    assert influences.rollouts[abs(influences.gradients.shares).argmax()] in output
    assert f"at {influences.tokens[0].place} of {influences.tokens[0].rollout_id}" in output


def changed_run(run: Path, target: Path, change: Callable[[list[dict[str, Any]]], Sequence[dict[str, Any]]]) -> Path:
    shutil.copytree(run, target)
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    (target / "rollouts.jsonl").unlink()
    with closing(IterationFile(target / "rollouts.jsonl")) as file:
        file.append(1, [{k: v for k, v in line.items() if k not in ("iteration", "crc")} for line in change(lines)])
    return target


def test_files_that_are_not_the_trained_ones_are_refused(run: Path, tmp_path: Path):
    def edited(lines: list[dict[str, Any]], *, shorter: bool) -> list[dict[str, Any]]:
        tokens = lines[0]["samples"][0]
        values = unpack(tokens["engine_log_probs"])
        tokens["engine_log_probs"] = pack(values[1:] if shorter else values - 0.25)
        return lines

    moved = changed_run(run, tmp_path / "moved", partial(edited, shorter=False))
    shorter = changed_run(run, tmp_path / "shorter", partial(edited, shorter=True))
    fewer = changed_run(run, tmp_path / "fewer", lambda lines: lines[1:])
    for directory, flags, sentence in (
        (moved, {"step": 1}, r"rollout r1\.0 is not kept as it was trained on"),
        (shorter, {"step": 1}, r"rollout r1\.0 is not kept as it was trained on"),
        (fewer, {"step": 1}, "1 of 8 rollouts are not kept; train with --keep-rollouts all"),
        (run, {"step": 3}, r"--step 3: .* has iterations 1 to 2"),
        (run, {"step": 2, "without": ("nobody",)}, "--without nobody: step 2 did not train"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            replay(ReplayConfig(run_dir=directory, **flags))  # type: ignore[arg-type]


FEW: dict[str, Any] = {"rollout_batch_size": 2, "autopsy": 0, "keep_rollouts": "all"}


def test_a_step_of_a_run_is_retrained_with_another_reward(policy_dir, embedded_engine, tmp_path, capsys):
    """New rewards differ between rollouts, so that the gradient changes whatever was sampled; the loss is 0 where all
    answers have one length. The run's learning rate follows from the model's size."""
    run = run_of(tmp_path / "run", policy_dir, embedded_engine, num_iterations=2, **FEW)
    assert "autopsy/" not in (run / "metrics.jsonl").read_text()  # with --autopsy 0 nothing is scored again
    (tmp_path / "mine.py").write_text("def number(line):\n    return hash(line['rollout_id']) / 2**64\n")
    result = replay(ReplayConfig(run_dir=run, step=2, reward=f"{tmp_path / 'mine.py'}:number"))
    assert result.difference == 0.0
    assert result.changed is not None
    assert result.changed["train/grad_norm"] != result.recorded["train/grad_norm"]
    main([str(run), "--step", "1", "--influences", "2"])
    output = capsys.readouterr().out
    assert "Largest difference of recorded and again: 0\n" in output
    assert "one plain gradient step with lr 0.0005" in output
    rollouts, tokens = output.split("Rollouts by influence")[1].split("Tokens by the change")
    names = [json.loads(line)["rollout_id"] for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert sum(f"  {name}, most: " in rollouts for name in names) == 2
    assert len(tokens.splitlines()[1:]) == 2


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
