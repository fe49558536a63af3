"""A store and a runner in a process of their own, for slime's manager to take rollouts from.

    python -m agl_slime.slime.serve --agent module:Class [--host 127.0.0.1] [--port 4748] [--max-concurrent 1024]

It prints the URL to give slime as ``agl_store_url`` (or ``AGL_SLIME_STORE_URL``), and runs until it is interrupted. On
another address than a loopback one it needs ``AGL_SLIME_STORE_TOKEN``, here and in slime's environment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from agl_slime.errors import AglSlimeError


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a store and run an agent on the rollouts that slime's manager puts into it."""

    agent: str
    """The agent to run, as module:Class."""
    host: str = "127.0.0.1"
    """Address to serve the store on."""
    port: int = 4748
    """Port of the store; 0 takes a free one."""
    max_concurrent: int = 1024
    """Rollouts in flight in this process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit code."""
    config = tyro.cli(ServeConfig, prog="python -m agl_slime.slime.serve", args=argv)
    from agl_slime.rollout.loading import load_agent
    from agl_slime.runner.concurrent import RunnerSettings
    from agl_slime.runner.thread import RunnerThread
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.store.server import StoreService

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    try:
        store = BridgeStore()
        runner = RunnerThread(
            agent=load_agent(config.agent), store=store, settings=RunnerSettings(max_concurrent=config.max_concurrent)
        )
        with (
            StoreService(
                store=store, host=config.host, port=config.port, token=os.environ.get("AGL_SLIME_STORE_TOKEN")
            ) as service,
            runner,
        ):
            print(f"agl_store_url: {service.url}", flush=True)
            while not ended.wait(1.0):
                if runner.failure is not None:
                    print(f"error: the runner ended: {runner.failure}", file=sys.stderr)
                    return 1
    except AglSlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
