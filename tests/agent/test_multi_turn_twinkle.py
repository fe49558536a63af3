"""Code that was written for twinkle's rollouts: what its documentation and its tests do with sampling parameters,
tools, subclasses and calls."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime.agent.batched.api_multi_turn import APIMultiTurnRollout
from agl_slime.agent.batched.multi_turn import MultiTurnRollout, Rollout, Trajectory
from agl_slime.agent.tools import ToolManager
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import ConfigError
from tests.agent.test_multi_turn_batched import CALL, run

USER = {"role": "user", "content": "a"}


class EchoTool:
    """Called with its name and a dict of arguments."""

    def __init__(self, **function: Any) -> None:
        self._info = {"type": "function", "function": {"name": "look", "description": "echoes", **function}}

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        return f"echo[{tool_name}]:{arguments}"

    def tool_info(self) -> dict[str, Any]:
        return self._info


def test_max_tokens_is_max_new_tokens() -> None:
    params = SamplingParams(temperature=0.7, max_tokens=4096)
    assert params.max_new_tokens == params.to_payload()["max_new_tokens"] == 4096
    assert replace(params, temperature=0.0).max_new_tokens == 4096
    with pytest.raises(ConfigError, match="max_new_tokens"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize(
    ("stop", "texts", "ids"),
    [("</a>", ("</a>",), ()), (["</a>", "x"], ("</a>", "x"), ()), ([7, 9], (), (7, 9)), (None, (), ())],
)
def test_stop_is_a_text_or_several_or_token_ids(stop: Any, texts: tuple[str, ...], ids: tuple[int, ...]) -> None:
    params = SamplingParams(stop=stop)
    assert (params.stop, params.stop_token_ids) == (texts, ids)
    assert replace(params, temperature=0.5) == SamplingParams(stop=texts, stop_token_ids=ids, temperature=0.5)


@pytest.mark.parametrize("parameters", [{}, {"parameters": {}}])
def test_tools_are_called_with_their_name_and_a_dict(parameters: dict[str, Any]) -> None:
    manager = ToolManager({})
    manager.register(EchoTool(**parameters))
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, tool_manager=manager)
    assert [message["role"] for message in trajectory["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert trajectory["messages"][2]["content"] == "echo[look]:{'key': 'kz'}"


def test_arguments_of_a_tools_schema_are_checked() -> None:
    properties = {"type": "object", "properties": {"key": {"type": "integer"}}, "required": ["key"]}
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, tool_manager=ToolManager([EchoTool(parameters=properties)]))
    assert trajectory["messages"][2]["content"].startswith("Error: argument 'key' of look")


def test_a_manager_takes_tools_by_name_or_none() -> None:
    assert ToolManager({"look": EchoTool()}).names == ("look",)
    assert ToolManager({}).names == ToolManager(None).names == ()


def test_custom_rollout_class_has_its_own_call() -> None:
    class Twice(Rollout):
        def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
            return [{**trajectory, "turns": 2, **kwargs} for trajectory in trajectories]

    assert Twice()([{"id": 1}], step=3) == [{"id": 1, "turns": 2, "step": 3}]


def test_the_directory_of_traces_is_there_before_anything_runs(tmp_path: Path) -> None:
    MultiTurnRollout(sampler=None, template=SimpleNamespace(), trace_dir=str(tmp_path / "traces"))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_unknown_keywords_and_a_single_trajectory_are_refused() -> None:
    rollout = MultiTurnRollout(sampler=None, template=SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sampling_parms: unknown;"):
        rollout([], sampling_parms=SamplingParams())
    with pytest.raises(ConfigError, match="must be a list"):
        rollout({"messages": [USER]})  # type: ignore[arg-type]
    assert rollout([]) == []


class Api:
    """Answers with ``messages``, one after the other; keeps what it was asked with."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages or [{"content": "One."}])
        self.asked: list[dict[str, Any]] = []

    def chat(self, messages: Any, **options: Any) -> Any:
        self.asked.append({**options, "messages": [*messages]})
        said = self.messages.pop(0)
        calls = [SimpleNamespace(model_dump=lambda call=call, **_: {**call}) for call in said.get("tool_calls", ())]
        message = SimpleNamespace(content=said.get("content"), tool_calls=calls or None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.asked[0].items() if name != "messages"}


def run_api(api: Api, *, step: dict[str, int] | None = None, **options: Any) -> Trajectory:
    (trajectory,) = APIMultiTurnRollout(api=api, **options)([{"messages": [USER], "id": "t"}], **step or {})  # type: ignore[arg-type]
    assert trajectory["stop_reason"] == "stop", trajectory
    return trajectory


NEUTRAL = {"temperature": 1.0, "top_p": 1.0}


