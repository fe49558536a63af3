"""A call costs its new messages: lines of the package's Python that run, however long the conversation is."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.harness.gateway import Case, serving

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
