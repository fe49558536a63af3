"""``agl-slime replay``: a step from files is the recorded one, and with changes the step that would have been."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='a replay needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.replay import Replay, ReplayConfig, print_influences, replay  # noqa: E402
from agl_slime.errors import ConfigError  # noqa: E402
from agl_slime.report.autopsy import unpack  # noqa: E402
from agl_slime.report.files import IterationFile, jsonable  # noqa: E402
from agl_slime.report.rollouts import describe_batch, describe_tokens, pack  # noqa: E402
from agl_slime.train.local import LocalTrainerSettings  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples  # noqa: E402
from tests.harness.trainers import trainer  # noqa: E402

SETTINGS = LocalTrainerSettings(n_minibatches=2, lr=1e-3)
Batch = list[list[Sample]]


def batch_of(iteration: int) -> Batch:
    samples = make_samples(make_model(), groups=2, seed=iteration)
    for number, one in enumerate(samples):
        one.rollout_id = number
        one.metadata = {"agl_rollout_id": f"r{iteration}.{number}", "instance_id": str(number // 4), "weight_spans": []}
    return [samples[:4], samples[4:]]


@pytest.fixture(scope="module")
def run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run of two iterations."""
    directory = tmp_path_factory.mktemp("run")
    config = {"trainer": "local", "temperature": 1.0, "seed": 0, "local": jsonable(SETTINGS)}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "start.json").write_text(json.dumps({"model": str(policy)}))
    ours, metrics = trainer(policy, SETTINGS), IterationFile(directory / "metrics.jsonl")
    trained, rollouts = IterationFile(directory / "trained.jsonl"), IterationFile(directory / "rollouts.jsonl")
    for iteration in (1, 2):
        batch = batch_of(iteration)
        metrics.append(iteration, [ours.train(batch, iteration=iteration)])
        trained.append(iteration, describe_batch(batch, ours.scores))
        lines = [(s.metadata["agl_rollout_id"], describe_tokens(s, lambda _: [])) for g in batch for s in g]  # type: ignore[arg-type]
        rollouts.append(iteration, [{"rollout_id": name, "samples": [tokens]} for name, tokens in lines])
    for file in (metrics, trained, rollouts):
        file.close()
    return directory


def step_two(policy: Path, change: Callable[[Batch], None], **settings: Any) -> dict[str, float]:
    """The second step of a trainer that never saw the files."""
    ours = trainer(policy, SETTINGS)
    ours.train(batch_of(1), iteration=1)
    ours.settings, batch = replace(SETTINGS, **settings), batch_of(2)
    change(batch)
    return ours.train(batch, iteration=2)


def same(result: Replay, expected: dict[str, float]) -> None:
    assert result.changed is not None
    assert result.changed == {name: expected[name] for name in result.recorded}
    assert result.changed["train/loss"] != result.recorded["train/loss"]


@pytest.mark.parametrize("step", [1, 2])
def test_a_step_from_files_equals_the_recorded_one_bit_by_bit(run: Path, step: int):
    result = replay(ReplayConfig(run_dir=run, step=step))
    assert (result.difference, result.changed) == (0.0, None)
    assert result.recorded["train/grad_norm"] > 0


def test_without_a_rollout_equals_training_without_it(run: Path, policy: Path):
    def drop(batch: Batch) -> None:
        batch[0][1].remove_sample = True

    result = replay(ReplayConfig(run_dir=run, step=2, without=("r2.1",)))
    assert result.difference == 0.0
    same(result, step_two(policy, drop))


