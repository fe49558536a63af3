"""What the README and the guides say can be followed: links lead somewhere, and commands have flags that exist."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
import unicodedata
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import agl_slime
from agl_slime.cli.config_file import parse_train_config
from agl_slime.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/archive").glob("*.md"))]
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub and the site name them."""
    heads = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (unicodedata.normalize("NFC", re.sub(r"[`*]|\]\([^)]*\)|\[", "", head)).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = _FENCE.sub("", page.read_text())
    links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset)="([^"]+)"', text)]
    for link in links:
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def commands(page: Path) -> list[str]:
    """Lines of code blocks that begin one of our programs; a line that ends with a backslash goes on in the next."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    lines = (line.partition(" # ")[0].strip() for line in text.splitlines() if line.startswith(("    ", "  ```")))
    parts = (part.strip() for line in lines for part in re.split(r"&&|;", line))
    return [part for part in parts if re.match(r"(python train\.py|agl-slime)\b", part)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_has_flags_that_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_KEY", "a key")  # which the page of 1.0 says to set
    for command in commands(page):
        words = shlex.split(re.sub(r"\[(.*?)\]", r"\1", command).replace("…", ""))
        if words[0] == "agl-slime":
            assert words[1] in COMMANDS, command
            continue
        at = words.index("--") if "--" in words else len(words)
        try:
            config = parse_train_config(words[2:at])
        except SystemExit:
            pytest.fail(f"{page.name}: {command}")
        assert is_dataclass(config)


def test_the_guides_have_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) >= 25


def test_every_guide_is_on_the_site() -> None:
    shown = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if not re.search(rf"\b{re.escape(page.name)}\b", shown)] == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("agl_datasource", "AGLDataSource"),
        ("converter", "rollout_to_sample"),
        ("sglang_lit_agent", "SGLangLitAgent"),
        ("online_rl_loop", "OnlineRLLoop"),
    ],
)
def test_scripts_among_the_examples_find_the_modules_of_their_document(
    module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert getattr(importlib.import_module(module), name) is getattr(agl_slime, name)
    sys.modules.pop(module)


def test_the_site_is_built_with_its_warnings_as_errors() -> None:
    """With ``-q`` mkdocs counts no warnings, and ``--strict`` passes whatever a page links to."""
    lines = (line.partition(" # ")[0] for line in (ROOT / ".ci/steps.sh").read_text().splitlines())
    builds = [line for line in lines if 'mkdocs" build' in line]
    assert [line for line in builds if "--strict" in line and not re.search(r"\s(-q|--quiet)\b", line)] == builds != []
