"""The part that a request shares with an earlier request is not read again; the call, and the record of it, are the
same as if everything were read."""

import asyncio
import dataclasses
import json
import random
import secrets
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway import bodies as bodies_module
from agl_slime.gateway.attempt import MAX_REQUESTS
from agl_slime.gateway.bodies import Bodies
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.protocol import NO_HISTORIES
from agl_slime.gateway.tree import Match, Tree, _same_tokens
from tests.gateway.protocols import CHATS, PROTOCOLS, TOOLS, assistant, user
from tests.gateway.test_audit import CASES, Audit
from tests.harness.examples import examples
from tests.harness.gateway import CALL, WEATHER
from tests.harness.vocabularies import chat_tokenizer

CALLED = {"name": "weather", "arguments": '{"city": "Rome"}'}
ITEMS: dict[str, list[Any]] = {
    "chat/completions": [
        assistant("", tool_calls=[{"id": "c", "type": "function", "function": CALLED}]),
        {"role": "tool", "tool_call_id": "c", "content": '], "messages": [{"x": "'},
        assistant([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        {"role": "critic", "content": "No."},
    ],
    "messages": [
        assistant([{"type": "tool_use", "id": "c", "name": "weather", "input": {"n": True}}]),
        user([{"type": "tool_result", "tool_use_id": "c"}, {"type": "text", "text": "?"}]),
        user([{"type": "image"}]),
    ],
    "responses": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", **CALLED},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "message", **assistant([{"type": "output_text", "text": "words"}])},
        {"type": "telepathy"},
    ],
}
WITH_MESSAGES = [{"name": "weather", "input_schema": {"type": "object", "messages": [1]}}]
texts = st.sampled_from(["", "a", ' "]}, ', "é🙂", "\\", "\ud800", "],", CALL])
plain = st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts)
styles: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"separators": (",", ":"), "ensure_ascii": False}, {}, {"indent": 1}, {"separators": (" , ", " : ")}]
)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """Requests of a few conversations, each in the bytes of its client: grown, cut, edited, with other fields."""
    path = draw(st.sampled_from(CHATS))
    name, items = PROTOCOLS[path].list_field, plain | st.sampled_from(ITEMS[path])
    style, first = draw(styles), draw(st.booleans())
    histories: list[list[Any]] = [[user("q")]]
    sent = []
    for _ in range(draw(st.integers(1, 8))):
        change = draw(st.sampled_from(["grow"] * 6 + ["fork", "edit", "field", "twice"]))
        history = [*histories[draw(st.integers(-min(2, len(histories)), -1))]]
        if change == "fork":
            history = history[: draw(st.integers(1, len(history)))]
        elif change == "edit":
            history[draw(st.integers(0, len(history) - 1))] = draw(items)
        history += draw(st.lists(items, max_size=3))
        histories.append(history)
        fields: dict[str, Any] = {"tools": WITH_MESSAGES if path == "messages" else TOOLS[path], "max_tokens": 9}
        fields["temperature"] = 0.5 if change == "field" else 1
        text = json.dumps({name: history, **fields} if first else {**fields, name: history}, **style)
        if change == "twice":  # the last field of a name counts
            text = text[:-1] + f', "{name}": ' + json.dumps(history[:1], **style) + "}"
        sent.append((path, text.encode("utf-8", "surrogatepass") if style else text.encode()))
    return sent


async def read(bodies: Bodies, path: str, raw: bytes) -> str:
    """The key, the body and the call, or why it is refused; as text, in which 1 is not True."""
    request = bodies.identify(f"/{path}", raw)
    try:
        body, call = await bodies.read(request, PROTOCOLS[path], NO_HISTORIES)
    except GatewayRequestError as refused:
        return repr((request.key, str(refused)))
    return repr((request.key, sorted(body.items()), call))


@settings(max_examples=examples(100), deadline=None)
@given(requests())
def test_a_body_is_read_as_if_it_were_the_first(sent: list[tuple[str, bytes]]) -> None:
    async def go() -> None:
        bodies = Bodies()
        for path, raw in sent:
            assert await read(bodies, path, raw) == await read(Bodies(), path, raw)

    asyncio.run(go())


