"""``agl-slime buffer``: serve until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

import tyro

from agl_slime.buffer.server import BufferServer
from agl_slime.buffer.settings import BufferSettings
from agl_slime.errors import AglSlimeError, ConfigError

# Threads that return from SQLite wait this long for the interpreter lock while the event loop is busy; the default of 5
# ms adds up to half a second for a batch of 256 items.
_SWITCH_INTERVAL_S = 0.0005

TOKEN_VARIABLE = "AGL_SLIME_BUFFER_TOKEN"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    given = list(arguments)
    token = os.environ.get(TOKEN_VARIABLE)
    if token and not any(argument.split("=")[0] == "--token" for argument in given):
        given += ["--token", token]
    try:
        settings = tyro.cli(BufferSettings, prog="agl-slime buffer", args=given)
        logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
        asyncio.run(_serve(settings))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except AglSlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(settings: BufferSettings) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    async with BufferServer(settings=settings) as server:
        kept = f"kept in {settings.run_dir}" if settings.run_dir is not None else "in memory only; --run-dir keeps it"
        print(f"rollout buffer at {server.url} (items {kept})", flush=True)
        await ended.wait()
