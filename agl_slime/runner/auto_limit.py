"""Automatic limit of rollouts in flight: enough to keep the engine full with a short queue.

A pure function of the engine's load, sampled about once a second. The limit doubles while no request waits (slow
start). After the first queue it rises by half at a time while no request waits, and falls to the running requests plus
a short queue when many wait. Refused calls (429, 503) lower it by their number and a tenth. It is raised only when
reached: otherwise tasks or the staleness limit decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agl_slime.support.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class AutoLimitSettings:
    """Bounds and steps of the limit. Queues are shares of the running requests."""

    first: int = 8
    """The limit at the start; only refused calls lower it further."""
    most: int = 4096
    """The highest limit."""
    queue: float = 0.1
    """The target queue."""
    long_queue: float = 0.3
    """The queue above which the limit is lowered."""
    raise_by: float = 1.5
    """Factor of a raise after slow start."""
    full: float = 0.9
    """KV cache usage above which the limit is not raised: running requests still grow."""
    looks: int = 3
    """Number of looks that are averaged after slow start."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("first looks", lambda value: value >= 1, "at least 1"),
            ("most", lambda value: value >= self.first, f"at least first ({self.first})"),
            ("queue", lambda value: 0 < value < self.long_queue, f"above 0 and below long_queue ({self.long_queue})"),
            ("raise_by", lambda value: 1 < value <= 2, "above 1 and at most 2"),
            ("full", lambda value: 0 < value <= 1, "in (0, 1]"),
        )


@dataclass(frozen=True, kw_only=True)
class Look:
    """The load at one moment, of an engine or of all engines behind a router."""

    in_flight: int
    """Rollouts."""
    running: int
    waiting: int
    """Requests in the engine's queue."""
    usage: float = 0.0
    """Share of the KV cache in use."""
    most_running: int = 0
    """The engine's limit of running requests; 0 = unknown."""
    refused: int = 0
    """Calls refused since the last look."""


@dataclass(frozen=True, kw_only=True)
class AutoLimit:
    """The current limit and its history; ``step`` returns the next state."""

    settings: AutoLimitSettings
    limit: int
    slow_start: bool = True
    capacity: int = 0
    """Requests in the engine when it last refused a call; 0 = none refused yet."""
    recent: tuple[Look, ...] = ()
    """Looks since the last change of the limit."""

    @classmethod
    def start(cls, settings: AutoLimitSettings | None = None) -> AutoLimit:
        settings = settings or AutoLimitSettings()
        return cls(settings=settings, limit=settings.first)

    def step(self, look: Look) -> AutoLimit:
        settings, ending = self.settings, look.in_flight > self.limit
        if look.refused and not ending:
            # each refused call is a rollout too many, or a repeated call; the engine has room for its current requests
            capacity = look.running + look.waiting
            limit = min(self.limit, max(look.in_flight - look.refused, capacity) * 9 // 10)
            return replace(self._at(limit), capacity=capacity)
        if not look.running:
            return self  # paused for new weights, or idle
        recent = (*self.recent, look)[-settings.looks :]
        now = replace(self, recent=recent)
        if len(recent) < (1 if self.slow_start and not look.waiting else settings.looks):
            return now
        running, waiting = (sum(getattr(one, name) for one in recent) / len(recent) for name in ("running", "waiting"))
        if waiting > max(2.0, settings.long_queue * running):
            if ending:
                return now  # an earlier cut is still taking effect
            fits = round(look.in_flight - waiting + max(1.0, settings.queue * running))
            return self._at(max(fits, min(self.limit, settings.first)))
        if ending:
            return self._at(look.in_flight)  # the queue is short already: cut no further
        if waiting >= max(1.0, settings.queue * running) or look.usage >= settings.full:
            return replace(now, slow_start=False)
        if look.in_flight < 0.9 * self.limit:
            return now  # the limit does not bind
        return self._raised(look, calls=running + waiting)

    def _raised(self, look: Look, *, calls: float) -> AutoLimit:
        """The raised limit, within the engine's room as far as that is known."""
        factor = 2.0 if self.slow_start else self.settings.raise_by
        most = min(filter(None, ((1 + self.settings.queue) * look.most_running, float(self.capacity))), default=0.0)
        if most and calls:  # calls grow in proportion to rollouts, some of which run their tools
            factor = min(factor, max(1.0, most / calls))
        if look.usage > 0:
            factor = min(factor, max(1.0, self.settings.full / look.usage))
        return replace(self._at(max(int(self.limit * factor), self.limit + 1)), slow_start=self.slow_start)

    def _at(self, limit: int) -> AutoLimit:
        return replace(self, limit=min(max(1, limit), self.settings.most), slow_start=False, recent=())