def test_influences_of_a_step_name_its_rollouts_and_moved_tokens(run: Path, capsys: pytest.CaptureFixture[str]):
    result = replay(ReplayConfig(run_dir=run, step=2, influences=3))
    assert result.difference == 0.0  # the step stays the recorded one
    found = result.influences
    assert found is not None
    assert [*found.rollouts] == [f"r2.{number}" for number in range(8)]
    assert (found.of.sketch, found.lr) == (0, SETTINGS.lr)
    assert found.of.shares.sum() == pytest.approx(1.0)
    assert len(found.tokens) == sum(sum(one.loss_mask or ()) for group in batch_of(2) for one in group)
    changes = [abs(one.after - one.before) for one in found.tokens]
    assert changes == sorted(changes, reverse=True)
    print_influences(found, most=3)
    shown = capsys.readouterr().out
    assert "exact" in shown
    assert found.rollouts[abs(found.of.shares).argmax()] in shown
    assert f"at {found.tokens[0].place} of {found.tokens[0].rollout_id}" in shown
    assert replay(ReplayConfig(run_dir=run, step=2)).influences is None


def test_another_reward_equals_training_with_it(run: Path, policy: Path, tmp_path: Path):
    (tmp_path / "mine.py").write_text("def last(line):\n    return int(line['rollout_id'][-1]) / 2\n")

    def reward(batch: Batch) -> None:
        for one in (one for group in batch for one in group):
            one.reward = int(one.metadata["agl_rollout_id"][-1]) / 2

    same(replay(ReplayConfig(run_dir=run, step=2, reward=f"{tmp_path / 'mine.py'}:last")), step_two(policy, reward))


def test_another_loss_equals_training_with_it(run: Path, policy: Path):
    result = replay(ReplayConfig(run_dir=run, step=2, loss="cispo", clip=0.5))
    same(result, step_two(policy, lambda _: None, loss="cispo", clip=0.5))


def test_other_advantages_equal_training_with_them(run: Path, policy: Path):
    result = replay(ReplayConfig(run_dir=run, step=2, advantages="mean"))
    same(result, step_two(policy, lambda _: None, std_normalization=False))
    result = replay(ReplayConfig(run_dir=run, step=2, advantages="reward"))
    same(result, step_two(policy, lambda _: None, rewards_normalization=False))


def test_start_model_that_moved_is_named(run: Path, policy: Path, tmp_path: Path):
    moved = changed_run(run, tmp_path / "moved", lambda lines: lines)
    (moved / "start.json").unlink()
    with pytest.raises(ConfigError, match=r"give --model$"):
        replay(ReplayConfig(run_dir=moved, step=1))
    assert replay(ReplayConfig(run_dir=moved, step=1, model=policy)).difference == 0.0


def changed_run(run: Path, target: Path, change: Callable[[list[dict[str, Any]]], Sequence[dict[str, Any]]]) -> Path:
    target.mkdir()
    for path in run.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    lines = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    (target / "rollouts.jsonl").unlink()
    file = IterationFile(target / "rollouts.jsonl")
    file.append(1, [{k: v for k, v in line.items() if k not in ("iteration", "crc")} for line in change(lines)])
    file.close()
    return target


def test_files_that_are_not_the_trained_ones_are_refused(run: Path, tmp_path: Path):
    def other(lines: list[dict[str, Any]], *, shorter: bool) -> list[dict[str, Any]]:
        lines = copy.deepcopy(lines)
        tokens = lines[0]["samples"][0]
        values = unpack(tokens["engine_log_probs"])
        tokens["engine_log_probs"] = pack(values[1:] if shorter else values - 0.25)
        return lines

    for shorter in (False, True):
        changed = changed_run(run, tmp_path / f"other{shorter}", partial(other, shorter=shorter))
        with pytest.raises(ConfigError, match=r"rollout r1\.0 is not kept as it was trained on"):
            replay(ReplayConfig(run_dir=changed, step=1))
    with pytest.raises(ConfigError, match="1 of 8 rollouts are not kept; train with --keep-rollouts all"):
        replay(ReplayConfig(run_dir=changed_run(run, tmp_path / "fewer", lambda lines: lines[1:]), step=1))
    with pytest.raises(ConfigError, match=r"--step 3: .* has iterations 1 to 2"):
        replay(ReplayConfig(run_dir=run, step=3))
    with pytest.raises(ConfigError, match="--without nobody: step 2 did not train"):
        replay(ReplayConfig(run_dir=run, step=2, without=("nobody",)))
