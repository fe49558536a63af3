from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_slime.train.local import LocalTrainerSettings
from agl_slime.train.local.settings import default_lr


def run_without_torch(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a Python where torch cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None\n{code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_batches_and_settings_need_no_torch():
    result = run_without_torch(
        "from agl_slime.train.local import LocalTrainerSettings, TrainBatch; print(LocalTrainerSettings().clip)"
    )
    assert (result.returncode, result.stdout.strip()) == (0, "0.2"), result.stderr


def test_trainer_without_torch_names_the_extra_to_install():
    code = (
        "from agl_slime.errors import MissingDependencyError\n"
        "try:\n    from agl_slime.train.local import LocalTrainer\n"
        "except MissingDependencyError as error:\n    print(error)"
    )
    result = run_without_torch(code)
    assert (result.returncode, result.stdout.strip()) == (
        0,
        'the local trainer needs torch: pip install "agl-slime[local]"',
    ), result.stderr


def test_torchs_threads_are_left_alone_unless_asked_for(tmp_path: Path):
    """A trainer in somebody else's program changes nothing there; the command line asks for one thread."""
    torch = pytest.importorskip("torch")
    from agl_slime.train.local import LocalTrainer
    from tests.harness.trainer_policy import save_policy

    policy = save_policy(tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        LocalTrainer(model_path=policy)
        assert torch.get_num_threads() == 3
        LocalTrainer(model_path=policy, torch_threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("width", "settings", "warned"),
    [
        (100, {"lr": 5e-4}, False),
        (4_000, {"lr": 5e-4}, True),
        (4_000, {}, False),
        (4_000, {"lr": 2e-5}, False),
        (4_000, {"lr": 5e-4, "lora_rank": 8}, False),
    ],
)
def test_the_tiny_policys_learning_rate_warns_with_a_large_model(
    width: int, settings: dict[str, Any], warned: bool
) -> None:
    torch = pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from agl_slime.cli.local import learning_rate_warning

    warning = learning_rate_warning(LocalTrainerSettings(**settings), torch.nn.Linear(width, width, device="meta"))
    assert [*warning] == ["learning_rate"] * warned
    assert all("--local.lr 0.0005" in text and "the default is 2e-05" in text for text in warning.values())


def test_the_default_learning_rate_falls_with_the_model_size(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from agl_slime.train.local.trainer import LocalTrainer
    from tests.harness.trainer_policy import save_policy

    rates = [default_lr(n, lora=False) for n in (128_000, 9_999_999, 10_000_000, 135_000_000, 1_000_000_000)]
    assert rates == [5e-4, 5e-4, 2e-5, 2e-5, 1e-6]
    assert default_lr(128_000, lora=True) == 5e-4
    assert default_lr(135_000_000, lora=True) == pytest.approx(2e-4)
    policy = save_policy(tmp_path)
    assert LocalTrainer(model_path=policy).lr == 5e-4
    assert LocalTrainer(model_path=policy, settings=LocalTrainerSettings(lr=3e-3)).lr == 3e-3


def test_the_settings_that_a_large_model_gets_are_said_in_a_line() -> None:
    torch = pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from agl_slime.cli.local import about_model
    from agl_slime.cli.settings import train_config

    config = train_config(max_new_tokens=77)
    assert about_model(config, torch.nn.Linear(100, 100, device="meta"), lr=5e-4) == ""
    text = about_model(config, torch.nn.Linear(4_000, 4_000, device="meta"), lr=2e-5)
    assert text == (
        "16 million parameters are trained at learning rate 2e-05 (--local.lr); an answer ends at 77 tokens "
        "(--max-new-tokens)"
    )
