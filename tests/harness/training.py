"""Training runs of the command line inside the test's process."""

import asyncio
import io
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.settings import train_config

needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason='training needs torch: pip install "agl-slime[local]"'
)
"""Does not import torch, which takes seconds of collecting."""


def train(*, inputs: Any = None, **settings: Any) -> str:
    """The output, without colours, of a run with these settings; ``inputs`` are a program's."""
    from rich.console import Console

    from agl_slime.cli.local import run_training

    out = io.StringIO()
    asyncio.run(run_training(train_config(**settings), program_inputs=inputs, console=Console(file=out, width=200)))
    return out.getvalue()


def model_info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/model_info", timeout=10) as answer:
        return json.load(answer)


@contextmanager
def weights_restored(url: str, policy: Path) -> Iterator[None]:
    """Gives a shared engine its weights and version back at the end."""
    from agl_slime.engine.client.weights import DiskWeightSync

    version = model_info(url)["weight_version"]
    try:
        yield
    finally:
        asyncio.run(DiskWeightSync(base_url=url).push(str(policy), version))


def run_of(directory: Path, policy: Path, url: str, **settings: Any) -> Path:
    """The directory of a run without validations on a shared engine, which gets its weights back."""
    paths = {"model_path": policy, "sglang_url": url, "output_dir": directory}
    with weights_restored(url, policy):
        train(**{"eval_interval": 0, **paths, **settings})
    return directory
