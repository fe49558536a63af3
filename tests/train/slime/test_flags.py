"""slime's flags and addresses under our hooks: one warning names those without effect."""

import ast
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.runner.ray import require_reachable
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.support.net import http_url, public_host
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.flags import WITHOUT_EFFECT, without_effect
from tests.harness.slime_programs import REPOSITORY, slime_package

HOOK = "agl_slime.slime_hooks.generate_rollout"
PAGE = REPOSITORY / "docs" / "slime.md"


def args_of(**values: Any) -> Namespace:
    defaults = {flag.name: flag.default for flag in WITHOUT_EFFECT}
    return Namespace(rollout_function_path=HOOK, rollout_batch_size=8, **{**defaults, **values})


def names(args: Namespace) -> list[str]:
    return [flag.name for flag in without_effect(args)]


def test_each_flag_with_another_value_is_named():
    assert names(args_of()) == []
    assert names(args_of(over_sampling_batch_size=8)) == []  # set by slime itself, to the batch size
    assert names(Namespace(rollout_function_path=HOOK)) == []  # another version of slime, without these flags
    values = {
        flag.name: {None: "x", False: True}.get(flag.default, 7) if flag.default != [] else ["a.b"]
        for flag in WITHOUT_EFFECT
    }
    assert names(args_of(**values)) == [flag.name for flag in WITHOUT_EFFECT]
    args = args_of(**values)
    args.rollout_function_path = "slime.rollout.sglang_rollout.generate_rollout"  # it reads its flags itself
    assert names(args) == []


