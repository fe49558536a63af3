"""``agl-slime view`` and ``agl-slime report``."""

from __future__ import annotations

import asyncio
import os
import webbrowser
from pathlib import Path

import tyro

from agl_slime.errors import ConfigError
from agl_slime.report.view import TOKEN_VARIABLE, serving
from agl_slime.support.http import stop_signal
from agl_slime.support.terminal import print_line
from agl_slime.support.threads import run_in_thread
from agl_slime.tools.pages.file import write_report
from agl_slime.tools.slime_dumps.runs import SlimeRuns


def report(
    run_dirs: tyro.conf.Positional[tuple[Path, ...]], output: Path | None = None, tokenizer: Path | None = None
) -> None:
    """Write runs as one HTML page that needs no network: trend, steps, rollouts, tokens.

    Args:
        run_dirs: Directories of runs, or one with runs in it; also of slime's --dump-details.
        output: The page's file; report.html in the first directory by default.
        tokenizer: For slime's own runs, a directory with the model's tokenizer.json.
    """
    if not run_dirs:
        raise ConfigError("name the directory of a run: agl-slime report RUN_DIR")
    print_line(write_report(run_dirs, output, convert=SlimeRuns(tokenizer)))


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
    if not run_dirs:
        raise ConfigError("name the directory of a run: agl-slime view RUN_DIR")

    async def serve() -> None:
        ended, token, convert = stop_signal(), os.environ.get(TOKEN_VARIABLE) or None, SlimeRuns(tokenizer)
        async with serving(run_dirs, host=host, port=port, token=token, follow=follow, convert=convert) as url:
            print_line(f"the run is at {url} (Ctrl-C stops the server)")
            if browser:
                await run_in_thread(webbrowser.open, url)
            await ended.wait()

    asyncio.run(serve())
