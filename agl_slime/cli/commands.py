"""Commands on models and on the pages of runs: functions whose parameters are the flags. ``agl_slime.cli.main`` prints
their errors."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import tyro

from agl_slime.errors import ConfigError
from agl_slime.report.read import Convert
from agl_slime.support.terminal import print_line


def model(name: tyro.conf.Positional[Path]) -> None:
    """Fetch a model and print the directory it is in, for --model-path or an SGLang server.

    Args:
        name: smollm2, a name on the Hugging Face hub, or the directory of a model or a run.
    """
    from agl_slime.cli.models import find_model

    print_line(find_model(name, partial(print_line, to=sys.stderr)))


def report(
    run_dirs: tyro.conf.Positional[tuple[Path, ...]], output: Path | None = None, tokenizer: Path | None = None
) -> None:
    """Write runs as one HTML page that needs no network: trend, steps, rollouts, tokens.

    Args:
        run_dirs: Directories of runs, or one with runs in it; also of slime's --dump-details.
        output: The page's file; report.html in the first directory by default.
        tokenizer: For slime's own runs, a directory with the model's tokenizer.json.
    """
    from agl_slime.report.page import write_report

    if not run_dirs:
        raise ConfigError("name the directory of a run: agl-slime report RUN_DIR")
    print_line(write_report(run_dirs, output, convert=_slime_dumps(tokenizer)))


def view(
    run_dirs: tyro.conf.Positional[tuple[Path, ...]],
    follow: bool = False,
    host: str = "127.0.0.1",
    port: int = 0,
    browser: bool = True,
    tokenizer: Path | None = None,
) -> None:
    """Show runs in the browser, one or several side by side.

    Args:
        run_dirs: Directories of runs, or one with runs in it; also of slime's --dump-details.
        follow: Update the page while a run continues.
        host: Address to listen on; other addresses than loopback need AGL_SLIME_VIEW_TOKEN.
        port: Port to listen on; 0 takes a free one.
        browser: Open the page.
        tokenizer: For slime's own runs, a directory with the model's tokenizer.json.
    """
    from agl_slime.report import view as server

    if not run_dirs:
        raise ConfigError("name the directory of a run: agl-slime view RUN_DIR")
    convert = _slime_dumps(tokenizer)
    asyncio.run(server.view(run_dirs, host=host, port=port, follow=follow, browser=browser, convert=convert))


def _slime_dumps(tokenizer: Path | None) -> Convert:
    """Reads the runs of slime that a page shows."""
    return import_module("agl_slime.tools.slime_dumps.runs").SlimeRuns(tokenizer)
