"""Comments, docstrings and names of the package are plain English, within budgets."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import agl_slime

PACKAGE = Path(agl_slime.__file__).parent
OPENINGS = re.compile(r"\bwhat (?:is|was|has|it|they|a|the|an|this|of|one|comes?|came|stands?)\b")
WITHOUT_A_NOUN = re.compile(r"\bthose (?:that|of|who)\b")
VAGUE_NAMES = ("told", "said", "held", "found", "known", "own")
MOST_OPENINGS_PER_10K, MOST_WITHOUT_A_NOUN, MOST_VAGUE_NAMES = 3, 0, 15


def prose_and_names(folder: Path) -> tuple[str, Counter[str]]:
    """All comments and docstrings as one lower-case text, and how often each identifier occurs."""
    texts: list[str] = []
    names: Counter[str] = Counter()
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                texts.append(token.string.lstrip("# "))
            elif token.type == tokenize.NAME:
                names[token.string] += 1
        for node in ast.walk(ast.parse(source)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                texts.append(node.value.value)
    return re.sub(r"\s+", " ", " ".join(texts).lower()), names


def test_the_package_speaks_plain_english() -> None:
    prose, names = prose_and_names(PACKAGE)
    words = len(re.findall(r"[a-z']+", prose))
    assert words > 50_000
    assert 1e4 * len(OPENINGS.findall(prose)) / words <= MOST_OPENINGS_PER_10K
    assert len(WITHOUT_A_NOUN.findall(prose)) <= MOST_WITHOUT_A_NOUN
    assert sum(names[name] for name in VAGUE_NAMES) <= MOST_VAGUE_NAMES
