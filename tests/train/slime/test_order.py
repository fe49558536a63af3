"""The calls of slime's own ``train.py``, over the same stand-ins as ours (``tests/train/slime/test_driver.py``)."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.harness.slime_programs import require_slime
from tests.programs.slime.standins import driver
from tests.train.slime.fake_ray import FakeRay
from tests.train.slime.test_driver import ORDER, calls, ray, use  # noqa: F401


@pytest.mark.slime
def test_slimes_own_loop_makes_the_calls_that_ours_makes(
    ray: FakeRay,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    root = require_slime()
    script = root / "train.py"
    if "train(args, pgs," in script.read_text():
        pytest.skip("this slime's train.py is read, not run: see docs/slime-versions.md")
    use("624b824", monkeypatch)
    logging = sys.modules["slime.observability.logging_utils"]
    monkeypatch.setitem(sys.modules, "slime.utils.logging_utils", logging)  # up to v0.3.1
    args = driver.driver_args(tmp_path / "calls")
    runpy.run_path(str(script))["train"](args)
    assert calls(args) == ORDER["624b824"].split()
