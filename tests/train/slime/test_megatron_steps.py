"""Steps of slime's Megatron actors without Ray: their losses beside ``agl-slime replay``, log-probs beside
transformers, weights of parallel layouts and of resumed checkpoints beside one rank's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl_slime.tools.forensics.autopsy import AutopsyConfig, autopsy
from agl_slime.tools.forensics.replay_slime import replay_dump
from agl_slime.tools.forensics.steps import ReplayConfig
from tests.harness.megatron import require_megatron
from tests.harness.slime_programs import require_slime, run_program
from tests.programs.slime.steps import LAYOUTS, LOSSES, RESUMES, TEACHER

pytestmark = [pytest.mark.slime, pytest.mark.megatron]


@pytest.fixture(scope="module")
def logs(directory: Path) -> dict[str, dict[str, float]]:
    require_megatron()
    return run_program(require_slime(), "steps", directory, timeout_s=420)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_replayed_with_its_figures(name: str, logs: dict[str, Any], directory: Path):
    flags = LOSSES[name].replace(TEACHER, str(directory / "teacher")).split()
    config = ReplayConfig(run_dir=directory / name, step=0, model=directory / "policy")
    result = replay_dump(config, slime_flags=flags)
    apart = {comparison.name: comparison.difference for comparison in result.comparisons}
    by_transformers = "the checkpoint's log-probs"
    assert {"normalized rewards", "advantages", by_transformers} <= apart.keys()
    assert apart == pytest.approx(dict.fromkeys(apart, 0.0), abs=1e-5)
    compared = logs[name].keys() & result.computed.keys()
    assert compared >= {f"train/{figure}" for figure in ("loss", "pg_clipfrac", "ppo_kl", "grad_norm", "entropy_loss")}
    assert {figure: result.computed[figure] for figure in compared} == pytest.approx(
        {figure: logs[name][figure] for figure in compared}, abs=1e-5
    )
    # without the flags, the rule of rewards follows from the recorded ones
    inferred = {comparison.name: comparison.difference for comparison in replay_dump(config).comparisons}
    assert inferred["normalized rewards"] == pytest.approx(0.0, abs=1e-5)


def test_an_autopsy_tells_the_engines_noise_from_megatrons_log_probs(logs: dict[str, Any], directory: Path):
    scored = AutopsyConfig(run_dir=directory / "grpo", step=0, model=directory / "policy", samples=12)
    diagnosis, case = asyncio.run(autopsy(scored))
    assert len(case.samples) == 12
    assert diagnosis.differences["trainer"] < 1e-5
    assert diagnosis.first is None, diagnosis.sentence
    assert 0.05 < diagnosis.differences["sampler"] < 0.11  # noise of 0.1


# Adam's first step is a gradient over its own size, which makes sums in another order visible
STEPPED = [(name, "grpo", 1e-4 if name == "cp2" else 5e-5) for name in LAYOUTS]
STEPPED.append(("converted", "grpo", 1e-9))


@pytest.mark.parametrize(
    ("name", "expected", "within"), [*STEPPED, *((f"{name}_later", "two_steps", 1e-6) for name in RESUMES)]
)
def test_weights_are_the_one_ranks(name: str, expected: str, within: float, logs: dict[str, Any], directory: Path):
    """Of layouts after a step, of its checkpoint by slime's converter, and of a second step from the checkpoint."""
    before, ours, theirs = (weights(directory / part) for part in ("policy", f"{name}/weights", f"{expected}/weights"))
    assert ours.keys() - theirs.keys() <= {"lm_head.weight"}  # of a tied model, by slime under pp
    for key, value in theirs.items():
        assert float((ours[key] - value).abs().max()) < within, key
    assert max(float((value - before[key]).abs().max()) for key, value in theirs.items()) > 9e-4


@pytest.mark.parametrize("name", ["turns", "turns_cp2"])
def test_a_sample_with_turns_rewards_has_the_gradient_of_one_per_reward(
    name: str, logs: dict[str, Any], directory: Path
):
    before, ours, theirs = (weights(directory / part) for part in ("policy", f"{name}/weights", "turns_split/weights"))
    moved = {key: value - before[key] for key, value in theirs.items()}
    apart = sum(float((value - before[key] - moved[key]).square().sum()) for key, value in ours.items() if key in moved)
    size = sum(float(value.square().sum()) for value in moved.values())
    assert size > 1e-2
    assert (apart / size) ** 0.5 < 3e-6
    assert logs[name]["train/loss"] == pytest.approx(logs["turns_split"]["train/loss"], abs=1e-6)


def weights(directory: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {key: value for path in directory.rglob("*.safetensors") for key, value in load_file(path).items()}
