"""A call costs its new messages, a conversation keeps one copy of its tokens, and long prompts or bodies stall no other
rollout: they are read off the event loop of the gateway."""

import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from agl_slime.gateway.settings import GatewaySettings
from tests.gateway.protocols import CHATS, PROTOCOLS, Talk, assistant, body_of, error_text, user
from tests.harness.gateway import Case, serving
from tests.harness.tokenizers import HeldTokenizer

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
        session = case.attempt._root
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
        assert case.attempt._root is not None
        cache = case.attempt._root.context.template.prompt_cache
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
