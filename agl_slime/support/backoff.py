"""Retries with exponential backoff and jitter, limited by tries or time; the final error names the first cause."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Backoff:
    """A series of failures: the pause after each, and when to give up. ``run`` retries one call; an endless follower
    calls ``pause`` and ``reset``. The pause after the n-th failure (from 0) is uniform in [0, min(cap_s, base_s · 2ⁿ)],
    "full jitter", which needs the fewest calls when many clients retry at once (M. Brooker, "Exponential Backoff and
    Jitter", AWS Architecture Blog, 2015).

    Args:
        failure: begins the final error's sentence: "the store at … did not answer".
        error: makes the final error from that sentence; its ``__cause__`` is the first failure.
        tries: give up at this failure; None for no limit.
        patience_s: give up when the next try would come later than this after the first failure; None for no limit.
        deadline: the same limit as a ``time.monotonic`` time.
    """

    def __init__(
        self,
        failure: str = "gave up",
        error: Callable[[str], Exception] = ConnectionError,
        *,
        base_s: float = 0.2,
        cap_s: float = 5.0,
        tries: int | None = None,
        patience_s: float | None = None,
        deadline: float | None = None,
    ) -> None:
        self._failure, self._error = failure, error
        self._base_s, self._cap_s = base_s, cap_s
        self._tries, self._patience_s, self._deadline = tries, patience_s, deadline
        self.failures = 0
        self.first: BaseException | None = None
        self._began = 0.0

    def reset(self) -> None:
        """Note a success: the next failure is a first one."""
        self.failures, self.first = 0, None

    def failed(self, error: BaseException, *, at_least_s: float = 0.0) -> float | None:
        """Count a failure. Returns the seconds to pause, ``at_least_s`` and the jitter; None to give up."""
        now = time.monotonic()
        if self.first is None:
            self.first, self._began = error, now
        # the server's Retry-After gets jitter, too: its clients would all return at the same time
        pause = at_least_s + random.uniform(0.0, min(self._cap_s, self._base_s * 2.0 ** min(self.failures, 60)))
        self.failures += 1
        late = (self._patience_s is not None and now + pause - self._began > self._patience_s) or (
            self._deadline is not None and now + pause >= self._deadline
        )
        return None if late or (self._tries is not None and self.failures >= self._tries) else pause

    def given_up(self, last: BaseException) -> Exception:
        """The final error: number of tries, seconds, the first failure, and the last if it differs."""
        assert self.first is not None
        seconds, first, latest = time.monotonic() - self._began, _format(self.first), _format(last)
        causes = first if first == latest else f"{first}; last: {latest}"
        final = self._error(f"{self._failure} ({self.failures} tries in {seconds:.1f} s): {causes}")
        final.__cause__ = self.first
        return final

    async def pause(self, error: BaseException) -> None:
        """Sleep after a failure, or raise the final error."""
        seconds = self.failed(error)
        if seconds is None:
            raise self.given_up(error)
        await asyncio.sleep(seconds)

    async def run(self, call: Callable[[], Awaitable[T]], retried: Callable[[Exception], bool]) -> T:
        """Call ``call`` until it returns; raises errors that are not ``retried``, or the final error."""
        while True:
            try:
                answer = await call()
            except Exception as error:
                if not retried(error):
                    raise
                await self.pause(error)
            else:
                self.reset()
                return answer


def _format(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
