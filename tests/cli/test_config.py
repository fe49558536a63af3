"""Settings of a run that cannot be used are one sentence that names the flag."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.access import sampling_of
from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.cli.config_file import parse_train_config
from agl_slime.cli.settings import train_config
from agl_slime.cli.start import load_parts
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import ConfigError
from agl_slime.gateway.server import client_sampling
from agl_slime.support.agl import LLM
from agl_slime.tokens.images import ImageSettings
from agl_slime.train.local.settings import LocalTrainerSettings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"group_min_ratio": 0.0}, r"^--group-min-ratio .*\(0, 1\], got 0\.0"),
        ({"group_min_ratio": 1.1}, r"^--group-min-ratio .*got 1\.1"),
        ({"group_timeout": 0.0}, "^--group-timeout must be above 0 seconds"),
        ({"group_max_retries": -1}, "^--group-max-retries must be 0 or more, got -1"),
        ({"max_staleness": -1}, r"^--max-staleness must be 0 \(synchronous\) or more"),
        ({"max_turns": 0}, "^--max-turns must be above 0"),
        ({"save_interval": 0}, "^--save-interval must be at least 1, got 0"),
        ({"resume": True}, "^--resume needs --output-dir"),
        ({"chat_template_kwargs": "[1]"}, r"^--chat-template-kwargs must be a JSON object .*got '\[1\]'"),
        ({"chat_template_kwargs": "{x"}, "^--chat-template-kwargs must be a JSON object"),
        ({"resume": True, "overwrite": True, "output_dir": Path("x")}, "give one of them$"),
        (
            {"resume": True, "trainer": "slime", "output_dir": Path("x")},
            "^--resume with --trainer slime: slime keeps its own checkpoints",
        ),
        ({"actor_num_nodes": 2}, "^--actor-num-nodes with --trainer local"),
        ({"actor_num_gpus_per_node": 4}, "^--actor-num-gpus-per-node with --trainer local"),
        ({"rollout_num_gpus": 2}, "^--rollout-num-gpus with --trainer local"),
        ({"env": "x", "trainer": "slime"}, "^--env x with --trainer slime: .* take --trainer local"),
        ({"weight_pause": "in_place", "trainer": "slime"}, "^--weight-pause with --trainer slime"),
        ({"eval_sglang_url": "http://x:1"}, "^--eval-sglang-url http://x:1: only asynchronous training uses it"),
        ({"eval_sglang_url": "http://x:1", "trainer": "slime"}, "^--eval-sglang-url with --trainer slime"),
        (
            {"engine": "sglang", "sglang_url": "http://x:1"},
            "^--engine sglang: the server at --sglang-url http://x:1 already runs; give one of them$",
        ),
        ({"engine": "sglang", "trainer": "slime"}, "^--engine with --trainer slime: slime starts its own engines"),
        ({"sglang_python": Path("p"), "trainer": "slime"}, "^--sglang-python with --trainer slime"),
        ({"sglang_python": Path("p")}, "^--sglang-python p: add --engine sglang, or leave it out$"),
        ({"drop_zero_variance": True, "trainer": "slime"}, "^--drop-zero-variance with --trainer slime"),
        ({"weight_pause": "in_place"}, "^--weight-pause with --trainer local: nothing is sampled while"),
        ({"eval_interval": 0, "eval_rollouts": 8}, "^--eval-rollouts with --trainer local: there are no validations"),
        ({"eval_interval": 0, "eval_tasks": Path("t")}, "^--eval-tasks with --trainer local: there are no validations"),
        ({"store_host": "10.0.0.1"}, "^--store-host with --trainer local: the runners are in this process"),
        (
            {"local": LocalTrainerSettings(std_normalization=False, rewards_normalization=False)},
            r"^--local\.no-std-normalization: with --local\.no-rewards-normalization",
        ),
        ({"rollout_batch_size": 10**23}, "^--rollout-batch-size must be at most 100000"),
    ],
)
def test_invalid_settings_name_the_flag(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        train_config(**settings)


def test_a_staleness_of_0_is_a_limit_and_not_none() -> None:
    assert train_config(max_staleness=0).loop.max_staleness == 0


def test_hosts_of_images_are_a_flag_and_reach_gateway_and_agent(tmp_path: Path) -> None:
    config = parse_train_config(["--image-hosts", "pictures.example"])
    limits = ImageSettings(image_hosts=("pictures.example",))
    assert config.gateway.images == limits
    parts = asyncio.run(load_parts(config))
    assert isinstance(parts.agent, SGLangLitAgent)
    assert parts.agent.image_settings == limits
    other = asyncio.run(load_parts(train_config()))
    assert isinstance(other.agent, SGLangLitAgent)
    assert other.agent.image_settings is SGLangLitAgent.image_settings  # an agent's own stay


def test_template_settings_are_sampling_parameters_hidden_from_the_engine() -> None:
    assert train_config().template == {}
    config = train_config(chat_template_kwargs='{"preserve_thinking": true}', later_systems="first")
    assert config.template == {"chat_template_kwargs": {"preserve_thinking": True}, "later_systems": "first"}
    llm = LLM(endpoint="http://x", model="m", sampling_parameters={"temperature": 0.5, **config.template})
    assert sampling_of(llm) == SamplingParams(temperature=0.5)
    empty = {"chat_template_kwargs": {}, "later_systems": ""}
    assert sampling_of(LLM(endpoint="", model="m", sampling_parameters=empty)).extra == {}
    assert client_sampling(llm.sampling_parameters) == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ("--learning-rate=1e-5", "--local.lr"),
        ("--lr", "--local.lr"),
        ("--batch_size", "--rollout-batch-size"),
        ("--num-generations", "--n-samples-per-prompt"),
        ("--max-tokens", "--max-new-tokens"),
        ("--max-steps", "--num-iterations"),
        ("--beta", "--local.kl-coef"),
    ],
)
def test_flags_of_other_trainers_are_answered_with_ours(given: str, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{given}: there is no such flag; give {flag}"):
        parse_train_config([given, "1"])
    parse_train_config([flag, "2"])  # the named flag exists
