"""Settings of a run that cannot be used are one sentence that names the flag."""

import math
from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.access import sampling_of
from agl_slime.cli.config_file import parse_train_config
from agl_slime.cli.settings import train_config
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import ConfigError
from agl_slime.gateway.server import client_sampling
from agl_slime.support.agl import LLM
from agl_slime.train.local.settings import LocalTrainerSettings

URL = "http://x:1"
SLIME = {"trainer": "slime"}
NO_REWARDS = LocalTrainerSettings(std_normalization=False, rewards_normalization=False)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"group_min_ratio": 0.0}, r"^--group-min-ratio .*\(0, 1\], got 0\.0"),
        ({"group_timeout": 0.0}, "^--group-timeout must be above 0 seconds"),
        ({"max_staleness": -1}, r"^--max-staleness must be 0 \(synchronous\) or more"),
        ({"temperature": math.inf}, "^--temperature must be a finite number .* got inf"),
        ({"seed": -1}, "^--seed must be 0 or more, got -1"),
        ({"rollout_batch_size": 10**23}, "^--rollout-batch-size must be at most 100000"),
        ({"n_samples_per_prompt": 1}, "^--n-samples-per-prompt 1: there is nothing to compare"),
        ({"resume": True}, "^--resume needs --output-dir"),
        ({"resume": True, "overwrite": True, "output_dir": Path("x")}, "give one of them$"),
        ({"chat_template_kwargs": "{x"}, "^--chat-template-kwargs must be a JSON object"),
        ({"actor_num_gpus_per_node": 4}, "^--actor-num-gpus-per-node with --trainer local: only slime uses it"),
        ({"eval_sglang_url": URL}, f"^--eval-sglang-url {URL}: only asynchronous training uses it"),
        ({"engine": "sglang", "sglang_url": URL}, f"^--engine sglang: the server at --sglang-url {URL} already runs"),
        ({"eval_sampling": '{"temp": 0}'}, "^--eval-sampling .*temp"),
        ({"eval_sampling": '{"top_p": 2}'}, "^--eval-sampling .*top_p must be in"),
        ({"weight_pause": "in_place"}, "^--weight-pause with --trainer local: nothing is sampled while"),
        ({"eval_interval": 0, "eval_tasks": Path("t")}, "^--eval-tasks with --trainer local: there are no validations"),
        ({"store_host": "10.0.0.1"}, "^--store-host with --trainer local: the runners are in this process"),
        ({"local": NO_REWARDS}, r"^--local\.no-std-normalization: with --local\.no-rewards-normalization"),
        ({**SLIME, "resume": True, "output_dir": Path("x")}, "^--resume with --trainer slime: slime keeps its own"),
        ({**SLIME, "env": "x"}, "^--env x with --trainer slime: .* take --trainer local"),
        ({**SLIME, "weight_pause": "in_place"}, "^--weight-pause with --trainer slime"),
        ({**SLIME, "engine": "sglang"}, "^--engine with --trainer slime: slime starts its own engines"),
        ({**SLIME, "local": LocalTrainerSettings(lr=1e-3)}, "^--local.lr 0.001 with --trainer slime"),
    ],
)
def test_invalid_settings_name_the_flag(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train_config(**settings)


def test_template_settings_are_sampling_parameters_hidden_from_the_engine() -> None:
    assert train_config().template == {}
    config = train_config(chat_template_kwargs='{"preserve_thinking": true}', later_systems="first")
    assert config.template == {"chat_template_kwargs": {"preserve_thinking": True}, "later_systems": "first"}
    llm = LLM(endpoint=URL, model="m", sampling_parameters={"temperature": 0.5, **config.template})
    assert sampling_of(llm) == SamplingParams(temperature=0.5)
    empty = {"chat_template_kwargs": {}, "later_systems": ""}
    assert sampling_of(LLM(endpoint="", model="m", sampling_parameters=empty)).extra == {}
    assert client_sampling(llm.sampling_parameters) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("alias", "flag"),
    [
        ("--learning-rate=1e-5", "--local.lr"),
        ("--batch_size", "--rollout-batch-size"),
        ("--max-steps", "--num-iterations"),
        ("--beta", "--local.kl-coef"),
    ],
)
def test_flags_of_other_trainers_are_answered_with_ours(alias: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{alias.partition(chr(61))[0]}: there is no such flag; give {flag}"):
        parse_train_config([alias, "1"])
    parse_train_config([flag, "2"])  # the named flag exists
