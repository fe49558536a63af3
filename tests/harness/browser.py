"""A headless Chromium, driven by Playwright."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
FACTS = ["token", "mask", "engine log-prob", "trainer log-prob", "difference", "advantage", "weight version"]


def launched(driver: Any) -> Any:
    """The system's Chromium, else the one that `playwright install chromium` gets."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return driver.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason='no Playwright: pip install "agl-slime[browser]"')
    with playwright.sync_playwright() as driver:
        try:
            opened = launched(driver)
        except playwright.Error as error:
            pytest.skip(f"no Chromium: apt-get install chromium, or playwright install chromium ({error.message[:80]})")
        yield opened
        opened.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page of 1280 pixels that fails the test for any error of its scripts, and for whatever it loads elsewhere."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield opened
    context.close()
    assert wrong == []


def opened(page: Any, path: Path) -> Any:
    page.goto(path.as_uri())
    page.wait_for_selector("h1")
    return page


def heading(page: Any, text: str) -> None:
    page.wait_for_function("text => document.querySelector('h1')?.textContent.includes(text)", arg=text)


def facts(page: Any) -> dict[str, str]:
    """What the page tells of the token under the pointer: the seven facts, by name."""
    names, values = (page.locator(f"#facts {tag}").all_inner_texts() for tag in ("dt", "dd"))
    assert names == FACTS
    return dict(zip(names, values, strict=True))


@contextmanager
def served(*paths: Path, **options: Any) -> Iterator[str]:
    """The page served from a thread of its own."""
    from agl_slime.report.view import serving

    ready, ended, url = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with serving(paths, **options) as at:
            url.append(at)
            loops.append(asyncio.get_running_loop())
            ready.set()
            await ended.wait()

    loops: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    try:
        yield url[0]
    finally:
        loops[0].call_soon_threadsafe(ended.set)
        thread.join()
