"""Comments, docstrings and names of the package and of its tests are plain English, within budgets."""

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import agl_slime

PACKAGE, TESTS = Path(agl_slime.__file__).parent, Path(__file__).parents[1]
OPENINGS = re.compile(r"\bwhat (?:is|was|has|it|they|a|the|an|this|of|one|comes?|came|stands?)\b")
WITHOUT_A_NOUN = re.compile(r"\bthose (?:that|of|who)\b")
VAGUE_NAMES = ("told", "said", "held", "found", "known", "own")
MORE_VAGUE_NAMES = "one other others given asked again got wanted shown more of how by at where there before after left"
MORE_VAGUE_NAMES += " seen what parts kept"


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


def openings_per_10k(prose: str) -> float:
    return 1e4 * len(OPENINGS.findall(prose)) / len(re.findall(r"[a-z']+", prose))


def test_the_package_speaks_plain_english() -> None:
    prose, names = prose_and_names(PACKAGE)
    assert len(prose) > 300_000
    assert openings_per_10k(prose) <= 3
    assert len(WITHOUT_A_NOUN.findall(prose)) == 0
    assert sum(names[name] for name in VAGUE_NAMES) <= 15


def test_the_tests_speak_plain_english() -> None:
    prose, names = prose_and_names(TESTS)
    assert len(prose) > 100_000
    assert openings_per_10k(prose) <= 5
    assert sum(names[name] for name in VAGUE_NAMES) <= 50
    vague = sum(names[name] for name in (*VAGUE_NAMES, *MORE_VAGUE_NAMES.split()))
    assert 1e4 * vague / names.total() <= 60
