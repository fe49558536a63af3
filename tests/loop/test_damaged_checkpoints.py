"""Damaged checkpoints: the state that is loaded equals the saved one, from the older checkpoint where the newest is not
whole, or one sentence names the directory."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.partial import PartialRollouts
from agl_slime.data.ledger import Ledger
from agl_slime.data.source import GroupSource
from agl_slime.errors import AglSlimeError
from agl_slime.loop.checkpoint import Checkpoint, CheckpointWriter, load_newest, read_checkpoints
from agl_slime.loop.settings import LoopState
from agl_slime.store.bridge import BridgeStore
from tests.harness.training import needs_torch

pytestmark = needs_torch

STEPS = (3, 6)
ROW = '{"instance_id": "7", "calls": []}\n'


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 3))):
        content[rng.randrange(len(content))] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def zeros(path: Path, rng: random.Random) -> None:
    """A power cut before the last blocks were written."""
    cut(path, rng)
    os.truncate(path, path.stat().st_size + rng.randrange(1, 5_000))


def other_json(path: Path, rng: random.Random) -> None:
    path.write_text(rng.choice(("null", "[]", "{}", "3", '"text"', '{"": null}', "NaN", "[" * 100_000)))


def another_kind(path: Path, rng: random.Random) -> None:
    path.unlink()
    make = rng.choice((os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path), lambda path: None))
    make(path)


def damage(checkpoint: Path, rng: random.Random) -> str:
    """Damage one file of the checkpoint, or its trainer; returns a description."""
    if rng.random() < 0.05:
        shutil.rmtree(checkpoint / "trainer")
        return "no trainer"
    file = rng.choice(sorted(file for file in checkpoint.rglob("*") if file.is_file()))
    kind = rng.choice(
        [flip, cut, zeros, other_json, another_kind] if file.stat().st_size else [other_json, another_kind]
    )
    kind(file, rng)
    return f"{kind.__name__} {file.name}"


def everything(ours: Any) -> dict[str, Any]:
    from tests.harness.trainers import weights

    state = {f"weight {name}": tensor for name, tensor in weights(ours.model).items()}
    for number, moments in ours._optimizer.state_dict()["state"].items():
        state |= {f"{name} {number}": value.clone() for name, value in moments.items()}
    return state | {"steps": ours.steps, "iteration": ours.iteration}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[int, dict[str, Any]]]:
    """A policy, the two checkpoints of a run that trained it, and the state of the trainer in each."""
    from tests.harness.trainer_policy import make_model, make_samples, save_policy
    from tests.harness.trainers import trainer

    directory = tmp_path_factory.mktemp("run")
    ours, samples = trainer(save_policy(directory / "policy")), make_samples(make_model())
    ledger, saved = Ledger(path=directory / "ledger.sqlite"), {}
    with GroupSource(store=BridgeStore(), ledger=ledger) as source:
        writer = CheckpointWriter(
            directory=directory / "checkpoints",
            trainer=ours,
            source=source,
            save_partial=lambda path: path.write_text(ROW) and None,
        )
        for step in STEPS:
            ours.train(samples, iteration=step)
            writer.save(LoopState(iteration=step, version=str(step)))
            saved[step] = everything(ours)
    ledger.close()
    return directory / "policy", directory / "checkpoints", saved


def load(directory: Path, ours: Any) -> tuple[Checkpoint | None, str]:
    """The checkpoint that ``--resume`` begins with, or the sentence why there is none."""
    try:
        checkpoint = load_newest(read_checkpoints(directory), ours)
        PartialRollouts().load(checkpoint.partial)
    except AglSlimeError as error:
        return None, str(error)
    return checkpoint, ""


def test_damaged_checkpoints_are_passed_over_for_the_older_whole_one(run: Any, tmp_path: Path) -> None:
    import torch

    from tests.harness.trainers import trainer

    policy, whole, saved = run
    ours, steps = trainer(policy), set()
    for seed in range(25):
        rng, directory = random.Random(seed), tmp_path / str(seed)
        shutil.copytree(whole, directory)
        done = [damage(directory / "step_000006", rng)]
        if both := rng.random() < 0.15:
            done.append(damage(directory / "step_000003", rng))
        if rng.random() < 0.3:
            name = rng.choice(("step_last", "step_", "step_000099", "step_-1", "step_1e3", "step_²", "notes"))
            rng.choice((Path.touch, Path.mkdir))(directory / name)  # no run has made it
        checkpoint, refusal = load(directory, ours)
        if checkpoint is None:
            assert both, (seed, done, refusal)
            assert str(directory) in refusal, (seed, done, refusal)
            continue
        expected, now = saved[checkpoint.loop.iteration], everything(ours)
        step = checkpoint.loop.iteration
        assert checkpoint.loop == LoopState(iteration=step, version=str(step)), (seed, done)
        assert checkpoint.partial.read_text() == ROW, (seed, done)
        assert now.keys() == expected.keys(), (seed, done)
        for name, value in expected.items():
            same = torch.equal(now[name], value) if torch.is_tensor(value) else now[name] == value
            assert same, (seed, done, name)
        steps.add(step)
    assert STEPS[0] in steps
