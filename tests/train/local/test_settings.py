import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.train.local import LocalTrainerSettings
from agl_slime.train.local.settings import default_lr


def test_only_the_trainer_needs_torch_and_names_the_extra_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from agl_slime.errors import MissingDependencyError\n"
        "from agl_slime.train.local import LocalTrainerSettings, TrainBatch\n"
        "print(LocalTrainerSettings().clip)\n"
        "try:\n    from agl_slime.train.local import LocalTrainer\n"
        "except MissingDependencyError as error:\n    print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    output = '0.2\nthe local trainer needs torch: pip install "agl-slime[local]"\n'
    assert (result.returncode, result.stdout) == (0, output), result.stderr


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"overlong_buffer": 8}, "max_response 0"),
        ({"overlong_buffer": 8, "max_response": 8}, "set max_response"),
        ({"aggregation": "constant"}, "without max_response"),
        ({"max_response": 8}, "max_response is 8; only"),
        ({"loss": "grpo"}, "^loss must be ppo, gspo, cispo or FILE.py:NAME, got"),
        ({"lora_targets": ("q_proj",)}, "lora_targets .* set lora_rank"),
        ({"off_policy": "tis"}, "set old_log_probs to 'recompute'"),
        ({"old_log_probs": "recompute", "tis_clip": 3.0}, "only 'tis' uses it"),
        ({"old_log_probs": "recompute", "off_policy": "tis", "icepop_range": (0.1, 2.0)}, "only 'icepop' uses it"),
    ],
)
def test_settings_that_would_do_nothing_are_refused(fields: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        LocalTrainerSettings(**fields)


@pytest.mark.parametrize(
    ("n_parameters", "settings", "warned"),
    [
        (10_100, {"lr": 5e-4}, False),
        (16_004_000, {"lr": 5e-4}, True),
        (16_004_000, {}, False),
        (16_004_000, {"lr": 2e-5}, False),
        (16_004_000, {"lr": 5e-4, "lora_rank": 8}, False),
    ],
)
def test_the_tiny_policys_learning_rate_warns_with_a_large_model(
    n_parameters: int, settings: dict[str, Any], warned: bool
):
    from agl_slime.cli.local import learning_rate_warning

    warning = learning_rate_warning(LocalTrainerSettings(**settings), n_parameters)
    assert [*warning] == ["learning_rate"] * warned
    assert all("--local.lr 0.0005" in text and "the default is 2e-05" in text for text in warning.values())


def test_a_trainers_defaults_of_learning_rate_and_threads(tmp_path: Path) -> None:
    """A trainer in somebody else's program leaves torch's threads as they are; the command line sets one."""
    torch = pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from agl_slime.train.local import LocalTrainer
    from tests.harness.trainer_policy import save_policy

    rates = [default_lr(n, lora=False) for n in (128_000, 9_999_999, 10_000_000, 135_000_000, 1_000_000_000)]
    assert rates == [5e-4, 5e-4, 2e-5, 2e-5, 1e-6]
    assert default_lr(128_000, lora=True) == 5e-4
    assert default_lr(135_000_000, lora=True) == pytest.approx(2e-4)
    policy = save_policy(tmp_path)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert LocalTrainer(model_path=policy).lr == 5e-4
        assert torch.get_num_threads() == 3
        assert LocalTrainer(model_path=policy, settings=LocalTrainerSettings(lr=3e-3), torch_threads=1).lr == 3e-3
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
