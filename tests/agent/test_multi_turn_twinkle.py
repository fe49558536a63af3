"""Code written for twinkle's rollouts: its sampling parameters, tools, subclasses and calls run unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime.agent.batched.api_multi_turn import APIMultiTurnRollout
from agl_slime.agent.batched.multi_turn import MultiTurnRollout, Trajectory
from agl_slime.agent.tools import ToolManager
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import ConfigError
from tests.agent.multi_turn_agents import CALL
from tests.agent.test_multi_turn_batched import run

USER = {"role": "user", "content": "a"}


class EchoTool:
    """Called with its name and a dict of arguments."""

    def __init__(self, **function: Any) -> None:
        self._info = {"type": "function", "function": {"name": "look", "description": "echoes", **function}}

    def __call__(self, tool_name: str, arguments: dict[str, Any]) -> str:
        return f"echo[{tool_name}]:{arguments}"

    def tool_info(self) -> dict[str, Any]:
        return self._info


ECHO = "echo[look]:{'key': 'kz'}"


def test_stop_max_tokens_and_other_names_of_twinkle_are_taken_or_refused() -> None:
    stops: list[tuple[Any, tuple[str, ...], tuple[int, ...]]] = [("a", ("a",), ()), (["a", "x"], ("a", "x"), ())]
    for stop, texts, ids in (*stops, ([7, 9], (), (7, 9)), (None, (), ())):
        params = SamplingParams(stop=stop)
        assert (params.stop, params.stop_token_ids) == (texts, ids)
        assert replace(params, temperature=0.5) == SamplingParams(stop=texts, stop_token_ids=ids, temperature=0.5)
    params = SamplingParams(temperature=0.7, max_tokens=4096)
    assert params.max_new_tokens == params.to_payload()["max_new_tokens"] == 4096
    assert replace(params, temperature=0.0).max_new_tokens == 4096
    payload = SamplingParams(seed=3, repetition_penalty=1.1).to_payload()
    assert (payload["sampling_seed"], payload["repetition_penalty"]) == (3, 1.1)
    with pytest.raises(ConfigError, match="max_new_tokens"):
        SamplingParams(max_tokens=0)
    with pytest.raises(ConfigError, match="num_samples must be 1, got 2"):
        SamplingParams(num_samples=2)


@pytest.mark.parametrize("function", [{}, {"parameters": {"blocks": "int, the block"}}])
def test_tools_are_called_with_their_name_and_a_dict(function: dict[str, Any]) -> None:
    """A tool that names no properties gets all arguments."""
    manager = ToolManager({})
    manager.register(EchoTool(**function))
    ((trajectory,), _) = run({"a": [CALL, "Three."]}, tool_manager=manager)
    assert [message["role"] for message in trajectory["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert trajectory["messages"][2]["content"] == ECHO
    assert ToolManager({"look": EchoTool()}).names == ("look",)
    assert ToolManager({}).names == ToolManager(None).names == ()


def test_unknown_keywords_and_a_single_trajectory_are_refused(tmp_path: Path) -> None:
    rollout = MultiTurnRollout(sampler=None, template=SimpleNamespace(), trace_dir=str(tmp_path / "traces"))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]  # before anything runs
    with pytest.raises(ConfigError, match="sampling_parms: unknown;"):
        rollout([], sampling_parms=SamplingParams())
    with pytest.raises(ConfigError, match="must be a list"):
        rollout({"messages": [USER]})  # type: ignore[arg-type]
    assert rollout([]) == []


class Api:
    """Answers with ``messages``, in order; keeps the options of each request."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.messages = list(messages or [{"content": "One."}])
        self.requests: list[dict[str, Any]] = []

    def chat(self, messages: Any, **options: Any) -> Any:
        self.requests.append({**options, "messages": [*messages]})
        answer = self.messages.pop(0)
        calls = [SimpleNamespace(model_dump=lambda call=call, **_: {**call}) for call in answer.get("tool_calls", ())]
        message = SimpleNamespace(content=answer.get("content"), tool_calls=calls or None)
        return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.requests[0].items() if name != "messages"}


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
        ({"max_new_tokens": 256}, {"max_tokens": 256}),  # its default value
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
    replaced = Api()
    run_api(replaced, sampling_params=replace(SamplingParams(**params), top_p=1.0))
    assert replaced.options() == api.options()


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


def test_sampling_parameters_that_cannot_be_kept_are_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (TwinklesParams(num_samples=2), "num_samples must be 1, got 2"),
        (TwinklesParams(prompt_logprobs=1), "prompt_logprobs is 1"),
        ({"temperature": 1.0}, "sampling_params must be SamplingParams"),
    ]
    for params, sentence in cases:
        with pytest.raises(ConfigError, match=sentence):
            APIMultiTurnRollout(api=Api(), sampling_params=params)  # type: ignore[arg-type]


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
    assert trajectory["messages"][2]["content"] == ECHO
    assert trajectory["tools_called"]["calls"] == {"look": 1}


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
