"""The page of an evaluation in a browser: nothing of it is cut off on a narrow screen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agl_slime.report.evaluation.page import write_eval_page
from tests.harness.browser import opened
from tests.tools.evaluation.test_page import evaluation

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_as_wide_as_the_screen(page: Any, tmp_path: Path, width: int) -> None:
    evaluation(tmp_path / "e", [0.0, 1.0, 0.5, None], [1.0, 0.0, 0.25, 1.0])
    page.set_viewport_size({"width": width, "height": 800})
    opened(page, write_eval_page(tmp_path / "e"))
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.click("summary >> nth=0")
    assert page.evaluate("document.documentElement.scrollWidth") == width
