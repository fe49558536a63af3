"""Calls of the functions that a program passes to the loop."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.support.threads import run_in_thread

logger = logging.getLogger(__name__)

StepFn = Callable[..., Any]


def adapt_step_function(function: StepFn, name: str) -> Callable[[int], Awaitable[Any]]:
    """Wrap ``function`` as a coroutine function of the iteration, which is passed on only if ``function`` takes it (see
    ``OnlineRLLoop``). Raises ``ConfigError`` when it cannot be called so."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin without a signature
        signature = inspect.Signature()
    parameters = list(signature.parameters.values())
    named = [p.name for p in parameters if p.name in ("iteration", "rollout_id") and p.kind != p.POSITIONAL_ONLY]
    positional = any(
        p.kind == p.VAR_POSITIONAL
        or (p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is inspect.Parameter.empty)
        for p in parameters[:1]
    )

    def bind(iteration: int) -> Callable[[], Any]:
        if named:
            return partial(function, **{named[0]: iteration})
        return partial(function, iteration) if positional else function

    try:
        inspect.signature(bind(0)).bind()
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called with the iteration alone: {error}") from error
    except ValueError:
        pass
    return lambda iteration: call_function(bind(iteration))


async def call_function(function: Callable[[], Any]) -> Any:
    """Call a user's function, in a thread if it is sync."""
    if inspect.iscoroutinefunction(function):
        return await function()
    result = await run_in_thread(function)
    return await result if inspect.isawaitable(result) else result


async def finish_step(step: asyncio.Future[Any], *, timeout_s: float) -> bool:
    """Wait for a training step. Cancelled, wait ``timeout_s`` longer, as no checkpoint is possible during a step:
    returns True if the step finished within it; otherwise cancels the step and re-raises."""
    try:
        await asyncio.shield(step)
    except asyncio.CancelledError:
        if not step.done() and timeout_s:
            logger.warning("Interrupted: finishing the current training step first; Ctrl-C again ends at once.")
            await asyncio.wait({step}, timeout=timeout_s)
        if not step.done():
            step.cancel()
            raise
        return True
    return False
