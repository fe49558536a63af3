"""A headless Chromium, driven by Playwright."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.loop_thread import in_thread

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
FACTS = ["token", "mask", "engine log-prob", "trainer log-prob", "difference", "advantage", "weight version"]


def launched(driver: Any) -> Any:
    """The system's Chromium, else Playwright's own."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    return driver.chromium.launch(executable_path=path, args=["--no-sandbox"])


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
    """A page of 1280 pixels; an error of its scripts, or a request to another host, fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    errors: list[str] = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    yield opened
    context.close()
    assert errors == []


def opened(page: Any, path: Path) -> Any:
    page.goto(path.as_uri())
    page.wait_for_selector("h1")
    return page


def heading(page: Any, text: str) -> None:
    page.wait_for_function("text => document.querySelector('h1')?.textContent.includes(text)", arg=text)


def facts(page: Any) -> dict[str, str]:
    """The seven facts of the token under the pointer, by name."""
    names, values = (page.locator(f"#facts {tag}").all_inner_texts() for tag in ("dt", "dd"))
    assert names == FACTS
    return dict(zip(names, values, strict=True))


@contextmanager
def served(*paths: Path, **options: Any) -> Iterator[str]:
    """The page served from a thread of its own."""
    from agl_slime.report.view import serving

    with in_thread(serving(paths, **options)) as url:
        yield url
