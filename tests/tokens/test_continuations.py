"""Continuations in tokens beside `renderers` (PyPI) and beside published models' own templates: a few seeded
conversations of each. ``benchmarks/oracle.py`` plays hundreds and prints the table."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from benchmarks.oracle import compared
from benchmarks.published import MODELS, Published
from scripts.chat_templates import TRL

pytestmark = pytest.mark.slow

TEMPLATES = os.environ.get("AGL_SLIME_CHAT_TEMPLATES", "")
CONVERSATIONS = 20

# Continuations of renderers that differ from their models' templates, which this package follows.
DIFFERS = {
    "qwen3.8": "it closes thinking that was cut without the template's line ends",
    "deepseek-v3": "it closes results of tools before a user's message, which the template leaves open",
    "hunyuan-3": "it leaves calls open in an answer that was cut after one",
    "gemma-4": "it ends an answer that was cut after a call as one without calls",
    "laguna-xs.2": "it writes no line end after an answer",
    "laguna-xs-2.1": "it writes no line end after an answer",
}

# Models whose template moves history, so that this package forks and the renderer continues.
FORKS = {"gemma-4": "content beside calls is written behind their results"}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The named directory, else the templates that an installed trl ships."""
    if TEMPLATES:
        return Path(TEMPLATES)
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.origin:
        pytest.skip("AGL_SLIME_CHAT_TEMPLATES names no directory, and trl, which ships templates, is not installed")
    shipped, directory = Path(spec.origin).parent / "chat_templates", tmp_path_factory.mktemp("templates")
    for name, stem in TRL.items():
        if (file := shipped / f"{stem}.jinja").is_file():
            (directory / f"{name}.jinja").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return directory


@pytest.mark.parametrize("model", [model for model in MODELS.values() if model.renderer], ids=lambda model: model.name)
def test_prompts_beside_the_template_and_its_renderer(model: Published, templates: Path) -> None:
    if importlib.util.find_spec("renderers") is None:
        pytest.skip("renderers is not installed: pip install agl-slime[peers]")
    if not (templates / f"{model.name}.jinja").is_file():
        pytest.skip(f"{templates} has no {model.name}.jinja: python scripts/chat_templates.py DIR fetches it")
    comparison = compared(model, templates, CONVERSATIONS)
    assert comparison.boundaries >= CONVERSATIONS
    assert not comparison.misread
    assert not comparison.refused
    assert not {way for way in comparison.beside_template if way.endswith((": sampled", ": refused"))}
    ways = {way.partition(" ")[0].rstrip(",") for way in comparison.beside_bridge}
    assert "differs" not in ways or model.name in DIFFERS, comparison.examples
    assert "bridges" not in ways or model.name in FORKS, comparison.examples
