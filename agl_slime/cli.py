"""The command line. Errors are one sentence on stderr, never a traceback; Ctrl-C keeps what was written.

Exit codes: 0 finished, 1 the run could not go on, 2 a flag or file cannot be used, 130 interrupted, 141 nobody reads
the output any more.
``AGL_SLIME_DEBUG=1`` shows tracebacks.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from agl_slime.commands import COMMANDS as READONLY_COMMANDS
from agl_slime.errors import (
    AglSlimeError,
    ConfigError,
    MissingDependencyError,
    UnknownVersionError,
    format_exception,
)
from agl_slime.support.net import bypass_proxies

# With this variable set, tracebacks and the package's debug messages are shown.
DEBUG_VARIABLE = "AGL_SLIME_DEBUG"
_PIPE_CLOSED = 141  # what a shell reports of a program that SIGPIPE has ended

COMMANDS = {
    "train": "train an agent online",
    "doctor": "what is installed, what will be used, and what to do about what will not work",
    "model": "fetch a model and print its directory",
    "eval": "is it better: a model on tasks, or two on the same ones",
    "export": "the rollouts that a run has kept, as data: sft, dpo, messages, parquet, hf-dataset",
    "chat": "talk with the model of a run, or watch it do tasks",
    "plot": "draw the reward.png of a run from its metrics",
    "view": "show a run in the browser, live while it runs",
    "report": "write a run as one HTML page: trend, steps, rollouts, tokens",
    "audit": "prove from the files of a run that they agree",
    "buffer": "serve a rollout buffer",
    "gateway": "serve the model to agents that other runners execute",
    "assign-instance-id": "give each line of a JSON-lines file an instance_id",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        commands = "\n".join(f"  {name:<18} {text}" for name, text in COMMANDS.items())
        print(f"usage: agl-slime COMMAND [flags]\n\n{commands}")
        return 0
    command, *rest = arguments
    if command != "doctor":  # which tells of the environment as it is
        bypass_proxies()  # before anything that makes a client, such as an agent's module
    if command in ("buffer", "gateway"):
        try:
            return import_module(f"agl_slime.{'buffer.server' if command == 'buffer' else 'gateway.command'}").main(
                rest
            )
        except MissingDependencyError as error:
            return _told(Console(stderr=True), error, bool(os.environ.get(DEBUG_VARIABLE)))
    if command in COMMANDS:
        functions: dict[str, Callable[[list[str]], object]] = {"train": _train, "eval": _eval, **READONLY_COMMANDS}
        functions["chat"] = lambda flags: import_module("agl_slime.run.chat").main(flags)
        return _reported(partial(functions[command], rest))
    print(f"agl-slime: there is no command {command!r}; the commands are {', '.join(COMMANDS)}", file=sys.stderr)
    return 2


def run(argv: Sequence[str] | None = None) -> NoReturn:
    """``main`` as the whole of a process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    training = arguments[:1] == ["train"]
    for stream in (sys.stdout, sys.stderr):  # a path may hold bytes that are no text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if training:  # until the event loop has handlers of its own, these are what Ctrl-C is
        for number in _stop_signals():
            signal.signal(number, _stop)
        threading.excepthook = _of_a_thread
    try:
        code = main(arguments)
    except SystemExit as end:  # of --help, or of flags that cannot be parsed
        code = end.code if isinstance(end.code, int) else 2
    except BrokenPipeError:
        code = _PIPE_CLOSED
    except KeyboardInterrupt:
        code = 130
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # whoever read the output is gone; the interpreter's end would complain when it flushes again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or _PIPE_CLOSED
    if training:
        # Reports, engine and store are closed by now; the interpreter's ordinary end would wait for seconds, or abort,
        # for a thread that is still in native code.
        os._exit(code)
    sys.exit(code)


def _train(arguments: list[str]) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)  # what follows is slime's

    from agl_slime.run.flags import split_env_flags
    from agl_slime.run.settings import TrainConfig  # a slime that is not known is told there

    own, of_env = split_env_flags(arguments[:at])
    config, slime_flags = tyro.cli(TrainConfig, prog="train.py", args=own), arguments[at + 1 :]
    config = replace(config, env_arguments=of_env) if of_env else config
    if config.trainer == "local" and config.local.torch_threads is None:  # this process is ours
        config = replace(config, local=replace(config.local, torch_threads="auto"))
    console = Console()
    config.check_files()
    embedded = config.trainer == "local" and config.sglang_url is None and config.engine == "embedded"
    with _engine_ahead() if embedded else nullcontext():
        with console.status("loading ...") if console.is_terminal else nullcontext():
            # Agent Lightning, which this imports, takes seconds; --help should not
            from agl_slime.runner.process import own_this_process

            own_this_process()  # before the other imports, which it makes faster
            from agl_slime.run.local import run_training
        _run_until_signal(run_training(config, slime_flags=slime_flags, console=console))


