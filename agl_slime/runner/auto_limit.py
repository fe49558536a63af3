"""How many rollouts should be in flight: as many as keep the engine full, and its queue short.

A pure function over what the engine says of itself, a look about every second. It begins with few and doubles while
nothing waits (slow start); after the first queue it goes up by half at a time where nothing waits, and down to what
the engine works on plus a short queue where much does. Refused calls (429, 503) take as many away, and a tenth. A limit
is only raised where it is what holds rollouts back: below it, tasks or the bound on staleness decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from agl_slime.support.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class AutoLimitSettings:
    """Bounds and steps of the limit. Shares are of the requests that the engine works on."""

    first: int = 8
    """Rollouts in flight at the start; only refused calls bring the limit below."""
    most: int = 4096
    """Never more."""
    queue: float = 0.1
    """The queue that is aimed at."""
    long_queue: float = 0.3
    """A queue from which on the limit is lowered."""
    raise_by: float = 1.5
    """Factor of a raise after the first queue."""
    full: float = 0.9
    """Share of the KV cache from which on the limit is not raised: what runs still grows."""
    looks: int = 3
    """Looks that an opinion is made of, once slow start is over."""

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
    """What is seen at one moment: rollouts ``in_flight``; requests that the engine (or all of a router's) works on
    (``running``) and has in its queue (``waiting``); the share of its KV cache in use; the most requests that it works
    on at once, 0 where it does not say; calls that it has ``refused`` since the last look."""

    in_flight: int
    running: int
    waiting: int
    usage: float = 0.0
    most_running: int = 0
    refused: int = 0


@dataclass(frozen=True, kw_only=True)
class AutoLimit:
    """The limit as it is now, and what it was made of; ``step`` gives the next."""

    settings: AutoLimitSettings
    limit: int
    slow_start: bool = True
    held: int = 0
    """Calls that the engine had taken when it refused others; 0 as long as it has refused none."""
    seen: tuple[Look, ...] = ()
    """Looks since the limit was last changed."""

    @classmethod
    def start(cls, settings: AutoLimitSettings | None = None) -> AutoLimit:
        settings = settings or AutoLimitSettings()
        return cls(settings=settings, limit=settings.first)

    def step(self, look: Look) -> AutoLimit:
        settings, ending = self.settings, look.in_flight > self.limit
        if look.refused and not ending:
            # a refused call is a rollout too many, or one that has asked twice; what was taken there is room for
            held = look.running + look.waiting
            return replace(self._at(min(self.limit, max(look.in_flight - look.refused, held) * 9 // 10)), held=held)
        if not look.running:
            return self  # it is paused for new weights, or nobody asks
        seen = (*self.seen, look)[-settings.looks :]
        now = replace(self, seen=seen)
        if len(seen) < (1 if self.slow_start and not look.waiting else settings.looks):
            return now
        running, waiting = (sum(getattr(one, name) for one in seen) / len(seen) for name in ("running", "waiting"))
        if waiting > max(2.0, settings.long_queue * running):
            if ending:
                return now  # of what was lowered before
            fits = round(look.in_flight - waiting + max(1.0, settings.queue * running))
            return self._at(max(fits, min(self.limit, settings.first)))
        if ending:
            return self._at(look.in_flight)  # the queue is short before all that are too many have ended
        if waiting >= max(1.0, settings.queue * running) or look.usage >= settings.full:
            return replace(now, slow_start=False)
        if look.in_flight < 0.9 * self.limit:
            return now  # there is nothing more to do
        return self._raised(look, calls=running + waiting)

    def _raised(self, look: Look, *, calls: float) -> AutoLimit:
        """By no more than what the engine says it has room for, as far as it does."""
        factor = 2.0 if self.slow_start else self.settings.raise_by
        most = min(filter(None, ((1 + self.settings.queue) * look.most_running, float(self.held))), default=0.0)
        if most and calls:  # of those in flight some are with their tools: as many calls come of more
            factor = min(factor, max(1.0, most / calls))
        if look.usage > 0:
            factor = min(factor, max(1.0, self.settings.full / look.usage))
        return replace(self._at(max(int(self.limit * factor), self.limit + 1)), slow_start=self.slow_start)

    def _at(self, limit: int) -> AutoLimit:
        return replace(self, limit=min(max(1, limit), self.settings.most), slow_start=False, seen=())
