"""The part that a request shares with an earlier request is not read again; the call, and the record of it, are the
same as if everything were read."""

import asyncio
import dataclasses
import json
import random
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
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
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.gateway.tree import Match, Tree, _same_tokens
from tests.gateway.protocols import CHATS, PROTOCOLS, TOOLS, Talk, assistant, body_of, error_text, user
from tests.gateway.test_audit import CASES, Audit
from tests.harness.examples import examples
from tests.harness.gateway import CALL, WEATHER, Case, serving
from tests.harness.tokenizers import HeldTokenizer
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


EARLY, LATE, CALLS = 60, 150, 6
# no line for each message of the history; a binary search for the end of the shared prefix takes a few steps
MAX_LINES_PER_MESSAGE = 0.25


def on_loop(case: Case, work: Callable[[], object]) -> None:
    done = threading.Event()
    assert case.gateway._thread is not None
    case.gateway._thread.call(lambda: (work(), done.set()))
    assert done.wait(10)


def lines_of(case: Case, ask: Callable[[], None]) -> Counter[str]:
    """The lines that are executed at the gateway meanwhile, by function."""
    counts: Counter[str] = Counter()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if "/agl_slime/" not in (name := frame.f_code.co_filename):
            return None
        if event == "line":
            counts[f"{name.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1
        return trace

    on_loop(case, lambda: sys.settrace(trace))
    try:
        ask()
    finally:
        on_loop(case, lambda: sys.settrace(None))
    return counts


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_call_does_nothing_for_each_message_of_its_history(role: str) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where is the garden?"}]
    counts: dict[int, list[Counter[str]]] = {EARLY: [], LATE: []}
    with serving("It is there.", context_length=100_000) as case, httpx.Client(timeout=30) as http:

        def ask() -> None:
            body = {"model": "m", "messages": messages}
            answer = http.post(f"{case.llm.endpoint}/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            messages.append(answer.json()["choices"][0]["message"])
            messages.append({"role": role, "content": f"{len(messages)}: there is none"})

        for turn in range(LATE + CALLS):
            first = next((first for first in counts if first <= turn < first + CALLS), None)
            if first is None:
                ask()
            else:
                counts[first].append(lines_of(case, ask))
        assert len(case.segments) == 1
    # a conversation that has doubled is rendered whole: the least of some calls counts
    early, late = (min(counts[first], key=Counter.total) for first in (EARLY, LATE))
    added = late - early
    assert early.total() > 500
    assert added.total() < MAX_LINES_PER_MESSAGE * 2 * (LATE - EARLY), added.most_common(8)


TURNS = 60
OBSERVATION = "the garden is green and the door of the house is open " * 8


def test_long_conversation_keeps_one_copy_of_its_tokens() -> None:
    with serving("It is behind the house.", context_length=100_000) as case:
        talk = Talk(case, "chat/completions")
        talk.ask(user("Where is the garden?"))
        for turn in range(TURNS - 1):
            talk.ask(user(f"{turn}: {OBSERVATION}"))
        session = case.attempt._first_session
        assert session is not None
        turns = session.turns
        assert len(case.turns) == len(turns) == TURNS
        assert len(case.segments) == 1

        arrays = {id(base): base for turn in turns if (base := turn.prompt_ids.base) is not None}
        written = sum(min(array.nbytes, 4 * turns[-1].length) for array in arrays.values())
        assert written < 1.5 * 4 * turns[-1].length, "arrays that a buffer has outgrown are a small part"
        assert len({id(line) for line, _ in session._encoder._messages}) == 1
        assert all(turn.messages is None for turn in turns)
        assert all(turn.messages for turn in case.turns), "spans have them"
        assert len(case.attempt.recent.responses) == 1, "a continued answer is not kept for retries"


TOKENS = 32_000
TEXT = "say hello " * 4_100
PATIENCE_S = 20.0  # for requests of milliseconds; the tokenizer is blocked for longer


def test_a_prompt_of_32k_tokens_does_not_stall_other_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it kept for the other members of its group, where all that is kept has less room."""
    monkeypatch.setattr("agl_slime.tokens.template._MAX_KEY_BYTES", 10_000)

    def post(url: str, text: str, timeout: float) -> None:
        body = body_of("chat/completions", [user(text)])
        httpx.post(f"{url}/chat/completions", json=body, timeout=timeout).raise_for_status()

    with serving("hello", context_length=200_000) as case, ThreadPoolExecutor(1) as pool:
        begun, released = threading.Event(), threading.Event()

        def block() -> None:
            begun.set()
            assert released.wait(3 * PATIENCE_S)

        case.gateway.access._tokenizer = HeldTokenizer(case.tokenizer, block, len(TEXT))  # type: ignore[assignment]
        urls = [case.open(f"ro-other-{n}")[1]["main_llm"].endpoint for n in range(8)]
        long = pool.submit(post, case.llm.endpoint, TEXT, 4 * PATIENCE_S)
        try:
            assert begun.wait(PATIENCE_S)
            for url in urls:  # none of them waits for the tokenizer
                post(url, "Hello?", PATIENCE_S)
        finally:
            released.set()
        long.result(PATIENCE_S)
        assert case.turns[0].prompt_ids.size >= TOKENS
        assert case.attempt._first_session is not None
        cache = case.attempt._first_session.context.template.prompt_cache
        assert sum(map(len, cache._results)) <= 10_000


@pytest.mark.parametrize("path", CHATS)
def test_a_large_body_is_read_beside_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And an answer with many log-probs is written there."""
    monkeypatch.setattr("agl_slime.gateway.server._INLINE_LOG_PROBS_MAX", 0)
    threads: dict[str, set[str]] = {"read": set(), "read_more": set(), "answer": set()}

    def noted(inner: Callable[..., Any], names: set[str]) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            names.add(threading.current_thread().name)
            return inner(*args)

        return noting

    kind = type(PROTOCOLS[path])
    for name, names in threads.items():
        monkeypatch.setattr(kind, name, noted(getattr(kind, name), names))
    messages = [user("x")]
    with serving("ok", context_length=10**6) as case, httpx.Client(timeout=60) as http:
        for n in range(4):  # other conversations, whose places this one takes
            http.post(f"{case.llm.endpoint}/{path}", json=body_of(path, [user(f"{n}")])).raise_for_status()
        for names in threads.values():
            names.clear()
        for _ in range(3):  # the third request is the first of which only new messages are read
            messages += [user("y" * 1_000)] * 300
            http.post(f"{case.llm.endpoint}/{path}", json=body_of(path, messages)).raise_for_status()
            messages.append(assistant("ok"))
    assert threads == {name: {"agl-slime-worker"} for name in threads}


@pytest.mark.parametrize("path", CHATS)
def test_requests_above_max_messages_are_refused_as_a_conversation_grows(path: str) -> None:
    messages = [user("x")]
    with serving("ok", settings=GatewaySettings(max_messages=8)) as case:
        for n in range(5):
            answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body_of(path, messages))
            assert answer.status_code == (200 if n < 4 else 413), answer.text
            messages += [assistant("ok"), user("y")]
        assert "9 messages, more than max_messages, 8" in error_text(answer)
