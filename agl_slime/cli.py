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
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NoReturn

import tyro
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from agl_slime.errors import (
    AglSlimeError,
    ConfigError,
    MissingDependencyError,
    UnknownVersionError,
    spell_exception,
)

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
    "view": "show a run in the browser, live while it goes on",
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
    if command in ("buffer", "gateway"):
        try:
            return import_module(f"agl_slime.{'buffer.server' if command == 'buffer' else 'gateway.remote'}").main(rest)
        except MissingDependencyError as error:
            return _told(Console(stderr=True), error, bool(os.environ.get(DEBUG_VARIABLE)))
    if command in COMMANDS:
        functions = {"train": _train, "model": _model, "plot": _plot, "report": _report, "view": _view}
        functions |= {"audit": _audit, "doctor": _doctor, "eval": _eval, "export": _export}
        functions["chat"] = lambda flags: import_module("agl_slime.run.chat").main(flags)
        functions["assign-instance-id"] = _assign_instance_ids
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

    from agl_slime.run.settings import TrainConfig  # a slime that is not known is told there

    config, slime_flags = tyro.cli(TrainConfig, prog="train.py", args=arguments[:at]), arguments[at + 1 :]
    if config.trainer == "local" and config.local.torch_threads is None:  # this process is ours
        config = replace(config, local=replace(config.local, torch_threads="auto"))
    console = Console()
    config.check_files()
    with console.status("loading ...") if console.is_terminal else nullcontext():
        # Agent Lightning, which this imports, takes seconds; --help should not
        from agl_slime.runner.process import own_this_process

        own_this_process()  # before the other imports, which it makes faster
        from agl_slime.run.local import run_training
    _run_until_signal(run_training(config, slime_flags=slime_flags, console=console))


def _doctor(arguments: list[str]) -> None:
    def doctor(sglang_url: str | None = None) -> None:
        """Say what is installed here, what will be used for what, and what to do about what will not work. Exit code 1
        where `python train.py` will not run.

        Args:
            sglang_url: An SGLang server to look for as well.
        """
        from agl_slime.run.doctor import examine, used

        lines = []
        for line in examine(sglang_url=sglang_url):
            lines.append(line)
            print(f"{line.verdict:<5}{line.name:<20} {line.text}", flush=True)
        print(f"\n{used(lines)}")
        if any(line.verdict == "FAIL" for line in lines):
            raise AglSlimeError("something that the first command needs is not there")

    tyro.cli(doctor, prog="agl-slime doctor", args=arguments)


def _model(arguments: list[str]) -> None:
    def model(name: tyro.conf.Positional[Path]) -> None:
        """Fetch a model and print the directory it is in, for --model-path or an SGLang server.

        Args:
            name: smollm2, a name on the Hugging Face hub, or a directory: of a model, or of a run.
        """
        from agl_slime.run.models import find_model

        print(find_model(name, partial(print, file=sys.stderr)))

    tyro.cli(model, prog="agl-slime model", args=arguments)


def _eval(arguments: list[str]) -> None:
    from agl_slime.run.evaluate import EvalConfig, run_evaluation

    config = tyro.cli(EvalConfig, prog="agl-slime eval", args=arguments)
    _run_until_signal(run_evaluation(config))


def _export(arguments: list[str]) -> None:
    from agl_slime.run.export import export_run

    def export(
        run_dir: tyro.conf.Positional[Path],
        to: Literal["sft", "dpo", "messages", "parquet", "hf-dataset"],
        output: Path | None = None,
        best: int = 1,
        min_reward: float | None = None,
        min_gap: float = 0.0,
    ) -> None:
        """Write the rollouts that a run has kept (train with --keep-rollouts all) as data for other trainers.

        Args:
            run_dir: The directory of a run.
            to: sft (conversations of the best), dpo (pairs of the best and the worst), messages (all), parquet or
                hf-dataset (all, with tokens, loss mask and log-probs).
            output: Where it goes; export-FORMAT in the directory of the run by default.
            best: For sft, of each group so many.
            min_reward: Least reward of sft, and of what dpo prefers.
            min_gap: For dpo, the rewards of a pair differ by more than this.
        """
        path, n = export_run(run_dir, to=to, output=output, best=best, min_reward=min_reward, min_gap=min_gap)
        print(f"{path}: {n} rows")

    tyro.cli(export, prog="agl-slime export", args=arguments)


