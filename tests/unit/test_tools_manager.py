"""Tools: schemas from functions, calls, failures that the model sees."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any, Literal, Optional

import pytest

from agl_slime.errors import ConfigError
from agl_slime.rollout.tool_parsers import ToolCall
from agl_slime.rollout.tools import ToolManager, schema_of


def look(key: str, limit: int = 3, mode: Literal["fast", "slow"] = "fast", tags: Optional[list[str]] = None) -> str:  # noqa: UP045  both forms are read
    """Look a key up.

    Longer text.

    Args:
        key: The key,
            three letters.
        limit (int): Most results.

    Returns:
        What is there.
    """
    return f"{key}:{limit}:{mode}:{tags}"


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id="call_0")


def test_a_schema_is_told_from_signature_and_docstring() -> None:
    assert schema_of(look) == {
        "name": "look",
        "description": "Look a key up.\n\nLonger text.",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string", "description": "The key, three letters."},
                "limit": {"type": "integer", "description": "Most results."},
                "mode": {"enum": ["fast", "slow"], "type": "string"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["key"],
        },
    }


def test_a_function_without_usable_types_is_refused_by_name() -> None:
    def untyped(key):  # type: ignore[no-untyped-def]
        return key

    def odd(lock: threading.Lock) -> str:
        return ""

    def many(*keys: str) -> str:
        return ""

    for function, word in ((untyped, "no type"), (odd, "no JSON form"), (many, "by name")):
        with pytest.raises(ConfigError, match=word):
            ToolManager([function])
    with pytest.raises(ConfigError, match="two tools named 'look'"):
        ToolManager([look, look])
    with pytest.raises(ConfigError, match="must be a function"):
        ToolManager([3])


async def test_functions_sync_and_async_are_called_with_fitting_arguments() -> None:
    async def twice(n: float, deep: dict[str, int]) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"n": 2 * n, "deep": deep}

    tools = ToolManager([look, twice])
    assert tools.names == ("look", "twice")
    assert [schema["type"] for schema in tools.schemas] == ["function", "function"]
    # strings become what the schema wants: the XML formats have no types
    results = await tools.run([call("look", key="a", limit="7", tags='["x"]'), call("twice", n="1.5", deep={"a": 1})])
    assert [result.content for result in results] == ["a:7:fast:['x']", '{"n": 3.0, "deep": {"a": 1}}']
    assert [result.error for result in results] == [None, None]
    assert results[0].to_message() == {
        "role": "tool",
        "name": "look",
        "tool_call_id": "call_0",
        "content": "a:7:fast:['x']",
    }


async def test_calls_of_one_answer_run_at_the_same_time() -> None:
    arrived: list[int] = []
    both = asyncio.Event()

    async def meet() -> str:
        arrived.append(1)
        if len(arrived) == 2:
            both.set()
        await both.wait()
        return "met"

    results = await ToolManager([meet], timeout_s=20).run([call("meet"), call("meet")])
    assert [result.content for result in results] == ["met", "met"]


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, "needs the argument 'key'"),
    ({"key": "a", "page": 1}, "no argument 'page'"),
    ({"key": 3}, "type string"),
    ({"key": "a", "limit": "x"}, "type integer"),
]


@pytest.mark.parametrize(("arguments", "word"), BAD_ARGUMENTS)
async def test_bad_arguments_are_an_observation(arguments: dict[str, Any], word: str) -> None:
    result = await ToolManager([look]).call(call("look", **arguments))
    assert result.error == "bad_arguments"
    assert result.content.startswith("Error: ")
    assert word in result.content


async def test_an_exception_is_an_observation() -> None:
    def fails(key: str) -> str:
        raise LookupError(f"no {key}")

    result = await ToolManager([fails]).call(call("fails", key="kz"))
    assert (result.error, result.content) == ("exception", "Error: LookupError: no kz")


async def test_an_unknown_tool_is_an_observation() -> None:
    result = await ToolManager([look]).call(call("search"))
    assert result.error == "unknown_tool"
    assert "'search'; there are look" in result.content


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_a_tool_that_hangs_times_out(kind: str) -> None:
    release = threading.Event()

    async def hangs_async() -> str:
        await asyncio.Event().wait()
        return ""

    def hangs_thread() -> str:
        release.wait(60)
        return ""

    try:
        tools = ToolManager([hangs_async, hangs_thread], timeout_s=0.05)
        result = await tools.call(call(f"hangs_{kind}"))
    finally:
        release.set()
    assert result.error == "timeout"
    assert "0.05 seconds" in result.content


class Counter:
    """One per rollout: it counts its own calls."""

    schema = {
        "type": "function",
        "function": {"name": "count", "description": "Count.", "parameters": {"type": "object", "properties": {}}},
    }

    def __init__(self, task: Mapping[str, Any] | None) -> None:
        self.start = (task or {}).get("start", 0)

    async def __call__(self) -> int:
        self.start += 1
        return self.start


async def test_a_class_is_made_for_each_rollout_with_its_task() -> None:
    first, second = ToolManager([Counter], task={"start": 10}), ToolManager([Counter], task={"start": 20})
    for _ in range(2):
        await first.call(call("count"))
    assert (await first.call(call("count"))).content == "13"
    assert (await second.call(call("count"))).content == "21"


async def test_long_results_are_cut_and_say_so() -> None:
    def long() -> str:
        return "x" * 50

    result = await ToolManager([long], max_result_chars=10).call(call("long"))
    assert result.content == "x" * 10 + "\n[cut: 40 more characters]"
