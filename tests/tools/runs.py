"""Finished runs of the tiny policy, for programs that read a run's directory, and a mark for tests with torch."""

from __future__ import annotations

import asyncio
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason='needs torch: pip install "agl-slime[local]"')


def run_of(directory: Path, policy: Path | str, url: str, *, out: io.StringIO | None = None, **settings: Any) -> Path:
    """The directory of a run on a shared engine, which gets the policy's weights back; ``out`` gets its output."""
    from agl_slime.cli.local import run_training
    from agl_slime.cli.settings import train_config
    from agl_slime.engine.client.weights import DiskWeightSync

    settings = {"eval_interval": 0, "model_path": policy, "sglang_url": url, "output_dir": directory, **settings}
    try:
        asyncio.run(run_training(train_config(**settings), console=Console(file=out or io.StringIO(), width=400)))
    finally:
        asyncio.run(DiskWeightSync(base_url=url).push(str(policy), "0"))
    return directory
