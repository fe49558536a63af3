"""The command line. Errors are one sentence on stderr, never a traceback; Ctrl-C ends within seconds and keeps what was
written.

Exit codes: 0 finished, 1 the run could not go on, 2 a flag or file cannot be used, 130 interrupted.
``AGL_SLIME_DEBUG=1`` shows tracebacks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NoReturn

import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from agl_slime.errors import AglSlimeError, ConfigError, MissingDependencyError, spell_exception
from agl_slime.run.settings import TrainConfig

# With this variable set, tracebacks and the package's debug messages are shown.
DEBUG_VARIABLE = "AGL_SLIME_DEBUG"

COMMANDS = {
    "train": "train an agent online",
    "buffer": "serve a rollout buffer",
    "assign-instance-id": "give each line of a JSON-lines file an instance_id",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(
            "usage: agl-slime COMMAND [flags]\n\n"
            + "\n".join(f"  {name:<18} {text}" for name, text in COMMANDS.items())
        )
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


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """``main`` as the whole of a process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    training = arguments[:1] == ["train"]
    if training:  # until the event loop has handlers of its own, SIGTERM is what Ctrl-C is
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = main(arguments)
    except SystemExit as end:  # of --help, or of flags that cannot be parsed
        code = end.code if isinstance(end.code, int) else 2
    if training:
        # Reports, engine and store are closed by now. A thread may still be in the middle of native code (training, an
        # import, an agent that was given up), and the interpreter's ordinary end would wait for it for seconds, or
        # abort.
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _train(arguments: list[str]) -> int:
    errors = Console(stderr=True)
    debug = bool(os.environ.get(DEBUG_VARIABLE))
    try:
        own, slime_flags = _split_at_dashes(arguments)
        config = tyro.cli(TrainConfig, prog="train.py", args=own)
        config.check_files()
        console = Console()
        _configure_logging(errors, debug=debug)
        with console.status("loading ...") if console.is_terminal else nullcontext():
            from agl_slime.run.local import run_training  # Agent Lightning takes seconds to import; --help should not

        _run_until_signal(run_training(config, slime_flags=slime_flags, console=console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("Interrupted; what was written is kept.", highlight=False)
        return 130
    except (ConfigError, MissingDependencyError) as error:
        _tell(errors, str(error), error, debug)
        return 2
    except AglSlimeError as error:
        _tell(errors, str(error), error, debug)
        return 1
    except Exception as error:  # a mistake of ours; the person who runs this is not the one who can use a traceback
        _tell(
            errors,
            f"{spell_exception(error)}; this should not happen: please report it with what {DEBUG_VARIABLE}=1 shows",
            error,
            debug,
        )
        return 1
    return 0


def _split_at_dashes(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Our flags, and after ``--`` slime's."""
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _tell(console: Console, text: str, error: BaseException, debug: bool) -> None:
    # as Text: rich would take parts of paths for markup and :names: for emoji
    console.print(Text(f"error: {' '.join(text.split())}", style="red"), soft_wrap=True)
    if debug:
        traceback.print_exception(error)


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


def _configure_logging(console: Console, *, debug: bool) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False, rich_tracebacks=False, markup=False)
    handler.setFormatter(logging.Formatter("%(message)s") if debug else _OneLine("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    if debug:
        logging.getLogger("agl_slime").setLevel(logging.DEBUG)
        return
    handler.addFilter(_not_reported_elsewhere)
    for noisy in ("agentlightning", "httpx", "LiteLLM", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


class _OneLine(logging.Formatter):
    """What happened, without its traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return record.getMessage()


def _not_reported_elsewhere(record: logging.LogRecord) -> bool:
    # a failed rollout is counted and explained in the reports; Agent Lightning would add a traceback for each
    return not (record.name.startswith("agentlightning.runner") and "Exception during rollout" in record.getMessage())


if __name__ == "__main__":
    run()