def _engine_ahead() -> AbstractContextManager[None]:
    from agl_slime.engine.process import embedded_engine_ahead

    return embedded_engine_ahead()


def _eval(arguments: list[str]) -> None:
    from agl_slime.run.evaluate import EvalConfig, run_evaluation
    from agl_slime.run.flags import split_env_flags

    own, of_env = split_env_flags(arguments)
    config = tyro.cli(EvalConfig, prog="agl-slime eval", args=own)
    config = replace(config, env_arguments=of_env) if of_env else config
    _run_until_signal(run_evaluation(config))


logger = logging.getLogger(__name__)

_stopped: list[int] = []
"""The signals that came before the event loop had handlers of its own."""


def _stop(number: int, _: Any) -> NoReturn:
    _stopped.append(number)
    raise KeyboardInterrupt


def _of_a_thread(failed: threading.ExceptHookArgs) -> None:
    """A library's thread on a full disk, such as TensorBoard's, says so in a sentence as everything else does."""
    if isinstance(failed.exc_value, OSError) and failed.exc_value.errno == errno.ENOSPC:
        logger.warning("A thread has ended: %s", failed.exc_value)
    else:
        threading.__excepthook__(failed)


def _reported(command: Callable[[], object]) -> int:
    """Run a command; what goes wrong is told in one sentence. Returns the exit code."""
    errors, debug = Console(stderr=True), bool(os.environ.get(DEBUG_VARIABLE))
    _configure_logging(errors, debug=debug)
    try:
        command()
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("Interrupted; what was written is kept.", highlight=False)
        return 130
    except BrokenPipeError:  # nobody reads the output any more
        raise
    except Exception as error:
        # a library that was being imported may have made an error of its own of the signal
        return 130 if _stopped else _told(errors, error, debug)
    return 0


def _told(errors: Console, error: Exception, debug: bool) -> int:
    """Says what went wrong; returns the exit code."""
    if isinstance(error, AglSlimeError):
        _tell(errors, str(error), error, debug)
        if isinstance(error, (MissingDependencyError, UnknownVersionError)):
            errors.print("`agl-slime doctor` says what is installed and what to do.", style="dim", highlight=False)
        return 2 if isinstance(error, (ConfigError, MissingDependencyError)) else 1
    if isinstance(error, OSError):  # a full disk, a path that is too long or may not be read
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        _tell(errors, f"{where}{error.strerror or format_exception(error)}", error, debug)
        return 1
    # a mistake of ours; the person who runs this is not the one who can use a traceback
    text = f"this should not happen: please report it with what {DEBUG_VARIABLE}=1 shows"
    _tell(errors, f"{format_exception(error)}; {text}", error, debug)
    return 1


def _tell(console: Console, text: str, error: BaseException, debug: bool) -> None:
    # as Text: rich would take parts of paths for markup and :names: for emoji
    console.print(Text(f"error: {' '.join(text.split())}", style="red"), soft_wrap=True)
    if debug:
        traceback.print_exception(error)


def _stop_signals() -> list[signal.Signals]:
    """What ends a run; a hang-up that nohup has the process ignore does not."""
    hung_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hung_up else [])]


def _run_until_signal(work: Coroutine[Any, Any, Any]) -> None:
    """Run to the end, or until SIGINT, SIGTERM or SIGHUP cancels it; a second signal ends the process at once."""

    async def run() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        interrupted = threading.Event()

        # never replaced: the watch over the process, which hears what it cannot, stands before these handlers
        def interrupt() -> None:
            if interrupted.is_set():
                os._exit(130)
            interrupted.set()
            task.cancel()

        for number in _stop_signals():
            loop.add_signal_handler(number, interrupt)
        await task

    asyncio.run(run())  # takes the handlers away with its loop


def _configure_logging(console: Console, *, debug: bool) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False, rich_tracebacks=False, markup=False)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    if debug:
        logging.getLogger("agl_slime").setLevel(logging.DEBUG)
        return
    handler.addFilter(_without_tracebacks)
    for noisy in ("agentlightning", "httpx", "LiteLLM", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _without_tracebacks(record: logging.LogRecord) -> bool:
    """What happened, in one line; a failed rollout is counted and explained in the reports, and told nowhere else."""
    record.exc_info = record.exc_text = record.stack_info = None
    return not (record.name.startswith("agentlightning.runner") and "Exception during rollout" in record.getMessage())


if __name__ == "__main__":
    run()
