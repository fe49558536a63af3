"""A discrete simulation of a training run: seconds per step, and how long each side waits. A pure function of speeds,
lengths and the driver.

Engines decode all their sequences at one speed, which falls with their number: a decoding step takes ``token_s +
sequences * token_s_per_sequence`` seconds. Between two changes of that number progress is linear, so the simulation
goes from event to event.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean

from agl_slime.errors import ConfigError
from agl_slime.loop.admission import Admission


@dataclass(frozen=True)
class Speeds:
    """Seconds of one engine, of training on all its GPUs, and of a weight update."""

    token_s: float
    """Of a decoding step, without the part below."""
    token_s_per_sequence: float = 0.0
    """What each sequence adds to a decoding step."""
    prefill_token_s: float = 0.0
    """Of a token of a prompt, or of a response that resumes; decoding stands still."""
    train_s: float = 0.0
    train_token_s: float = 0.0
    """Of a training step, and of each token of its batch."""
    sync_s: float = 0.0
    """Of a weight update."""
    offload_s: float = 0.0
    """Of handing the GPUs over and back, when engines and training share them."""
    agent_s: float = 0.0
    """Of tools and reward of a rollout."""


@dataclass(frozen=True)
class Shape:
    """The batch, the engines and the driver. ``max_staleness``: ``agl_max_staleness``, ``None`` for groups that slime
    requests; ``asynchronous``: train_async.py; ``oversampled``: groups that a batch begins, if more than it takes;
    ``resumes``: requests that a weight update aborts continue from their tokens."""

    groups: int
    size: int
    engines: int
    slots: int = 512
    prompt_tokens: int = 200
    mean_tokens: float = 1000.0
    max_tokens: int = 8192
    spread: float = 0.6
    """Standard deviation of the logarithm of the response lengths; 0 for equal ones."""
    asynchronous: bool = False
    colocated: bool = False
    max_staleness: int | None = None
    oversampled: int | None = None
    resumes: bool = False

    def length(self, rng: random.Random) -> int:
        """The length of a response."""
        mean, spread = self.mean_tokens, self.spread
        tokens = rng.lognormvariate(math.log(mean) - spread**2 / 2, spread) if spread else mean
        return max(1, min(round(tokens), self.max_tokens))


@dataclass(frozen=True)
class Step:
    """One step, in seconds from the start: its training, and the end of its weight update. ``behind``: mean versions
    from a group's admission to its training."""

    began: float
    trained: float
    synced: float
    tokens: int
    behind: float


@dataclass(frozen=True)
class Forecast:
    """The simulated steps, and means over their second half without the last one."""

    steps: tuple[Step, ...]
    step_s: float
    trainer_waits: float
    """Share of the time without training and without a weight update."""
    engines_wait: float
    """Share of the engines' time without a sequence."""
    lost_tokens: float
    """Share of the sampled tokens that no step trains on."""
    prefilled_again: float
    """Tokens that resumed requests prefill again, by sampled tokens."""
    behind: float


class Decoder:
    """An engine's sequences, which decode at one speed; ``decoded`` counts the tokens of each since the start.
    Times are seconds on any clock that starts at 0."""

    def __init__(self, speeds: Speeds, shape: Shape) -> None:
        self._speeds, self._slots, self._prompt = speeds, shape.slots, shape.prompt_tokens
        self.running: list[tuple[float, int, int]] = []  # value of ``decoded`` at its end, rollout, its tokens
        self.waiting: deque[tuple[int, int]] = deque()  # rollout, its tokens
        self.decoded = self.time = self.idle_s = 0.0
        self.stopped = False

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def pace(self) -> float:
        return self._speeds.token_s + len(self.running) * self._speeds.token_s_per_sequence

    def move(self, now: float) -> None:
        """Decode up to ``now``, and take up waiting sequences."""
        if now > self.time:
            if not self.running:
                self.idle_s += now - self.time
            elif not self.stopped:
                self.decoded += (now - self.time) / self.pace
            self.time = now
        while self.waiting and len(self.running) < self._slots and not self.stopped:
            rollout, tokens = self.waiting.popleft()
            heapq.heappush(self.running, (self.decoded + tokens, rollout, tokens))
            self.time += self._prompt * self._speeds.prefill_token_s

    def next_end(self) -> float:
        if not self.running or self.stopped:
            return math.inf
        return self.time + max(0.0, self.running[0][0] - self.decoded) * self.pace

    def pop(self) -> int:
        """Remove the sequence that has ended; returns its rollout."""
        end, rollout, _ = heapq.heappop(self.running)
        self.decoded = max(self.decoded, end)  # without rounding errors
        return rollout

    def resume(self, now: float, *, prefill: bool) -> int:
        """Resume after a weight update; returns the number of tokens that are prefilled again."""
        self.time, self.stopped = max(now, self.time), False
        tokens = sum(round(tokens - (end - self.decoded)) for end, _, tokens in self.running) if prefill else 0
        self.time += tokens * self._speeds.prefill_token_s
        self.move(now)
        return tokens

    def drop(self, rollouts: set[int]) -> int:
        """Abort these; returns their tokens that are not sampled yet."""
        unsampled = sum(round(end - self.decoded) for end, rollout, _ in self.running if rollout in rollouts)
        unsampled += sum(tokens for rollout, tokens in self.waiting if rollout in rollouts)
        self.running = [sequence for sequence in self.running if sequence[1] not in rollouts]
        heapq.heapify(self.running)
        self.waiting = deque(sequence for sequence in self.waiting if sequence[0] not in rollouts)
        return unsampled


