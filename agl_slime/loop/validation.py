"""Validations that run beside training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class SideValidations:
    """One validation at a time, ``validate`` with the iteration after which it begins; nothing waits for it. One that
    falls due while another runs begins when that has ended, with the weights of then."""

    def __init__(self, validate: Callable[[int], Awaitable[dict[str, Any]]]) -> None:
        self._validate = validate
        self._running: asyncio.Future[dict[str, Any]] | None = None
        self._due: int | None = None

    def begin(self, iteration: int) -> None:
        if self._running is None:
            self._running = asyncio.ensure_future(self._validate(iteration))
            # when the run ends with another error, nobody asks
            self._running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        else:
            self._due = iteration

    def ended(self) -> dict[str, Any]:
        """The metrics of the one that has ended since the last call, or none; raises what it has raised."""
        if self._running is None or not self._running.done():
            return {}
        metrics, self._running = self._running.result(), None
        if self._due is not None:
            due, self._due = self._due, None
            self.begin(due)
        return metrics

    async def last(self, iteration: int) -> dict[str, Any]:
        """The metrics of one that begins now, when no other is under way any more, and what that had of its own (the
        start validation)."""
        self._due = None
        before = await self._end()
        self.begin(iteration)
        return {**before, **await self._end()}

    async def _end(self) -> dict[str, Any]:
        if self._running is not None:
            await asyncio.wait({self._running})
        return self.ended()

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()
