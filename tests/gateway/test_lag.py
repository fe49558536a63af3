"""A long prompt or a large body does not stall other rollouts: they are read off the gateway's event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from agl_slime.gateway.settings import GatewaySettings
from tests.gateway.protocols import CHATS, PROTOCOLS, assistant, body_of, error_text, user
from tests.harness.gateway import serving
from tests.loop.test_lag import SlowTokenizer

TOKENS = 32_000
TEXT = "say hello " * 4_100
PATIENCE_S = 20.0  # for requests of milliseconds; the tokenizer is blocked for longer


class BlockedTokenizer(SlowTokenizer):
    """A tokenizer that does not come back from a long text before it is released."""

    def __init__(self, real: Any) -> None:
        super().__init__(self._wait)
        self._real = real
        self.begun, self.released = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.begun.set()
        assert self.released.wait(3 * PATIENCE_S)


def test_a_prompt_of_32k_tokens_does_not_stall_other_rollouts() -> None:
    def post(url: str, text: str, timeout: float) -> None:
        body = body_of("chat/completions", [user(text)])
        httpx.post(f"{url}/chat/completions", json=body, timeout=timeout).raise_for_status()

    with serving("hello", context_length=200_000) as case, ThreadPoolExecutor(1) as pool:
        blocked = BlockedTokenizer(case.tokenizer)
        case.gateway.access._tokenizer = blocked
        urls = [case.open(f"ro-other-{n}")[1]["main_llm"].endpoint for n in range(8)]
        long = pool.submit(post, case.llm.endpoint, TEXT, 4 * PATIENCE_S)
        try:
            assert blocked.begun.wait(PATIENCE_S)
            for url in urls:  # none of them waits for the tokenizer
                post(url, "Hello?", PATIENCE_S)
        finally:
            blocked.released.set()
        long.result(PATIENCE_S)
        assert case.turns[0].prompt_ids.size >= TOKENS


@pytest.mark.parametrize("path", CHATS)
def test_a_large_body_is_read_beside_the_event_loop(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: dict[str, set[str]] = {"read": set(), "read_more": set()}

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
        for _ in range(3):  # the third request is the first of which only new messages are read
            messages += [user("y" * 1_000)] * 300
            http.post(f"{case.llm.endpoint}/{path}", json=body_of(path, messages)).raise_for_status()
            messages.append(assistant("ok"))
    assert threads == {"read": {"agl-slime-worker"}, "read_more": {"agl-slime-worker"}}


@pytest.mark.parametrize("path", CHATS)
def test_requests_above_max_messages_are_refused_as_a_conversation_grows(path: str) -> None:
    messages = [user("x")]
    with serving("ok", settings=GatewaySettings(max_messages=8)) as case:
        for n in range(5):
            answer = httpx.post(f"{case.llm.endpoint}/{path}", json=body_of(path, messages))
            assert answer.status_code == (200 if n < 4 else 413), answer.text
            messages += [assistant("ok"), user("y")]
        assert "9 messages, more than max_messages, 8" in error_text(answer)
