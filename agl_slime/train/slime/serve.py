"""A store and a runner in a separate process, from which slime's manager takes rollouts.

    python -m agl_slime.train.slime.serve --agent module:Class [--host 127.0.0.1] [--port 4748] [--max-concurrent 1024]

Prints the URL for slime's ``agl_store_url`` (or ``AGL_SLIME_STORE_URL``), and runs until interrupted. An address other
than loopback needs ``AGL_SLIME_STORE_TOKEN``, here and in slime's environment.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence

from agl_slime.support.flags import parse_flags
from agl_slime.support.terminal import exit_code_of, print_line


def serve(*, agent: str, host: str = "127.0.0.1", port: int = 4748, max_concurrent: int = 1024) -> int:
    """Serve a store and run an agent on the rollouts that slime's manager enqueues, until SIGINT or SIGTERM.

    Args:
        agent: The agent to run, as module:Class.
        host: Address to serve the store on.
        port: Port of the store; 0 takes a free one.
        max_concurrent: Rollouts in flight in this process.
    """
    from agl_slime.agent.loading import load_agent
    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.store.server import StoreService

    configure_worker_process()
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    store, settings = BridgeStore(), RunnerSettings(max_concurrent=max_concurrent)
    service = StoreService(store=store, host=host, port=port, token=os.environ.get("AGL_SLIME_STORE_TOKEN"))
    with service, RunnerThread(agent=load_agent(agent), store=store, settings=settings) as runner:
        print_line(f"agl_store_url: {service.url}")
        while not ended.wait(1.0):
            if runner.failure is not None:
                print_line(f"error: the runner ended: {runner.failure}", to=sys.stderr)
                return 1
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """``serve`` from the command line; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    return exit_code_of(lambda: parse_flags(serve, prog="python -m agl_slime.train.slime.serve", arguments=arguments))


if __name__ == "__main__":
    sys.exit(main())
