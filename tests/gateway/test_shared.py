"""What a request shares with an earlier one is not read again: with that and without, a call is the same, and what is
known of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import secrets
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway import bodies as bodies_module
from agl_slime.gateway.anthropic import AnthropicMessages
from agl_slime.gateway.bodies import Bodies
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.protocol import NOTHING_KEPT, Protocol
from agl_slime.gateway.responses import Responses
from agl_slime.gateway.tree import Match, Tree
from tests.gateway.random_agents import Audit
from tests.gateway.test_audit import CASES
from tests.harness.examples import examples
from tests.harness.gateway import CALL, WEATHER
from tests.harness.vocabularies import chat_tokenizer

PROTOCOLS: dict[str, Protocol] = {
    "/chat/completions": ChatCompletions(),
    "/messages": AnthropicMessages(),
    "/responses": Responses(),
}
FUNCTION = {"name": "weather", "arguments": '{"city": "Rome"}'}
ITEMS: dict[str, list[Any]] = {
    "/chat/completions": [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": FUNCTION}]},
        {"role": "tool", "tool_call_id": "c", "content": '], "messages": [{"x": "'},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "critic", "content": "No."},
    ],
    "/messages": [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather", "input": {"n": True}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}, {"type": "text", "text": "?"}]},
        {"role": "user", "content": [{"type": "image"}]},
    ],
    "/responses": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", **FUNCTION},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "said"}]},
        {"type": "telepathy"},
    ],
}  # fmt: skip
TOOLS: dict[str, list[Any]] = {
    "/chat/completions": [WEATHER],
    "/messages": [{"name": "weather", "input_schema": {"type": "object", "messages": [1]}}],
    "/responses": [{"type": "function", **WEATHER["function"]}],
}
texts = st.sampled_from(["", "a", ' "]}, ', "é🙂", "\\", "\ud800", "],", CALL])
plain = st.builds(lambda role, said: {"role": role, "content": said}, st.sampled_from(["user", "assistant"]), texts)
styles: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"separators": (",", ":"), "ensure_ascii": False}, {}, {"indent": 1}, {"separators": (" , ", " : ")}]
)


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[str, bytes]]:
    """Of a few conversations, each in the bytes of its client: grown, gone back, edited, with other fields."""
    path = draw(st.sampled_from([*PROTOCOLS]))
    name, items = PROTOCOLS[path].list_field, plain | st.sampled_from(ITEMS[path])
    style, first = draw(styles), draw(st.booleans())
    said: list[list[Any]] = [[{"role": "user", "content": "q"}]]
    sent = []
    for _ in range(draw(st.integers(1, 8))):
        change = draw(st.sampled_from(["grow"] * 6 + ["fork", "edit", "field", "twice"]))
        now = [*said[draw(st.integers(-min(2, len(said)), -1))]]
        if change == "fork":
            now = now[: draw(st.integers(1, len(now)))]
        elif change == "edit":
            now[draw(st.integers(0, len(now) - 1))] = draw(items)
        now += draw(st.lists(items, max_size=3))
        said.append(now)
        more: dict[str, Any] = (
            {"tools": TOOLS[path], "max_tokens": 9} if path == "/messages" else {"tools": TOOLS[path]}
        )
        more["temperature"] = 0.5 if change == "field" else 1
        body = {name: now, **more} if first else {**more, name: now}
        text = json.dumps(body, **style)
        if change == "twice":  # the last one counts
            text = text[:-1] + f', "{name}": ' + json.dumps(now[:1], **style) + "}"
        sent.append((path, text.encode("utf-8", "surrogatepass") if style else text.encode()))
    return sent


async def read(bodies: Bodies, path: str, raw: bytes) -> str:
    """The key, the body and the call, or why it is refused; as text, in which 1 is not True."""
    request = bodies.look(path, raw)
    try:
        body, call = await bodies.read(request, PROTOCOLS[path], NOTHING_KEPT)
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


async def test_only_the_added_part_of_a_request_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol, read = ChatCompletions(), []
    monkeypatch.setattr(
        protocol, "read", lambda body, kept: read.append("whole") or ChatCompletions.read(protocol, body)
    )
    monkeypatch.setattr(
        protocol, "read_more", lambda items, kept: read.append(len(items)) or ChatCompletions().read_more(items, kept)
    )
    bodies, said = Bodies(), [{"role": "user", "content": "a"}]
    for _ in range(5):
        raw = json.dumps({"messages": said, "tools": [WEATHER]}).encode()
        _, call = await bodies.read(bodies.look("/chat/completions", raw), protocol, NOTHING_KEPT)
        assert len(call.messages) == len(said)
        said += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert read == ["whole", "whole", 2, 2, 2]


@pytest.mark.parametrize("tools_last", [True, False])
async def test_attempts_share_their_tools_and_keep_no_message_bytes(
    tools_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what other tests have asked for, of which the room for it is full, is not to decide what is shared here
    monkeypatch.setattr(bodies_module, "_shared", {})
    path, protocol = "/chat/completions", ChatCompletions()

    async def held(word: str, tools: list[Any]) -> tuple[Any, Bodies]:
        bodies, said = Bodies(), [{"role": "user", "content": word * 1_000}]
        for _ in range(4):
            more = {"tools": tools, "user": "me"}
            body = {"messages": said, **more} if tools_last else {**more, "messages": said}
            _, call = await bodies.read(bodies.look(path, json.dumps(body).encode()), protocol, NOTHING_KEPT)
            said += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        return call.tools, bodies

    other = {"type": "function", "function": {"name": "other", "parameters": {}}}
    (first, bodies), (second, _), (third, _) = [
        await held(word, tools) for word, tools in (("x", [WEATHER]), ("y", [WEATHER]), ("z", [other]))
    ]
    assert first is second
    assert [tool["function"]["name"] for tool in third] == ["other"]
    [one] = bodies._requests
    assert len(one.raw) + len(one.tail) < 1_000


class Resending(Audit):
    """Its client sends most of the history in the bytes that it sent before."""

    def _resent(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return super()._resent(messages) if self.rng.random() < 0.2 else messages

    async def ask(self, messages: list[dict[str, Any]], *, n: int = 1) -> list[dict[str, Any]]:
        raw = json.dumps({"messages": messages, "tools": [WEATHER], "n": n}).encode()
        request = self.attempt.bodies.look("/chat/completions", raw)
        _, call = await self.attempt.bodies.read(request, PROTOCOLS["/chat/completions"], NOTHING_KEPT)
        work = self.attempt.respond(call, role="main_llm", key=secrets.token_bytes(8), retry=False)
        answered = await work.result()
        return [choice["message"] for choice in PROTOCOLS["/chat/completions"].answer({}, answered, str)["choices"]]


@pytest.mark.parametrize(("vocabulary", "template"), CASES)
@pytest.mark.parametrize("seed", range(3))
async def test_resumed_walk_finds_what_a_full_walk_does(
    vocabulary: str, template: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, walked = Tree.find, []

    def checked(tree: Tree, messages: Any) -> Match:
        known = len(tree._last_messages) if tree._last_forks == tree._forks else 0
        ambiguous, match = tree.ambiguous, find(tree, messages)
        told, tree.ambiguous = tree.ambiguous, ambiguous
        tree._last_messages = []
        again = find(tree, messages)
        assert told == tree.ambiguous
        for each in dataclasses.fields(Match):
            one, other = getattr(match, each.name), getattr(again, each.name)
            assert one == other if each.name in ("messages", "keys", "length", "state", "fork") else one is other
        walked.append(known)
        return again

    monkeypatch.setattr(Tree, "find", checked)
    rng = random.Random(seed)
    await Resending(chat_tokenizer(vocabulary, template), rng, plain=template == "plain").run(60)
    assert sum(map(bool, walked)) > len(walked) / 10
