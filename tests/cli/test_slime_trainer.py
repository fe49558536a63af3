"""slime as the trainer, as far as it can be tested without slime: its flags, and the loop's two functions over it."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.cli.slime import SlimeSteps, check_slime_args, loop_flags
from agl_slime.errors import ConfigError
from agl_slime.metric_names import TOKENS_TRAINED


def _config(**settings: Any) -> TrainConfig:
    return train_config(model_path=Path("/model"), trainer="slime", **settings)


def _value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_the_loops_settings_become_slimes_flags() -> None:
    config = _config(rollout_batch_size=4, n_samples_per_prompt=2, temperature=0.7)
    engines = ("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    flags = loop_flags(config, engines=engines, router=("10.0.0.9", 3000))
    assert (_value(flags, "--global-batch-size"), _value(flags, "--rollout-temperature")) == ("8", "0.7")
    assert flags[flags.index("--rollout-external-engine-addrs") + 1 :][:2] == ["10.0.0.1:30000", "10.0.0.2:30000"]
    assert (_value(flags, "--sglang-router-ip"), _value(flags, "--sglang-router-port")) == ("10.0.0.9", "3000")
    assert "--rollout-num-gpus" not in flags
    assert "--override-opt_param-scheduler" in flags  # a resume has more steps than its checkpoint's schedule
    assert _value(flags, "--data-source-path") == "agl_slime.AGLDataSource"
    # under in-place pauses slime's default for evaluations is its own function
    assert _value(flags, "--eval-function-path") == "agl_slime.slime_hooks.generate_rollout"

    flags = loop_flags(_config(rollout_num_gpus=8), router=(None, 3100))  # slime launches the engines
    assert (_value(flags, "--rollout-num-gpus"), _value(flags, "--sglang-router-port")) == ("8", "3100")
    assert not {"--sglang-router-ip", "--rollout-external-engine-addrs"} & {*flags}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ({"eval_temperature": 0.0}, "--eval-temperature"),
        ({"release_train": True}, "--release-train"),
        ({"num_rollout": 9}, "--num-rollout 9 .*--num-iterations 40"),
        ({"rollout_external_engine_addrs": ["w:1"]}, "--rollout-num-gpus 2: the engines at --sglang-url have 4 GPUs"),
    ],
)
def test_slime_flags_that_contradict_the_loop_are_refused(flag: dict[str, Any], sentence: str) -> None:
    args = Namespace(num_rollout=40, rollout_batch_size=16, n_samples_per_prompt=4, rollout_num_gpus=4)
    check_slime_args(args, _config(rollout_num_gpus=2))
    with pytest.raises(ConfigError, match=sentence):
        check_slime_args(Namespace(**{**vars(args), **flag}), _config(rollout_num_gpus=2))


class Trainer(SimpleNamespace):
    first_rollout_id = 5
    updates = 3
    saved = None

    def train(self, rollout_id: int) -> int:
        self.trained.append(rollout_id)
        return 100

    def saves(self, rollout_id: int) -> bool:
        return False

    def update_weights(self) -> str:
        self.updates += 1
        return str(self.updates)


class Source(SimpleNamespace):
    def get_samples(self, n: int) -> list[Any]:
        self.deliverable -= n
        return [[]] * n


def test_a_short_batch_waits_for_the_next_iteration_and_nothing_is_dropped() -> None:
    source, trainer = Source(deliverable=4), Trainer(trained=[])
    steps: Any = SlimeSteps(trainer=trainer, source=source, batch_size=4)  # type: ignore[arg-type]
    assert steps.train(1)[TOKENS_TRAINED] == 100
    assert steps.sync(1) == "4"
    source.deliverable = 3  # a group was dropped
    assert steps.train(2) == {"train/waiting_groups": 3.0}
    assert steps.sync(2) == "4"  # no weight update without a step
    source.deliverable += 4
    steps.train(3)
    assert steps.sync(3) == "5"
    assert trainer.trained == [5, 6]  # slime's numbers continue from its checkpoint, without a gap
    assert source.deliverable == 3
