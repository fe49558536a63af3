"""Command lines, read by tyro."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tyro

from agl_slime.errors import ConfigError
from agl_slime.support.net import shown_url
from agl_slime.support.terminal import plain


def split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before ``--``, and after it: another program's."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end]], [*arguments[end + 1 :]]


def parse_flags(
    kind: Callable[..., Any], *, prog: str, arguments: Sequence[str], names: Iterable[str] = (), **options: Any
) -> Any:
    """An instance of a class with the fields that the flags set, or the result of a function with such parameters.
    Raises ``ConfigError`` for an unknown flag, without its value, which may be a secret; ``names`` are the flags of a
    class whose fields are groups. Raises ``SystemExit`` for a value of another type, and after ``--help``."""

    @functools.wraps(kind)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(kind, *args, **kwargs)

    is_class = isinstance(kind, type)
    options |= {"prog": prog, "args": list(arguments), "return_unknown_args": True}
    made, refusal = None, io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal):
            made, unknown = tyro.cli(kind if is_class else bound, **options)
    except SystemExit:
        unknown = re.findall(r"Unrecognized options:\W+?(-[\w.-]+)", refusal.getvalue())  # beside missing ones
        if not unknown:
            sys.stderr.write(plain(refusal.getvalue()))
            raise
    if not unknown:
        return made if is_class or made is None else made()
    flag = unknown[0].partition("=")[0].replace("_", "-")
    if not flag.startswith("-"):
        raise ConfigError(f"{shown_url(unknown[0]):.80} is neither a flag nor the value of one; see {prog} --help")
    flags = [f"--{name.replace('_', '-')}" for name in names or inspect.signature(kind).parameters]
    nearest = difflib.get_close_matches(flag, flags, n=1, cutoff=0.0)[0]
    raise ConfigError(f"there is no flag {flag:.80}; the nearest is {nearest}, and {prog} --help lists all")
