"""What `mkdocs build` does to the pages, for the site holds the docs alone: a line that is a link to a section of the
README becomes that section; other links that leave docs/ name the file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_README = Path(__file__).resolve().parent.parent / "README.md"


def on_page_markdown(markdown: str, **about: Any) -> str:
    del about
    shown = re.sub(
        r"^\[[^\]]*\]\(\.\./README\.md#([^)]+)\)$", lambda link: _section(link[1]), markdown, flags=re.MULTILINE
    )
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)", r"\1 (`\2`)", shown)


def _section(anchor: str) -> str:
    """The text below the README's heading of that anchor."""
    for part in re.split(r"^## ", _README.read_text(), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        if title.lower().replace(" ", "-") == anchor:
            return text.strip().replace("](docs/", "](")
    raise ValueError(f"the README has no section #{anchor}")
