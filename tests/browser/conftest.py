"""A headless Chromium, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason='no Playwright: pip install "agl-slime[browser]"')
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    with playwright.sync_playwright() as driver:
        try:  # the system's, else the one that `playwright install chromium` gets
            opened = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
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
