"""Tools: schemas from functions, calls, and failures as observations of the model."""

import asyncio
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel

from agl_slime.agent.tools import ToolManager
from agl_slime.errors import ConfigError, RolloutError
from agl_slime.tokens.answer import ToolCall


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


def test_schema_is_built_from_signature_and_docstring() -> None:
    assert ToolManager([look]).schemas[0]["function"] == {
        "name": "look",
        "description": "Look a key up.\n\nLonger text.",
        "parameters": {
            "type": "object",
            "properties": {
                "key": {"type": "string", "description": "The key, three letters."},
                "limit": {"type": "integer", "description": "Most results."},
                "mode": {"enum": ["fast", "slow"], "type": "string"},
                "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
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

    for function, names in ((untyped, "'key'.*'untyped'"), (odd, "'odd'.*lock"), (many, "'keys'.*'many'")):
        with pytest.raises(ConfigError, match=names):
            ToolManager([function])
    with pytest.raises(ConfigError, match="'look'"):
        ToolManager([look, look])
    with pytest.raises(ConfigError, match="got 3"):
        ToolManager([3])


class Mode(Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass
class Span:
    start: int
    end: Optional[int] = None  # noqa: UP045


class Filter(BaseModel):
    """Values that pass."""

    field: str
    values: list[int] = []


def search(
    query: str,
    limit: Optional[int] = 3,  # noqa: UP045  both forms are read
    mode: Mode = Mode.FAST,
    span: Span | None = None,
    filters: list[Filter] | None = None,
    schema: Literal[1, 2] = 1,
    model_config: bool = False,
) -> str:
    """Search.

    Args:
        limit: Most results; null: all.
    """
    return repr((query, limit, mode, span, filters, schema, model_config))


FITTING: list[tuple[dict[str, Any], Any]] = [
    ({"limit": None}, ("q", None, Mode.FAST, None, None, 1, False)),
    ({"limit": "null", "mode": "slow"}, ("q", None, Mode.SLOW, None, None, 1, False)),
    ({"span": '{"start": "1", "end": null}'}, ("q", 3, Mode.FAST, Span(1), None, 1, False)),
    ({"filters": [{"field": "a"}], "limit": "7"}, ("q", 7, Mode.FAST, None, [Filter(field="a")], 1, False)),
    ({"schema": "2", "model_config": "true"}, ("q", 3, Mode.FAST, None, None, 2, True)),
]


async def test_null_enums_dataclasses_and_models_are_arguments() -> None:
    for arguments, expected in FITTING:
        result = await ToolManager([search]).call(call("search", query="q", **arguments))
        assert (result.content, result.error) == (repr(expected), None)


def test_schema_of_enums_dataclasses_and_models_is_complete() -> None:
    parameters = ToolManager([search]).schemas[0]["function"]["parameters"]
    properties, definitions = parameters["properties"], parameters["$defs"]
    assert parameters["required"] == ["query"]
    limit = {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "Most results; null: all."}
    assert properties["limit"] == limit
    assert properties["mode"] == {"$ref": "#/$defs/Mode"}
    assert definitions["Mode"]["enum"] == ["fast", "slow"]
    assert definitions["Span"]["required"] == ["start"]
    assert definitions["Filter"]["properties"]["values"]["items"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        (search, {"mode": "slowly"}, ("'mode'", "'slowly'")),
        (search, {"span": {"end": 1}}, ("'span.start'",)),
        (search, {"filters": [{"field": "a", "values": ["x"]}]}, ("'filters.0.values.0'", "'x'")),
        (search, {"limit": "many"}, ("'limit'", "'many'")),
        (look, {}, ("'key'",)),
        (look, {"key": "a", "page": 1}, ("'page' of look",)),
        (look, {"key": 3}, ("'key' of look: Input should be a valid string, got 3",)),
        (look, {"key": "a", "mode": "none"}, ("'mode' of look: Input should be 'fast' or 'slow', got 'none'",)),
    ],
)
async def test_a_bad_part_of_an_argument_is_named(tool: Any, arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    query = {"query": "q"} if tool is search else {}
    result = await ToolManager([tool]).call(call(tool.__name__, **query, **arguments))
    assert result.error == "bad_arguments"
    assert result.content.startswith("Error: ")
    assert all(word in result.content for word in words)


async def test_arguments_are_checked_by_the_schema_that_an_object_brings() -> None:
    class Any_:
        schema = {
            "name": "any",
            "parameters": {
                "properties": {
                    "n": {"type": ["integer", "null"]},
                    "x": {"type": "number", "nullable": True},
                    "kind": {"enum": ["a", "b"]},
                    "rest": {},
                },
                "required": ["n"],
            },
        }

        def __call__(self, **arguments: Any) -> str:
            return repr(arguments)

    tools = ToolManager([Any_])
    result = await tools.call(call("any", n="3", x=None, kind="a", rest={"deep": 1}))
    assert result.content == repr({"n": 3, "x": None, "kind": "a", "rest": {"deep": 1}})
    assert (await tools.call(call("any", n="null", x=2))).content == repr({"n": None, "x": 2})
    for bad, field in (({}, "'n'"), ({"n": "x"}, "'n'"), ({"n": 1, "kind": "c"}, "'kind'"), ({"n": 1, "m": 1}, "'m'")):
        result = await tools.call(call("any", **bad))
        assert (result.error, field in result.content) == ("bad_arguments", True)


class Sandbox:
    """Open until it is closed; ``closes`` is what its ``aclose`` does."""

    schema = {"name": "sandbox"}

    def __init__(self, closes: Any = None) -> None:
        self.closed, self.closes = 0, closes

    def __call__(self) -> str:
        return "ran"

    async def aclose(self) -> None:
        self.closed += 1
        if self.closes is not None:
            await self.closes()


async def test_tools_are_closed_except_the_kept_ones(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise RuntimeError("still busy")

    class Second(Sandbox):
        schema = {"name": "second"}

    class Third(Sandbox):
        schema = {"name": "third"}

    sandbox, failing, shared = Sandbox(), Second(fails), Third()
    tools = ToolManager([sandbox, failing, shared, look])
    await tools.aclose(keep=[shared])
    await tools.aclose(keep=[shared])
    assert (sandbox.closed, failing.closed, shared.closed) == (1, 1, 0)
    assert "still busy" in caplog.text


async def test_a_tool_whose_constructor_outlives_its_rollout_is_closed() -> None:
    release, instances = threading.Event(), []

    class Slow(Sandbox):
        def __init__(self) -> None:
            super().__init__()
            release.wait(30)
            instances.append(self)

    tools = ToolManager()
    constructing = asyncio.create_task(asyncio.to_thread(tools.register, Slow))
    await tools.aclose()
    release.set()
    with pytest.raises(RolloutError):
        await constructing
    assert instances[0].closed == 1


async def test_calls_of_one_answer_run_at_the_same_time() -> None:
    together = asyncio.Barrier(2)

    async def meet(n: float) -> dict[str, float]:
        await together.wait()
        return {"n": 2 * n}

    # the XML formats have no types: strings are converted by the schema
    results = await ToolManager([meet], timeout_s=20).run([call("meet", n="1.5"), call("meet", n=2)])
    assert [result.error for result in results] == [None, None]
    assert [result.content for result in results] == ['{"n": 3.0}', '{"n": 4.0}']
    message = {"role": "tool", "name": "meet", "tool_call_id": "call_0", "content": '{"n": 3.0}'}
    assert results[0].to_message() == message


async def test_a_parameter_may_have_any_name() -> None:
    def look(fn: str, self: int = 0, call: str = "", args: str = "") -> str:
        """Look."""
        return f"{fn} {self} {call} {args}"

    result = await ToolManager([look], task={}).call(call("look", fn="a", self=1, call="b", args="c"))
    assert result.content == "a 1 b c"


async def test_exceptions_unknown_tools_and_long_results_are_observations() -> None:
    def fails(key: str) -> str:
        raise LookupError(f"no {key}")

    def long() -> str:
        return "x" * 50

    tools = ToolManager([fails, long], max_result_chars=60)
    result = await tools.call(call("fails", key="kz"))
    assert (result.error, result.content) == ("exception", "Error: LookupError: no kz")
    result = await tools.call(call("search"))
    assert result.error == "unknown_tool"
    assert "'search'; there are fails, long" in result.content
    result = await ToolManager([long], max_result_chars=10).call(call("long"))
    assert result.content == "x" * 10 + "\n[cut: 40 more characters]"


async def test_a_tool_that_hangs_times_out() -> None:
    release = threading.Event()

    async def hangs_async() -> str:
        await asyncio.Event().wait()
        return ""

    def hangs_thread() -> str:
        release.wait(60)
        return ""

    try:
        tools = ToolManager([hangs_async, hangs_thread], timeout_s=0.05)
        results = await tools.run([call("hangs_async"), call("hangs_thread")])
    finally:
        release.set()
    for result in results:
        assert result.error == "timeout"
        assert "0.05 seconds" in result.content


async def test_a_method_is_a_tool_whose_object_the_reward_sees() -> None:
    class Cart:
        def __init__(self) -> None:
            self.items: list[str] = []

        def add(self, item: str) -> str:
            """Put an item into the cart."""
            self.items.append(item)
            return f"{len(self.items)} items"

    manager = ToolManager([Cart().add])
    await manager.call(call("add", item="tea"))
    assert manager.objects["add"].__self__.items == ["tea"]
    assert manager.schemas[0]["function"]["description"] == "Put an item into the cart."
