"""A long prompt or a large body does not stall other rollouts: they are read off the gateway's event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from agl_slime.gateway.anthropic import AnthropicMessages
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.responses import Responses
from agl_slime.gateway.settings import GatewaySettings
from tests.harness.gateway import serving
from tests.loop.test_lag import SlowTokenizer

TOKENS = 32_000
TEXT = "say hello " * 4_100
PATIENCE_S = 20.0  # for what takes milliseconds; the tokenizer is held for longer


class HeldTokenizer(SlowTokenizer):
    """A tokenizer that does not come back from a long text before it is released."""

    def __init__(self, real: Any) -> None:
        super().__init__(self._wait)
        self._real = real
        self.begun, self.released = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.begun.set()
        assert self.released.wait(3 * PATIENCE_S)


def test_a_prompt_of_32k_tokens_does_not_stall_other_rollouts() -> None:
    def post(url: str, text: str, timeout: float) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        began = time.perf_counter()
        httpx.post(f"{url}/chat/completions", json=body, timeout=timeout).raise_for_status()
        return time.perf_counter() - began

    with serving("hello", context_length=200_000) as case, ThreadPoolExecutor(1) as pool:
        held = HeldTokenizer(case.tokenizer)
        case.gateway.access._tokenizer = held
        others = [case.open(f"ro-other-{n}")[1]["main_llm"].endpoint for n in range(8)]
        long = pool.submit(post, case.llm.endpoint, TEXT, 4 * PATIENCE_S)
        try:
            assert held.begun.wait(PATIENCE_S)
            waited = [post(url, "Hello?", PATIENCE_S) for url in others]  # none of them waits for the tokenizer
        finally:
            held.released.set()
        assert max(waited) < PATIENCE_S
        long.result(PATIENCE_S)
        assert case.turns[0].prompt_ids.size >= TOKENS


def test_the_event_loop_answers_while_such_a_prompt_is_read() -> None:
    with serving("hello", context_length=200_000) as case, ThreadPoolExecutor(1) as pool:
        body = {"model": "m", "messages": [{"role": "user", "content": TEXT}]}
        assert case.gateway._thread is not None
        loop, lags = case.gateway._thread.loop, []
        assert loop is not None
        asked = pool.submit(httpx.post, f"{case.llm.endpoint}/chat/completions", json=body, timeout=60)
        while not asked.done():
            came, began = threading.Event(), time.perf_counter()
            loop.call_soon_threadsafe(came.set)
            assert came.wait(PATIENCE_S)
            lags.append(time.perf_counter() - began)
        assert asked.result().status_code == 200
        assert case.turns[0].prompt_ids.size >= TOKENS
        print(f"{case.turns[0].prompt_ids.size} tokens, late by at most {1e3 * max(lags):.1f} ms")
        assert max(lags) < 1.0


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_a_large_body_is_read_beside_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = {"read": set(), "read_more": set()}

    def noted(inner: Callable[..., Any], seen: set[str]) -> Callable[..., Any]:
        def noting(*given: Any) -> Any:
            seen.add(threading.current_thread().name)
            return inner(*given)

        return noting

    for kind in (AnthropicMessages, ChatCompletions, Responses):
        for name, seen in threads.items():
            monkeypatch.setattr(kind, name, noted(getattr(kind, name), seen))
    name, said = ("input" if path == "responses" else "messages"), [{"role": "user", "content": "x"}]
    with serving("ok", context_length=10**6) as case, httpx.Client(timeout=60) as http:
        for _ in range(3):  # from the third on only what is new is read
            said += [{"role": "user", "content": "y" * 1_000}] * 300
            body = {"model": "m", name: said, **({"max_tokens": 9} if path == "messages" else {})}
            http.post(f"{case.llm.endpoint}/{path}", json=body).raise_for_status()
            said.append({"role": "assistant", "content": "ok"})
    assert threads == {"read": {"agl-slime-worker"}, "read_more": {"agl-slime-worker"}}


@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_requests_above_max_messages_are_refused_as_a_conversation_grows(path: str) -> None:
    name, said = ("input" if path == "responses" else "messages"), [{"role": "user", "content": "x"}]
    with serving("ok", settings=GatewaySettings(max_messages=8)) as case:
        for n in range(5):
            body = {"model": "m", name: said, **({"max_tokens": 9} if path == "messages" else {})}
            answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body)
            assert answer.status_code == (200 if n < 4 else 413), answer.text
            said = [*said, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "y"}]
        assert "9 messages, more than max_messages, 8" in answer.json()["error"]["message"]