class _Run:
    def __init__(self, speeds: Speeds, shape: Shape, steps: int, seed: int) -> None:
        self.speeds, self.shape, self.steps = speeds, shape, steps
        self.rng, self.numbers = random.Random(seed), count()
        self.now = 0.0
        self.engines = [Decoder(speeds, shape) for _ in range(shape.engines)]
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        limit = shape.max_staleness if shape.max_staleness is not None else int(shape.asynchronous)
        self.admission = Admission(batch_size=shape.groups, max_staleness=limit, last_step=steps)
        self.unfinished: dict[int, set[int]] = {}  # rollouts of each group
        self.tokens: dict[int, int] = {}  # of each group that was not trained on
        self.group_of: dict[int, int] = {}
        self.spare: set[int] = set()  # groups beyond the batch
        self.sampled = self.lost = self.prefilled = 0
        self.requests = 0
        self.requested = self.training = self.updating = False
        self.batch: list[int] | None = None
        self.finished: list[Step] = []

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (self.now + seconds, next(self.numbers), action))

    # -- rollouts

    def admit(self) -> None:
        n, spares = self.admission.free, 0
        if self.shape.max_staleness is None:  # one batch, when slime requests it
            fresh = self.requested and not (self.admission.in_flight or self.admission.available)
            n = min(n, self.shape.groups) if fresh else 0
            spares = max(0, (self.shape.oversampled or 0) - self.shape.groups) if n else 0
        for place in range(n + spares):
            group = next(self.numbers)
            if place < n:
                self.admission.admit(group)
            else:
                self.spare.add(group)
            lengths = {next(self.numbers): self.shape.length(self.rng) for _ in range(self.shape.size)}
            self.unfinished[group], self.tokens[group] = {*lengths}, sum(lengths.values())
            for rollout, tokens in lengths.items():
                self.group_of[rollout] = group
                engine = min(self.engines, key=lambda engine: engine.load)
                engine.waiting.append((rollout, tokens))
                engine.move(self.now)

    def end(self, rollout: int) -> None:
        group = self.group_of.pop(rollout)
        if group not in self.unfinished:  # it was dropped
            return
        self.unfinished[group].discard(rollout)
        if self.unfinished[group]:
            return
        if group in self.spare:  # it takes the place of one that is not finished
            late = max(filter(self.unfinished.get, self.unfinished.keys() - self.spare), default=None)
            if late is None:
                return
            self.spare ^= {group, late}
            self.admission.replace(late)
            self.admission.admit(group)
        del self.unfinished[group]
        self.admission.end(group)

    def drop_spare(self) -> None:
        rollouts = {rollout for group in self.spare for rollout in self.unfinished.pop(group)}
        unsampled = sum(engine.drop(rollouts) for engine in self.engines)
        dropped = sum(self.tokens.pop(group) for group in self.spare) - unsampled
        self.lost, self.sampled = self.lost + dropped, self.sampled + dropped
        self.spare.clear()

    # -- the driver

    def request(self) -> None:
        self.requested = self.requests < self.steps

    def take(self) -> None:
        if not self.requested or self.batch is not None or (batch := self.admission.take()) is None:
            return
        self.drop_spare()
        self.batch, self.requested = batch, False
        self.requests += 1

    def train(self) -> None:
        if self.batch is None or self.training or self.updating:
            return
        behind = fmean(self.admission.step - step for step in self.admission.batch.values())
        tokens = sum(self.tokens.pop(group) for group in self.batch)
        self.batch, self.training = None, True
        self.sampled += tokens
        if self.shape.asynchronous:
            self.request()
        seconds = self.speeds.train_s + self.speeds.train_token_s * tokens
        began = self.now
        self.later(seconds + self.shape.colocated * self.speeds.offload_s, lambda: self.trained(began, tokens, behind))

    def trained(self, began: float, tokens: int, behind: float) -> None:
        self.finished.append(Step(began, self.now, 0.0, tokens, behind))
        self.training, self.updating = False, True

    def update(self) -> None:
        """Begin the weight update; train_async.py first waits for the batch that it has requested."""
        if not self.updating or self.requested or self.engines[0].stopped:
            return
        for engine in self.engines:
            engine.move(self.now)
            engine.stopped = True
        self.later(self.speeds.sync_s, self.updated)

    def updated(self) -> None:
        self.updating = False
        self.finished[-1] = replace(self.finished[-1], synced=self.now)
        self.admission.advance(len(self.finished))
        for engine in self.engines:
            engine.move(self.now)
            self.prefilled += engine.resume(self.now, prefill=self.shape.resumes)
        if not self.shape.asynchronous:
            self.request()

    def simulate(self) -> Forecast:
        self.request()
        while len(self.finished) < self.steps or self.updating:
            self.admit()
            self.take()
            self.train()  # which may request the next batch
            self.admit()
            self.update()
            engine = min(self.engines, key=Decoder.next_end)
            if (end := engine.next_end()) <= (self.timers[0][0] if self.timers else math.inf) and end < math.inf:
                self.now = end
                engine.move(end)
                rollout = engine.pop()
                engine.move(end)
                self.later(self.speeds.agent_s, lambda rollout=rollout: self.end(rollout))
            elif not self.timers:
                limit = f"agl_max_staleness {self.shape.max_staleness}"
                problem = "train_async.py waits for rollouts that it may not sample yet"
                raise ConfigError(f"{limit}: {problem}; set 1 or more")
            else:
                self.now, _, action = heapq.heappop(self.timers)
                action()
        return self.result()

    def result(self) -> Forecast:
        first = len(self.finished) // 2
        half = self.finished[first:-1] or self.finished[first:]  # nothing is sampled beside the last step
        began = self.finished[first - 1].synced if first else 0.0
        span = max(half[-1].synced - began, 1e-9)
        busy = sum(step.trained - step.began + self.speeds.sync_s for step in half)
        total = max(self.sampled, 1)
        return Forecast(
            steps=tuple(self.finished),
            step_s=span / len(half),
            trainer_waits=1 - busy / span,
            engines_wait=fmean(engine.idle_s for engine in self.engines) / max(self.now, 1e-9),
            lost_tokens=self.lost / total,
            prefilled_again=self.prefilled / total,
            behind=fmean(step.behind for step in half),
        )


def forecast(speeds: Speeds, shape: Shape, *, steps: int = 12, seed: int = 0) -> Forecast:
    """Simulate ``steps`` steps; the same arguments give the same result. Raises ``ConfigError`` for a run that waits
    for ever."""
    return _Run(speeds, shape, steps, seed).simulate()


def compare(speeds: Speeds, shape: Shape, *, steps: int = 12) -> list[tuple[str, Forecast]]:
    """Forecasts of the run as it is, then with other staleness limits and with more engines."""
    changes: list[tuple[str, Shape]] = [("as it is", shape)]
    if not shape.colocated:
        for limit in (1, 2, 4):
            limited = replace(shape, max_staleness=limit, resumes=True, oversampled=None)
            changes += [(f"agl_max_staleness {limit}", limited)] if limit != shape.max_staleness else []
        engine_counts = {round(shape.engines * factor) for factor in (1.5, 2)} - {shape.engines}
        changes += [(f"{engines} engines", replace(shape, engines=engines)) for engines in sorted(engine_counts)]
    return [(name, forecast(speeds, changed, steps=steps)) for name, changed in changes]
