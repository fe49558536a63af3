"""The command line. Errors are one sentence on stderr, never a traceback; Ctrl-C keeps written files.

Exit codes: 0 finished, 1 the run failed, 2 a flag or file cannot be used, 130 interrupted, 141 standard output closed
(``>&-``, or a pipe whose reader has ended). ``AGL_SLIME_DEBUG=1`` shows tracebacks.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import resolve_name
from typing import Any, NoReturn

from rich.console import Console
from rich.logging import RichHandler

from agl_slime.errors import AglSlimeError, ConfigError, MissingDependencyError, UnknownVersionError, format_exception
from agl_slime.support.flags import parse_flags, split_at_dashes
from agl_slime.support.net import bypass_proxies, without_secrets
from agl_slime.support.terminal import Formatter, PlainConsole, print_exception, print_line, print_plainly, step

DEBUG_VARIABLE = "AGL_SLIME_DEBUG"  # shows tracebacks and the package's debug messages
_PIPE_CLOSED = 141  # a shell's exit code of a program that SIGPIPE has ended

COMMANDS = {
    "train": ("train an agent online", "cli.main:_train"),
    "doctor": ("check the installation and say how to fix it", "tools.doctor.command:doctor"),
    "new": ("write an agent to start from", "tools.new.command:new"),
    "try": ("run one task of an agent and show what was said, its reward and tokens", "tools.try_agent.command:main"),
    "demo-policy": ("make a tiny policy for an agent with demonstrations", "tools.demo_policy.command:demo_policy"),
    "warm-up": ("train a model on recorded conversations", "tools.warm_up.command:warm_up"),
    "model": ("fetch a model and print its directory", "cli.models:model"),
    "eval": ("evaluate one model, or compare two, on held-out tasks", "tools.evaluation.command:main"),
    "export": ("export kept rollouts as sft, dpo, messages, parquet or hf-dataset", "tools.export.command:main"),
    "view": ("show runs in the browser, live with --follow", "tools.pages.command:view"),
    "report": ("write runs as one HTML page: trend, steps, rollouts, tokens", "tools.pages.command:report"),
    "audit": ("check that the files of a run agree", "tools.audit.command:audit"),
    "compare": ("name the first token in which two equal runs differ", "tools.compare.command:compare"),
    "replay": (
        "compute a training step again from a run's files, as it was or with changes",
        "tools.forensics.replay:main",
    ),
    "autopsy": ("score kept rollouts again and name why sampler and model differ", "tools.forensics.autopsy:main"),
    "onset": (
        "find when behaviours began in a run, with the first rollouts and their rewards",
        "tools.forensics.onset:onset",
    ),
    "rehearse": (
        "play a launch script of slime's without GPUs: what breaks, and a forecast",
        "tools.rehearse.command:main",
    ),
    "buffer": ("serve a rollout buffer", "buffer.server:main"),
    "gateway": ("serve the model to agents of other runners", "tools.gateway.command:main"),
    "record": ("serve a model to agents and record exact tokens for any trainer", "tools.record.command:main"),
}
"""The commands by name, each with a description and its function, which is imported when it is asked for. A
function ``main`` takes the arguments, and the parameters of another one are the flags; a coroutine runs until a
signal. Packages add theirs as entry points of the group ``agl_slime.commands``."""

_SERVERS = ("buffer", "gateway", "record")  # handle signals themselves


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        installed = {point.name: (f"by {point.value}", "") for point in entry_points(group="agl_slime.commands")}
        listed = "\n".join(f"  {name:<18} {text}" for name, (text, _) in {**installed, **COMMANDS}.items())
        print_line(f"usage: agl-slime COMMAND [flags]\n\n{listed}")
        return 0
    command, *rest = arguments
    if command != "doctor":  # which reports the environment unchanged
        bypass_proxies()  # before an agent's module, say, makes an HTTP client
    if command in _SERVERS:
        try:
            from agl_slime.runner.process import configure_worker_process

            configure_worker_process()
            _call(command, rest)
            return 0
        except BrokenPipeError:
            raise
        except Exception as error:
            return exit_code_for(error, PlainConsole(stderr=True), debug=bool(os.environ.get(DEBUG_VARIABLE)))
    if command in COMMANDS:
        return _run_command(partial(_train, rest) if command == "train" else partial(_call, command, rest))
    if point := next(iter(entry_points(group="agl_slime.commands", name=command)), None):
        return _run_command(lambda: _call_function(point.load(), command, rest))
    print_line(f"agl-slime: there is no command {command!r}; the commands are {', '.join(COMMANDS)}", to=sys.stderr)
    return 2


def _call(command: str, arguments: list[str]) -> Any:
    return _call_function(resolve_name(f"agl_slime.{COMMANDS[command][1]}"), command, arguments)


def _call_function(function: Callable[..., Any], command: str, arguments: list[str]) -> Any:
    is_main = function.__name__ == "main"
    result = function(arguments) if is_main else parse_flags(function, prog=f"agl-slime {command}", arguments=arguments)
    return _run_until_signal(result) if asyncio.iscoroutine(result) else result


def run(argv: Sequence[str] | None = None) -> NoReturn:
    arguments = list(sys.argv[1:] if argv is None else argv)
    training = arguments[:1] == ["train"]
    if _open_closed_streams():
        print_line("error: standard output is closed: redirect it to a file, or to /dev/null", to=sys.stderr)
        os._exit(_PIPE_CLOSED)
    print_plainly()
    for stream in (sys.stdout, sys.stderr):  # a path may contain bytes that are not UTF-8
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if training:  # until the event loop has its signal handlers
        for number in _stop_signals():
            signal.signal(number, _stop)
        threading.excepthook = _log_thread_error
    try:
        code = main(arguments)
    except SystemExit as end:  # from --help, or flags that cannot be parsed
        code = end.code if isinstance(end.code, int) else 2
    except BrokenPipeError:
        code = _PIPE_CLOSED
    except KeyboardInterrupt:
        code = 130
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:  # the interpreter would report it again when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            code = code or (_PIPE_CLOSED if isinstance(error, BrokenPipeError) else 1)
    if training:
        # Reports, engine and store are closed; a normal exit would wait for seconds for a thread in native code, or
        # abort.
        os._exit(code)
    sys.exit(code)


def _open_closed_streams() -> bool:
    """Open the standard streams that this process was started without (``>&-``), whose numbers the next files would
    have; returns whether output is one of them."""
    missing = [stream is None for stream in (sys.stdin, sys.stdout, sys.stderr)]
    if any(missing):
        while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number
            os.set_inheritable(number, True)
        os.close(number)
        sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    return missing[1]


def _train(arguments: list[str]) -> None:
    began = time.monotonic() - time.process_time()  # of this process, which has done nothing but imports

    from agl_slime.cli.config_file import parse_train_config  # refuses an unknown version of slime

    ours, slime_flags = split_at_dashes(arguments)
    config = parse_train_config(ours)
    console = PlainConsole()
    if config.trainer == "slime":
        print_line("The trainer is slime: --trainer slime or one of slime's flags chose it.", to=sys.stderr)
    config.check_files()
    embedded = config.trainer == "local" and config.sglang_url is None and config.engine == "embedded"
    with import_module("agl_slime.engine.process").embedded_engine_ahead() if embedded else nullcontext():
        with step(console, "loading"):
            # importing Agent Lightning takes seconds, which --help does not need
            from agl_slime.runner.process import configure_worker_process

            configure_worker_process()  # first: it makes the other imports faster
            from agl_slime.cli.local import run_training
        # auto: no other code shares this process
        options: Any = {"console": console, "torch_threads": "auto", "began": began}
        _run_until_signal(run_training(config, slime_flags=slime_flags, **options))


logger = logging.getLogger(__name__)

_early_signals: list[int] = []
"""Signals received before the event loop had its handlers."""
_output_closed = threading.Event()
"""Set when the reader of standard output has ended."""


def _stop(number: int, _: Any) -> NoReturn:
    _early_signals.append(number)
    raise KeyboardInterrupt


def _log_thread_error(failed: threading.ExceptHookArgs) -> None:
    """Log a full disk in a library's thread, such as TensorBoard's, without a traceback."""
    if isinstance(failed.exc_value, OSError) and failed.exc_value.errno == errno.ENOSPC:
        logger.warning("A thread has ended: %s", failed.exc_value)
    else:
        print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)


def _run_command(command: Callable[[], object]) -> int:
    """Run a command, with errors printed as one sentence; returns the exit code."""
    errors, debug = PlainConsole(stderr=True), bool(os.environ.get(DEBUG_VARIABLE))
    _configure_logging(errors, debug=debug)
    try:
        command()
    except (KeyboardInterrupt, asyncio.CancelledError):
        closed = _output_closed.is_set()
        print_line(f"{'Output closed' if closed else 'Interrupted'}; written files are kept.", to=errors)
        return _PIPE_CLOSED if closed else 130
    except BrokenPipeError:
        raise
    except Exception as error:
        # an import that the signal interrupted may have raised another error
        return 130 if _early_signals else exit_code_for(error, errors, debug=debug)
    return 0


def exit_code_for(error: Exception, console: Console, *, debug: bool) -> int:
    """Print the error; returns the exit code."""
    if isinstance(error, AglSlimeError):
        print_error(console, str(error), error, debug=debug)
        if isinstance(error, (MissingDependencyError, UnknownVersionError)):
            print_line("`agl-slime doctor` checks the installation.", to=console, style="dim")
        return 2 if isinstance(error, (ConfigError, MissingDependencyError)) else 1
    if isinstance(error, OSError):  # a full disk, a path that is too long or may not be read
        file = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        print_error(console, f"{file}{error.strerror or format_exception(error)}", error, debug=debug)
        return 1
    # a bug of this package: a user cannot use a traceback, but can report it
    text = f"this is a bug: please report it with the traceback that {DEBUG_VARIABLE}=1 shows"
    print_error(console, f"{format_exception(error)}; {text}", error, debug=debug)
    return 1


def print_error(console: Console, text: str, error: BaseException, *, debug: bool) -> None:
    print_line(f"error: {without_secrets(' '.join(text.split()))}", to=console, style="red")
    if debug:
        print_exception(type(error), error, error.__traceback__)


def _stop_signals() -> list[signal.Signals]:
    """The signals that end a run; SIGHUP only when it is not ignored, as under nohup."""
    hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hangup else [])]


def _run_until_signal(work: Coroutine[Any, Any, Any]) -> None:
    """Run to the end, or until SIGINT, SIGTERM or SIGHUP cancels it, or the end of the reader of standard output; a
    second signal ends the process at once."""

    async def run_task() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        interrupted = threading.Event()

        def interrupt() -> None:
            if interrupted.is_set():
                os._exit(130)
            interrupted.set()
            task.cancel()

        for number in _stop_signals():
            loop.add_signal_handler(number, interrupt)

        def on_output_closed() -> None:
            loop.remove_reader(1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the run's last lines have no reader
            _output_closed.set()
            task.cancel()

        with suppress(OSError):  # started without descriptor 1, in a program
            if stat.S_ISFIFO(os.fstat(1).st_mode):
                loop.add_reader(1, on_output_closed)  # a pipe's end for writing is readable after an error alone
        if _early_signals:  # whose exception may have been lost in a callback of the import system
            interrupt()
        await task

    asyncio.run(run_task())


def _configure_logging(console: Console, *, debug: bool) -> None:
    handler = RichHandler(console=console, show_time=False, show_path=False, rich_tracebacks=False, markup=False)
    handler.setFormatter(Formatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    if debug:
        logging.getLogger("agl_slime").setLevel(logging.DEBUG)
        return
    handler.addFilter(_without_tracebacks)
    for noisy in ("agentlightning", "httpx", "LiteLLM", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _without_tracebacks(record: logging.LogRecord) -> bool:
    """Drop tracebacks, and Agent Lightning's messages on failed rollouts, which the reports count and explain."""
    record.exc_info = record.exc_text = record.stack_info = None
    return not (record.name.startswith("agentlightning.runner") and "Exception during rollout" in record.getMessage())
