"""What can be said about slime as a trainer without slime."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.main import main
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.cli.slime import check_slime_args, loop_flags
from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.train.local import LocalTrainerSettings
from agl_slime.train.slime.trainer import require_slime


@pytest.fixture
def without_slime(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.split(".")[0] == "slime" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.usefixtures("without_slime")
def test_missing_slime_is_an_error_with_the_fix(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--trainer", "slime", "--sglang-url", "http://127.0.0.1:1", "--", "--lr", "1e-6"]) == 2
    error = capsys.readouterr().err
    assert "slime is not installed" in error
    assert "git clone https://github.com/THUDM/slime" in error
    assert "Traceback" not in error
    with pytest.raises(MissingDependencyError):
        require_slime()


def test_slimes_flags_without_slime_as_the_trainer_are_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--", "--lr", "1e-6"]) == 2
    assert "--trainer slime" in capsys.readouterr().err


def _config(**settings: Any) -> TrainConfig:
    return train_config(model_path=Path("/model"), trainer="slime", **settings)


def _value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_the_loops_settings_become_slimes_flags():
    config = _config(rollout_batch_size=4, n_samples_per_prompt=2, temperature=0.7)
    engines = ("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    flags = loop_flags(config, engines=engines, router=("10.0.0.9", 3000))
    assert (_value(flags, "--global-batch-size"), _value(flags, "--rollout-temperature")) == ("8", "0.7")
    assert flags[flags.index("--rollout-external-engine-addrs") + 1 :][:2] == ["10.0.0.1:30000", "10.0.0.2:30000"]
    assert (_value(flags, "--sglang-router-ip"), _value(flags, "--sglang-router-port")) == ("10.0.0.9", "3000")
    assert "--rollout-num-gpus" not in flags
    assert _value(flags, "--data-source-path") == "agl_slime.AGLDataSource"
    # under in-place pauses slime's default for evaluations is its own function
    assert _value(flags, "--eval-function-path") == "agl_slime.slime_hooks.generate_rollout"


def test_engines_that_slime_launches_get_a_router_at_a_known_port():
    flags = loop_flags(_config(rollout_num_gpus=8), router=(None, 3100))
    assert _value(flags, "--rollout-num-gpus") == "8"
    assert _value(flags, "--sglang-router-port") == "3100"
    assert "--sglang-router-ip" not in flags
    assert "--rollout-external-engine-addrs" not in flags


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"eval_temperature": 0.0}, "--eval-temperature"),
        ({"eval_top_p": 0.9}, "--eval-top-p"),
        ({"eval_max_response_len": 9}, "--eval-max-response-len"),
        ({"eval_interval": 5}, "--eval-interval"),
        ({"dynamic_sampling_filter_path": "a.b"}, "--dynamic-sampling-filter-path"),
        ({"release_train": True}, "--release-train"),
        ({"num_rollout": 9}, "--num-rollout 9 .*--num-iterations 40"),
        ({"rollout_batch_size": 9}, "--rollout-batch-size 9 .*--rollout-batch-size 16"),
    ],
)
def test_slime_flags_that_contradict_the_loop_are_refused(given: dict[str, Any], named: str):
    args = Namespace(num_rollout=40, rollout_batch_size=16, n_samples_per_prompt=4, eval_temperature=None)
    check_slime_args(args, _config())
    with pytest.raises(ConfigError, match=named):
        check_slime_args(Namespace(**{**vars(args), **given}), _config())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"save_interval": 5}, "--save-interval"),
        ({"drop_zero_variance": True}, "--drop-zero-variance"),
        ({"local": LocalTrainerSettings(lr=1e-3)}, "--local.lr 0.001"),
    ],
)
def test_settings_that_slime_would_not_follow_are_refused(given: dict[str, Any], named: str):
    _config(local=LocalTrainerSettings())
    with pytest.raises(ConfigError, match=named):
        _config(**given)
