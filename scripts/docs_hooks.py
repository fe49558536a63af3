"""What `mkdocs build` does to the pages: links that leave docs/ name the file, for the site holds the docs alone."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **about: Any) -> str:
    del about
    return re.sub(r"\[([^\]]*)\]\(\.\./([^)#]+)(?:#[^)]*)?\)", r"\1 (`\2`)", markdown)
