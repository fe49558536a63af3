"""Continuations in tokens beside `renderers` (PyPI) and beside the templates of published models: a few seeded
conversations of each; ``benchmarks/oracle.py`` plays hundreds and prints the table."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from scripts.chat_templates import TRL

pytestmark = pytest.mark.slow

GIVEN = os.environ.get("AGL_SLIME_CHAT_TEMPLATES", "")
CONVERSATIONS = 20


def _shipped() -> Path | None:
    """The templates that an installed trl ships."""
    spec = importlib.util.find_spec("trl")
    directory = Path(spec.origin).parent / "chat_templates" if spec is not None and spec.origin else None
    return directory if directory is not None and directory.is_dir() else None


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if GIVEN:
        return Path(GIVEN)
    directory = tmp_path_factory.mktemp("templates")
    shipped = _shipped()
    if shipped is None:
        pytest.skip("neither trl is installed nor does AGL_SLIME_CHAT_TEMPLATES name a directory of *.jinja files")
    for name, stem in TRL.items():
        if (file := shipped / f"{stem}.jinja").is_file():
            (directory / f"{name}.jinja").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    return directory