@pytest.mark.parametrize("tools_last", [True, False])
async def test_attempts_share_their_tools_and_keep_no_message_bytes(tools_last: bool, monkeypatch: pytest.MonkeyPatch):
    # requests of other tests may have filled the room for shared tools
    monkeypatch.setattr(bodies_module, "_shared", {})
    path, protocol = "/chat/completions", ChatCompletions()

    async def tools_and_bodies(word: str, tools: list[Any]) -> tuple[Any, Bodies]:
        bodies, messages = Bodies(), [user(word * 1_000)]
        for _ in range(4):
            fields = {"tools": tools, "user": "me"}
            body = {"messages": messages, **fields} if tools_last else {**fields, "messages": messages}
            _, call = await bodies.read(bodies.identify(path, json.dumps(body).encode()), protocol, NO_HISTORIES)
            messages += [assistant("b"), user("c")]
        return call.tools, bodies

    tides = {"type": "function", "function": {"name": "tides", "parameters": {}}}
    (first, bodies), (second, _), (third, _) = [
        await tools_and_bodies(word, tools) for word, tools in (("x", [WEATHER]), ("y", [WEATHER]), ("z", [tides]))
    ]
    assert first is second
    assert [tool["function"]["name"] for tool in third] == ["tides"]
    [request] = bodies._requests
    assert len(request.raw) + len(request.tail) < 1_000


async def test_a_new_conversation_of_an_attempt_takes_the_oldest_ones_place() -> None:
    bodies, path, protocol = Bodies(), "/chat/completions", ChatCompletions()
    for word in "abcdef":
        messages = [user(word)]
        for resumed in (False, False, True, True):
            request = bodies.identify(path, json.dumps({"messages": messages}).encode())
            assert (request.previous is not None) is resumed
            await bodies.read(request, protocol, NO_HISTORIES)
            messages += [assistant("b"), user("c")]


def test_siblings_are_the_same_only_if_all_are() -> None:
    turns = [SimpleNamespace(response_ids=np.array(ids)) for ids in ([1, 2], [1, 2], [1, 3])]
    conversation = SimpleNamespace(session=SimpleNamespace(turns=turns))
    nodes: list[Any] = [SimpleNamespace(conversation=conversation, turn=turn) for turn in range(3)]
    assert (_same_tokens(nodes[:2]), _same_tokens(nodes)) == (True, False)


class Resending(Audit):
    """Its client sends most of the history in the same bytes each time."""

    def _resent(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return super()._resent(messages) if self.rng.random() < 0.2 else messages

    async def ask(self, messages: list[dict[str, Any]], *, n: int = 1) -> list[dict[str, Any]]:
        protocol = PROTOCOLS["chat/completions"]
        raw = json.dumps({"messages": messages, "tools": [WEATHER], "n": n}).encode()
        request = self.attempt.bodies.identify("/chat/completions", raw)
        _, call = await self.attempt.bodies.read(request, protocol, NO_HISTORIES)
        work = self.attempt.respond(call, role="main_llm", key=secrets.token_bytes(8), retry=False)
        return [choice["message"] for choice in protocol.answer({}, await work.result(), str)["choices"]]


@pytest.mark.parametrize(("vocabulary", "template"), CASES)
async def test_resumed_walk_finds_what_a_full_walk_does(vocabulary, template, monkeypatch):
    find, resumed = Tree.find, []

    def checked(tree: Tree, messages: Any) -> Match:
        resumed.append(bool(tree._last_messages) and tree._last_forks == tree._forks)
        old_count, match = tree.ambiguous, find(tree, messages)
        new_count, tree.ambiguous = tree.ambiguous, old_count
        tree._last_messages = []
        full = find(tree, messages)
        assert new_count == tree.ambiguous
        for field in dataclasses.fields(Match):
            value, expected = getattr(match, field.name), getattr(full, field.name)
            compared = field.name in ("messages", "keys", "length", "state", "fork")
            assert value == expected if compared else value is expected
        return full

    monkeypatch.setattr(Tree, "find", checked)
    for seed in range(2):
        rng = random.Random(seed)
        audit = Resending(chat_tokenizer(vocabulary, template), rng, plain=template == "plain")
        await audit.run(60)
        audit.attempt.counts["requests"] = MAX_REQUESTS
        with pytest.raises(GatewayRequestError, match="the most it may make"):
            await audit.ask([user("a")])
    assert sum(resumed) > len(resumed) / 10
