"""The command line. Errors are one sentence on stderr, never a traceback; Ctrl-C ends within seconds and keeps what was written.

Exit codes: 0 finished, 1 the run could not go on, 2 a flag or file cannot be used, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import tyro
from rich.console import Console
from rich.logging import RichHandler

from agl_slime.config import TrainConfig
from agl_slime.errors import AglSlimeError, ConfigError, MissingDependencyError

COMMANDS = {
    "train": "train an agent online",
    "buffer": "serve a rollout buffer",
    "assign-instance-id": "give each line of a JSON-lines file an instance_id",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: agl-slime COMMAND [flags]\n\n" + "\n".join(f"  {name:<18} {text}" for name, text in COMMANDS.items()))
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        print(f"agl-slime: there is no command {command!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if command == "buffer":
        from agl_slime.buffer.command import main as serve_buffer

        return serve_buffer(rest)
    if command == "assign-instance-id":
        from agl_slime.buffer.instance_ids import main as assign_instance_ids

        return assign_instance_ids(rest)
    return _train(rest)


def _train(arguments: list[str]) -> int:
    errors = Console(stderr=True)
    try:
        own, slime_flags = _split_at_dashes(arguments)
        config = tyro.cli(TrainConfig, prog="train.py", args=own)
        console = Console()
        _configure_logging(errors)
        from agl_slime.training_run import run_training  # Agent Lightning takes seconds to import; --help should not

        _run_until_signal(run_training(config, slime_flags=slime_flags, console=console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("Interrupted; what was written is kept.", highlight=False)
        return 130
    except (ConfigError, MissingDependencyError) as error:
        errors.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 2
    except AglSlimeError as error:
        errors.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    return 0


def _split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our flags, and after ``--`` slime's."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _run_until_signal(work: Coroutine[Any, Any, Any]) -> None:
    """Run to the end, or until SIGINT or SIGTERM cancels it; a second SIGINT ends the process at once."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        interrupted = False

        def interrupt() -> None:
            nonlocal interrupted
            if interrupted:
                os._exit(130)
            interrupted = True
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt)
        try:
            await task
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    asyncio.run(run())


def _configure_logging(console: Console) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False, rich_tracebacks=False)
    handler.addFilter(_not_reported_elsewhere)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    for noisy in ("agentlightning", "httpx", "LiteLLM"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _not_reported_elsewhere(record: logging.LogRecord) -> bool:
    # a failed rollout is counted and explained in the reports; Agent Lightning would add a traceback for each
    return not (record.name.startswith("agentlightning.runner") and "Exception during rollout" in record.getMessage())


if __name__ == "__main__":
    sys.exit(main())