def test_the_data_source_warns_once_with_all_names(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    from agl_slime import AGLDataSource
    from tests.harness.slime_source import AGENT

    (tmp_path / "tasks.jsonl").write_text('{"prompt": "?"}\n')
    args = args_of(partial_rollout=True, rm_type="dapo", agl_tasks=str(tmp_path / "tasks.jsonl"))
    args.agl_agent = AGENT
    with caplog.at_level(logging.WARNING), AGLDataSource(args):
        logging.getLogger("agl_slime.x").warning("%s of a model", "\x1b[2J")
    assert "\\x1b[2J of a model" in caplog.messages
    (text,) = [record.getMessage() for record in caplog.records if "without effect" in record.getMessage()]
    assert "--partial-rollout (no rollout is aborted at the end of a batch)" in text
    assert "--rm-type (the reward is the agent's)" in text
    assert "--group-rm" not in text


# -- slime's own parser ----------------------------------------------------------------------------------------------

# The flags that our data source, rollout function and settings read (docs/slime.md).
USED = """hf_checkpoint rollout_function_path rollout_temperature rollout_top_p rollout_top_k rollout_max_context_len
    rollout_max_prompt_len rollout_max_response_len rollout_stop rollout_stop_token_ids rollout_shuffle rollout_seed
    dynamic_sampling_filter_path rollout_sample_filter_path rollout_all_samples_process_path rollout_global_dataset
    data_source_path prompt_data apply_chat_template apply_chat_template_kwargs input_key label_key multimodal_keys
    metadata_key tool_key rollout_batch_size n_samples_per_prompt num_epoch start_rollout_id eval_function_path
    eval_prompt_data eval_config eval_input_key eval_label_key eval_tool_key n_samples_per_eval_prompt eval_temperature
    eval_top_p eval_top_k eval_max_response_len eval_max_prompt_len eval_min_new_tokens eval_max_context_len reward_key
    custom_reward_post_process_path custom_rollout_log_function_path custom_eval_rollout_log_function_path
    rollout_data_transport"""
# Flags of slime's manager, driver and actors, Megatron and SGLang, under any rollout function.
PASSED_ON = """model_name update_weight_buffer_size update_weights_interval keep_old_actor rollout_data_postprocess_path
    rollout_external_engine_addrs num_rollout global_batch_size num_steps_per_rollout micro_batch_size balance_data
    balance_by_flops use_dynamic_batch_size max_tokens_per_gpu log_probs_max_tokens_per_gpu eval_interval
    skip_eval_before_train custom_convert_samples_to_train_data_path data_pad_size_multiplier http_proxy"""
GROUPS = ("rollout", "data", "eval", "reward_model", "rollout_buffer", "network")
_NO_DEFAULT = {"store_true": False, "store_false": True, "append": None}


def options(function: ast.FunctionDef) -> Iterator[tuple[str, Any]]:
    """Names and defaults of the options that a function of slime's adds."""
    for call in ast.walk(function):
        called = call.func if isinstance(call, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if not isinstance(call, ast.Call) or name not in ("add_argument", "reset_arg"):
            continue
        option = next(word.value for word in call.args if isinstance(word, ast.Constant))
        keywords = {word.arg: word.value for word in call.keywords}
        action = keywords.get("action")
        default = _NO_DEFAULT.get(action.value) if isinstance(action, ast.Constant) else None
        if "default" in keywords:
            try:
                default = ast.literal_eval(keywords["default"])
            except ValueError:
                default = ...  # computed
        dest = keywords.get("dest")
        yield dest.value if isinstance(dest, ast.Constant) else option.removeprefix("--").replace("-", "_"), default


@pytest.mark.slime
def test_each_flag_of_slimes_parser_is_used_passed_on_or_named():
    source = (slime_package() / "utils" / "arguments.py").read_text()
    functions = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
    defaults = dict(pair for group in GROUPS for pair in options(functions[f"add_{group}_arguments"]))
    assert len(defaults) > 80
    named = {flag.name: flag.default for flag in WITHOUT_EFFECT}
    used, passed = {*USED.split()}, {*PASSED_ON.split()}
    assert not used & passed | used & {*named} | passed & {*named}
    assert defaults.keys() - used - passed - named.keys() == set()
    assert (used | passed) - defaults.keys() == set()
    # buffer_sort_by_staleness is main's, sglang_server_concurrency is among the engines'
    assert named.keys() - defaults.keys() == {"buffer_sort_by_staleness", "sglang_server_concurrency"}
    both = defaults.keys() & named.keys()
    assert {name: defaults[name] for name in both} == {name: named[name] for name in both}


def test_the_guide_has_each_flag():
    text = PAGE.read_text()
    listed = [*(USED + " " + PASSED_ON).split(), *(flag.name for flag in WITHOUT_EFFECT)]
    flags = {"rollout_global_dataset": "disable_rollout_global_dataset"}
    missing = [name for name in listed if f"`--{flags.get(name, name).replace('_', '-')}`" not in text]
    assert missing == []


def settings_of(environment: dict[str, str] | None = None, **args: Any) -> PluginSettings:
    return PluginSettings.from_args(Namespace(**args), environment or {})


def test_urls_have_brackets_around_ipv6() -> None:
    assert http_url("fd77::1", 8000) == http_url("[fd77::1]", 8000) == "http://[fd77::1]:8000"
    assert settings_of(sglang_router_ip="fd77::1", sglang_router_port=3).llm_url == "http://[fd77::1]:3"


def test_a_wildcard_is_announced_as_slimes_public_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTER_PUBLIC_HOST", "10.1.2.3")
    assert (public_host("0.0.0.0"), public_host("127.0.0.1")) == ("10.1.2.3", "127.0.0.1")
    with (
        Gateway(GatewaySettings(host="0.0.0.0")) as gateway,
        StoreService(store=BridgeStore(), host="0.0.0.0", token="secret") as service,
    ):
        assert all(server.url.startswith("http://10.1.2.3:") for server in (gateway, service))


def test_slimes_settings_of_the_gateway_reach_the_runners() -> None:
    settings = settings_of(agl_agent="a:B", agl_gateway_port=8123, agl_gateway_public_url="https://gate.example/")
    gateway = GatewaySettings(port=8123, public_url="https://gate.example/")
    assert settings.plan().settings.gateway == gateway  # type: ignore[union-attr]
    settings = settings_of({"ADAPTER_PUBLIC_HOST": "10.1.2.3"}, agl_agent="a:B")
    assert settings.plan().settings.gateway == GatewaySettings(host="0.0.0.0")  # type: ignore[union-attr]
    variables = {"AGL_SLIME_STORE_HOST": "10.0.0.7", "AGL_SLIME_MAX_CONCURRENT": "8"}
    plan = settings_of(variables, agl_agent="a:B", agl_runners="ray:2").plan()
    assert plan.settings is not None
    assert (plan.settings.max_concurrent, plan.settings.max_sync_threads) == (8, 8)
    assert (plan.store_host, plan.store_setting) == ("10.0.0.7", "agl_store_host")
    with pytest.raises(ConfigError, match="give that as port"):
        GatewaySettings(public_url="http://h")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"agl_gateway_public_url": "http://h"}, "_url http://h leads to one port: set agl_gateway_port"),
        ({"agl_gateway_public_url": "http://h", "agl_runners": "controller"}, "one port: set agl_controller_port"),
        ({"agl_gateway_port": 80, "agl_runners": "ray:2"}, "agl_gateway_port 80: each runner of ray:2 has a gateway"),
        ({"agl_gateway_public_url": "h:80"}, "agl_gateway_public_url is 'h:80'"),
    ],
)
def test_addresses_that_cannot_work_are_refused(args: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        settings_of(agl_agent="a:B", **args)


def test_a_store_that_other_nodes_cannot_reach_is_refused() -> None:
    class TwoNodes:
        @staticmethod
        def nodes() -> list[dict[str, bool]]:
            return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    require_reachable(TwoNodes, "10.0.0.7", setting="agl_store_host")
    with pytest.raises(ConfigError, match=r"Ray has 2 nodes.* give agl_store_host an address of this machine"):
        require_reachable(TwoNodes, "127.0.0.1", setting="agl_store_host")
