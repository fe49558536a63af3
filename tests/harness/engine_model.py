"""A simulation, with a simulated clock, of an engine and the rollouts of many agents: each rollout samples an answer,
runs its tools, and repeats."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_TICK_S = 0.05


@dataclass
class EngineModel:
    """``speed`` tokens per second and request, ``capacity`` tokens per second in all, ``slots`` requests at once,
    ``queue`` more in line; further requests are refused and retried with an exponential backoff."""

    slots: int
    speed: float = 50.0
    capacity: float = 5_000.0
    queue: int = 1_000_000
    tools_s: float = 0.0
    calls: int = 10
    answer: int = 100
    seed: int = 0
    now: float = 0.0
    tokens: float = 0.0
    n_requests: int = 0
    refused: int = 0
    in_flight: int = 0
    running: list[float] = field(default_factory=list)  # remaining tokens of each
    calls_left: list[int] = field(default_factory=list)  # remaining calls of the same
    waiting: deque[int] = field(default_factory=deque)
    away: list[tuple[float, int, int]] = field(default_factory=list)  # next request, remaining calls, refusals

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def advance(self, *, seconds: float, limit: Callable[[], int]) -> None:
        """Simulate ``seconds`` with ``limit()`` rollouts in flight; a lower limit ends none."""
        start = self.now
        for tick in range(round(seconds / _TICK_S)):
            self.now = start + tick * _TICK_S
            for _ in range(limit() - self.in_flight):
                self.in_flight += 1
                self._ask(self.calls)
            while self.away and self.away[0][0] <= self.now:
                self._ask(*heapq.heappop(self.away)[1:])
            self._work(_TICK_S)
        self.now = start + seconds

    def _ask(self, calls: int, refusals: int = 0) -> None:
        self.n_requests += 1
        if len(self.running) < self.slots:
            self.running.append(self.rng.expovariate(1 / self.answer))
            self.calls_left.append(calls)
        elif len(self.waiting) < self.queue:
            self.waiting.append(calls)
        else:
            self.refused += 1
            backoff = self.rng.uniform(0.5, 1.0) * min(0.5 * 2**refusals, 15.0)
            heapq.heappush(self.away, (self.now + backoff, calls, refusals + 1))

    def _work(self, step: float) -> None:
        if not self.running:
            return
        done = min(self.speed, self.capacity / len(self.running)) * step
        for slot in range(len(self.running) - 1, -1, -1):
            self.tokens += min(done, self.running[slot])
            self.running[slot] -= done
            if self.running[slot] <= 0:
                calls = self.calls_left[slot] - 1
                self.running[slot], self.calls_left[slot] = self.running[-1], self.calls_left[-1]
                self.running.pop()
                self.calls_left.pop()
                if calls:
                    pause = self.rng.expovariate(1 / self.tools_s) if self.tools_s else 0.0
                    heapq.heappush(self.away, (self.now + pause, calls, 0))
                else:
                    self.in_flight -= 1
        while self.waiting and len(self.running) < self.slots:
            self.running.append(self.rng.expovariate(1 / self.answer))
            self.calls_left.append(self.waiting.popleft())
