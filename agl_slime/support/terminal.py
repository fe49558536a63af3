"""Lines, logs and tracebacks on a terminal. Text of models, tools, tasks and exceptions has no effect there beyond its
letters: control characters and overrides of the direction of text are shown as escapes."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, Any

import rich.console
from rich.segment import Segment
from rich.text import Text

from agl_slime.errors import AglSlimeError

# C0 without tab and newline, DEL, C1, marks and overrides of direction, other ends of lines, and lone surrogates
_EFFECTS = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` with each character that acts on a terminal as its Python escape."""
    return _EFFECTS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def print_line(text: object = "", *, to: rich.console.Console | IO[str] | None = None, style: str = "") -> None:
    """Print ``text`` and a newline, by default on standard output, without Rich's markup and wrapping."""
    if isinstance(to, rich.console.Console):
        to.print(Text(plain(str(text)), style=style), soft_wrap=True)
    else:
        print(plain(str(text)), file=to, flush=True)


def exit_code_of(program: Callable[[], int | None]) -> int:
    """The exit code of a program: its result, or 2 after an error of this package, which is printed."""
    try:
        return program() or 0
    except AglSlimeError as error:
        print_line(f"error: {error}", to=sys.stderr)
        return 2


@contextmanager
def step(console: rich.console.Console, text: str) -> Iterator[None]:
    """Show ``text`` while the block runs: a spinner on a terminal, elsewhere one line."""
    if console.is_terminal:
        with console.status(f"{text} ..."):
            yield
    else:
        say(console, text)
        yield


def say(console: rich.console.Console, text: str) -> None:
    """Print a status line without Rich markup or wrapping."""
    print_line(f"{text} ...", to=console.file)


def print_exception(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Print the traceback of ``error``; a ``sys.excepthook``."""
    print_line("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), to=sys.stderr)


def print_plainly() -> None:
    """Print this process's warnings, uncaught exceptions, and messages without a handler as plain text."""
    sys.excepthook = print_exception
    threading.excepthook = lambda failed: print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    sys.unraisablehook = lambda failed: print_exception(failed.exc_type, failed.exc_value, failed.exc_traceback)
    show = warnings.formatwarning
    warnings.formatwarning = lambda *args, **kwargs: plain(show(*args, **kwargs))
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Formatter())


def log_plainly() -> None:
    """Have the process's log handlers, slime's or Ray's, show this package's messages as plain text."""
    for handler in (*logging.getLogger().handlers, logging.lastResort):
        if handler is not None:
            handler.addFilter(_made_plain)


def _made_plain(record: logging.LogRecord) -> bool:
    if record.name.startswith("agl_slime"):
        record.msg, record.args = plain(record.getMessage()), ()
        if record.exc_info:
            record.exc_text = plain(logging.Formatter().formatException(record.exc_info))
    return True


def log_to_stderr(level: int, form: str) -> None:
    """``logging.basicConfig`` for a server or a worker, whose messages are plain text."""
    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(form))
    logging.basicConfig(level=level, handlers=[handler])


class PlainConsole(rich.console.Console):
    """Rich's console; it renders plain text with Rich's styles, or under ``NO_COLOR`` without any code, where
    Rich would keep bold text and spinners."""

    def __init__(self, **settings: Any) -> None:
        if os.environ.get("NO_COLOR"):
            settings["force_terminal"] = False
        super().__init__(**settings)

    def render(self, renderable: Any, options: rich.console.ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))

    def on_broken_pipe(self) -> None:
        """Let the caller see the error; Rich would end the process, or one thread of it, with code 1."""
        raise BrokenPipeError


class Formatter(logging.Formatter):
    """A formatter whose records, tracebacks included, are plain text."""

    def format(self, record: logging.LogRecord) -> str:
        return plain(super().format(record))