@pytest.mark.parametrize(
    ("params", "sent"),
    [
        ({}, {}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"max_tokens": 9}, {"max_tokens": 9}),
        ({"max_new_tokens": 9}, {"max_tokens": 9}),
        ({"max_tokens": 256}, {"max_tokens": 256}),
        ({"max_new_tokens": 256}, {"max_tokens": 256}),
        ({"stop": [7, 9]}, {"extra_body": {"stop_token_ids": [7, 9]}}),
        ({"top_k": 5}, {"extra_body": {"top_k": 5}}),
        ({"seed": 3, "repetition_penalty": 1.1}, {"seed": 3, "extra_body": {"repetition_penalty": 1.1}}),
        ({"extra": {"regex": "a+"}}, {"extra_body": {"regex": "a+"}}),
    ],
)
def test_api_gets_only_the_set_parameters(params: dict[str, Any], sent: dict[str, Any]) -> None:
    api = Api()
    run_api(api, sampling_params=SamplingParams(**params))
    assert api.options() == NEUTRAL | sent
    again = Api()
    run_api(again, sampling_params=replace(SamplingParams(**params), top_p=1.0))
    assert again.options() == api.options()


def test_a_seed_and_a_penalty_go_to_the_engine_by_its_names() -> None:
    payload = SamplingParams(seed=3, repetition_penalty=1.1).to_payload()
    assert (payload["sampling_seed"], payload["repetition_penalty"]) == (3, 1.1)


def test_several_samples_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_samples must be 1, got 2"):
        SamplingParams(num_samples=2)


@dataclass
class TwinklesParams:
    """The fields of twinkle's ``SamplingParams``."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: Any = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1


def test_sampling_parameters_of_twinkle_are_taken() -> None:
    api, theirs = Api(), TwinklesParams(max_tokens=256, seed=3, stop="E", top_k=5, repetition_penalty=1.1)
    run_api(api, sampling_params=theirs)
    extra = {"top_k": 5, "repetition_penalty": 1.1}
    assert api.options() == NEUTRAL | {"stop": ["E"], "max_tokens": 256, "seed": 3, "extra_body": extra}
    untouched = Api()
    run_api(untouched, sampling_params=TwinklesParams())
    assert untouched.options() == NEUTRAL
    ((trajectory,), _) = run({"a": ["One two three four five."]}, sampling_params=TwinklesParams(max_tokens=2))
    assert (trajectory["stop_reason"], len([x for x in trajectory["labels"] if x != -100])) == ("length", 2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (TwinklesParams(num_samples=2), "num_samples must be 1, got 2"),
        (TwinklesParams(prompt_logprobs=1), "prompt_logprobs is 1"),
        ({"temperature": 1.0}, "sampling_params must be SamplingParams"),
    ],
)
def test_sampling_parameters_that_cannot_be_kept_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        APIMultiTurnRollout(api=Api(), sampling_params=given)  # type: ignore[arg-type]


class TwinklesManager:
    """As twinkle's ``ToolManager``: called with OpenAI's form of a call; has ``tool_infos``."""

    def __init__(self, tool: EchoTool) -> None:
        self.tool = tool

    def tool_infos(self) -> list[dict[str, Any]]:
        return [self.tool.tool_info()]

    def __call__(self, call: dict[str, Any]) -> str:
        return self.tool(call["function"]["name"], call["function"]["arguments"])


def test_a_tool_manager_of_twinkle_runs_its_tools() -> None:
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, tool_manager=TwinklesManager(EchoTool()))
    assert trajectory["messages"][2]["content"] == "echo[look]:{'key': 'kz'}"
    assert trajectory["tools_called"]["calls"] == {"look": 1}
    ((one, other), _) = run({"a": [CALL, "Three."], "b": ["Two."]}, tool_manager=[TwinklesManager(EchoTool())] * 2)
    assert (one["turns"], other["turns"]) == (2, 1)


@pytest.mark.parametrize("parameters", [{"type": "object", "properties": {}}, {"blocks": "int, the block"}])
def test_a_tool_that_names_no_properties_gets_all_arguments(parameters: dict[str, Any]) -> None:
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, tool_manager=ToolManager([EchoTool(parameters=parameters)]))
    assert trajectory["messages"][2]["content"] == "echo[look]:{'key': 'kz'}"


def test_calls_without_an_id_get_one_shared_with_their_results() -> None:
    call = {"function": {"name": "look", "arguments": "{}"}}
    api = Api({"tool_calls": [call, call]}, {"tool_calls": [{**call, "id": "mine"}]}, {"content": "One."})
    messages = run_api(api, tool_manager=ToolManager([EchoTool()]))["messages"]
    ids = [[call["id"] for call in message["tool_calls"]] for message in messages if message.get("tool_calls")]
    assert ids == [["call_1_0", "call_1_1"], ["mine"]]
    assert [message["tool_call_id"] for message in messages if message["role"] == "tool"] == [*ids[0], *ids[1]]


def test_two_rollouts_with_one_directory_keep_both_traces(tmp_path: Path) -> None:
    for text in ("first", "second"):
        run_api(Api({"content": text}), trace_dir=tmp_path, step={"global_step": 7})
    traces = {path.name: json.loads(path.read_text())["messages"][-1]["content"] for path in tmp_path.iterdir()}
    assert traces == {"7-ok-t.json": "first", "7-ok-t-2.json": "second"}
