"""Code that was written for twinkle's rollouts: what its documentation and its tests do with sampling parameters,
tools, subclasses and calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.rollout.batched.api_multi_turn import APIMultiTurnRollout
from agl_slime.rollout.batched.multi_turn import MultiTurnRollout, Rollout, Trajectory
from agl_slime.rollout.tools import ToolManager
from agl_slime.sglang.generation import SamplingParams
from tests.unit.test_multi_turn_batched import CALL, run

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


def test_a_rollout_of_ones_own_has_its_own_call() -> None:
    class Twice(Rollout):
        def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
            return [{**trajectory, "turns": 2, **kwargs} for trajectory in trajectories]

    assert Twice()([{"id": 1}], step=3) == [{"id": 1, "turns": 2, "step": 3}]


def test_the_directory_of_traces_is_there_before_anything_runs(tmp_path: Path) -> None:
    MultiTurnRollout(sampler=None, template=SimpleNamespace(), trace_dir=str(tmp_path / "traces"))  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["traces"]


def test_unknown_keywords_and_a_single_trajectory_are_refused() -> None:
    rollout = MultiTurnRollout(sampler=None, template=SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="sampling_parms: not known"):
        rollout([], sampling_parms=SamplingParams())
    with pytest.raises(ConfigError, match="must be a list"):
        rollout({"messages": [USER]})  # type: ignore[arg-type]
    assert rollout([]) == []


@pytest.mark.parametrize(
    ("params", "sent"),
    [(SamplingParams(temperature=0.7), None), (SamplingParams(max_tokens=9), 9), (SamplingParams(max_new_tokens=9), 9)],
)
def test_an_api_is_asked_for_no_more_than_was_asked_for(params: SamplingParams, sent: int | None) -> None:
    asked: list[dict[str, Any]] = []

    class Api:
        def chat(self, messages: Any, **options: Any) -> Any:
            asked.append(options)
            message = SimpleNamespace(content="One.", tool_calls=None)
            return SimpleNamespace(choices=[SimpleNamespace(message=message, finish_reason="stop")])

    (trajectory,) = APIMultiTurnRollout(api=Api(), sampling_params=params)([{"messages": [USER]}])  # type: ignore[arg-type]
    assert trajectory["stop_reason"] == "stop"
    assert asked[0].get("max_tokens") == sent