def _plot(arguments: list[str]) -> None:
    def plot(run_dir: tyro.conf.Positional[Path]) -> None:
        """Draw the reward.png of a run from its metrics.

        Args:
            run_dir: The directory of the run.
        """
        from agl_slime.report.plot import draw_run

        print(draw_run(run_dir))

    tyro.cli(plot, prog="agl-slime plot", args=arguments)


def _report(arguments: list[str]) -> None:
    def report(
        run_dirs: tyro.conf.Positional[tuple[Path, ...]], output: Path | None = None, tokenizer: Path | None = None
    ) -> None:
        """Write runs as one HTML page that needs no network: trend, steps, rollouts, tokens.

        Args:
            run_dirs: Directories of runs, or one that has runs in it; also what slime wrote with --dump-details.
            output: Where the page goes; report.html in the first directory by default.
            tokenizer: For slime's own runs, a directory with the model's tokenizer.json.
        """
        from agl_slime.report.page import write_report

        if not run_dirs:
            raise ConfigError("name the directory of a run: agl-slime report RUN_DIR")
        print(write_report(run_dirs, output, tokenizer=tokenizer))

    tyro.cli(report, prog="agl-slime report", args=arguments)


def _view(arguments: list[str]) -> None:
    def show(
        run_dirs: tyro.conf.Positional[tuple[Path, ...]],
        follow: bool = False,
        host: str = "127.0.0.1",
        port: int = 0,
        browser: bool = True,
        tokenizer: Path | None = None,
    ) -> None:
        """Show runs in the browser, one or several side by side.

        Args:
            run_dirs: Directories of runs, or one that has runs in it; also what slime wrote with --dump-details.
            follow: Show what is new while a run goes on.
            host: Address to listen on; one that other machines reach needs AGL_SLIME_VIEW_TOKEN.
            port: Port to listen on; 0 takes a free one.
            browser: Open the page.
            tokenizer: For slime's own runs, a directory with the model's tokenizer.json.
        """
        from agl_slime.report.view import view

        if not run_dirs:
            raise ConfigError("name the directory of a run: agl-slime view RUN_DIR")
        shown = view(run_dirs, host=host, port=port, follow=follow, browser=browser, tokenizer=tokenizer)
        asyncio.run(shown)

    tyro.cli(show, prog="agl-slime view", args=arguments)


def _audit(arguments: list[str]) -> None:
    def check(run_dir: tyro.conf.Positional[Path]) -> None:
        """Prove from the files of a run that they agree: each task has one end, each sampled token was trained at most
        once, by weights that were pushed. Exit code 1 where they do not.

        Args:
            run_dir: The directory of a run that nobody writes to.
        """
        from agl_slime.audit import audit

        found = audit(run_dir)
        for sentence in found.findings:
            print(sentence)
        counts = ", ".join(f"{n:,} {name}" for name, n in found.counts.items())
        if found.findings:
            raise AglSlimeError(f"{len(found.findings)} findings in {run_dir} ({counts})")
        state = "" if found.finished else "; the run did not come to its end, so its last iteration may be incomplete"
        print(f"The files of {run_dir} agree: {counts}{state}.")

    tyro.cli(check, prog="agl-slime audit", args=arguments)


def _assign_instance_ids(arguments: list[str]) -> None:
    from agl_slime.buffer.instance_ids import assign_instance_ids

    output, lines, assigned = tyro.cli(assign_instance_ids, prog="agl-slime assign-instance-id", args=arguments)
    print(f"{output}: {lines} lines, {assigned} got an instance_id")


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


def _reported(command: Callable[[], None]) -> int:
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
        _tell(errors, f"{where}{error.strerror or spell_exception(error)}", error, debug)
        return 1
    # a mistake of ours; the person who runs this is not the one who can use a traceback
    text = f"this should not happen: please report it with what {DEBUG_VARIABLE}=1 shows"
    _tell(errors, f"{spell_exception(error)}; {text}", error, debug)
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

        def interrupt() -> None:
            for number in _stop_signals():
                loop.add_signal_handler(number, os._exit, 130)
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
