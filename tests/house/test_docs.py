"""README and guides can be followed: links lead somewhere, and commands have flags that exist."""

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
import unicodedata
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import agl_slime
from agl_slime.cli.config_file import parse_train_config
from agl_slime.cli.main import COMMANDS
from agl_slime.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/archive").glob("*.md"))]
RECIPES = sorted((ROOT / "examples").glob("*/README.md"))
_FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)

pytest.importorskip("torch", reason='the notebook trains: pip install "agl-slime[local]"')

NOTEBOOK = Path(__file__).parents[2] / "examples" / "first_run.ipynb"


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub and the site name them."""
    heads = re.findall(r"^#+ (.*)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    plain = (unicodedata.normalize("NFC", re.sub(r"[`*]|\]\([^)]*\)|\[", "", head)).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).strip().replace(" ", "-") for head in plain}


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    findings = []
    for page in PAGES + RECIPES:
        text = _FENCE.sub("", page.read_text())
        links = [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'(?:src|srcset)="([^"]+)"', text)]
        for link in (link for link in links if "://" not in link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                findings.append(f"{page.name}: {link}")
    assert not findings


def commands(page: Path) -> list[str]:
    """Lines of code blocks that begin one of our programs; a backslash joins a line to the next."""
    text = re.sub(r"\\\n\s*", "", page.read_text())
    lines = (line.partition(" # ")[0].strip() for line in text.splitlines() if line.startswith(("    ", "  ```")))
    single = (command.strip() for line in lines for command in re.split(r"&&|;", line))
    return [command for command in single if re.match(r"(python train\.py|agl-slime)\b", command)]


def reads(words: list[str]) -> bool:
    """Whether our programs take the command's words."""
    if words[0] == "agl-slime":
        return words[1] in COMMANDS
    end = words.index("--") if "--" in words else len(words)
    try:
        return is_dataclass(parse_train_config(words[2:end]))
    except (SystemExit, ConfigError):
        return False


def test_every_command_has_flags_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_KEY", "a key")  # which the page of 1.0 says to set
    listed = [(page.name, command) for page in PAGES + RECIPES for command in commands(page)]
    assert len(listed) >= 25
    plain = ((name, re.sub(r"\[(.*?)\]", r"\1", command).replace("…", "")) for name, command in listed)
    assert not [(name, command) for name, command in plain if not reads(shlex.split(command))]


def test_every_guide_is_on_the_site() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in PAGES[1:] if not re.search(rf"\b{re.escape(page.name)}\b", site)] == []


def test_scripts_among_the_examples_find_the_modules_of_their_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    for module, name in {
        "agl_datasource": "AGLDataSource",
        "converter": "rollout_to_sample",
        "sglang_lit_agent": "SGLangLitAgent",
        "online_rl_loop": "OnlineRLLoop",
    }.items():
        monkeypatch.delitem(sys.modules, module, raising=False)
        assert getattr(importlib.import_module(module), name) is getattr(agl_slime, name)
        sys.modules.pop(module)


def test_the_site_is_built_with_its_warnings_as_errors() -> None:
    """With ``-q`` mkdocs counts no warnings, and ``--strict`` passes whatever a page links to."""
    lines = (line.partition(" # ")[0] for line in (ROOT / ".ci/steps.sh").read_text().splitlines())
    builds = [line for line in lines if 'mkdocs" build' in line]
    assert [line for line in builds if "--strict" in line and not re.search(r"\s(-q|--quiet)\b", line)] == builds != []


@pytest.mark.slow
async def test_the_notebook_runs_and_the_reward_has_risen() -> None:
    pytest.importorskip("matplotlib", reason="the notebook draws: pip install matplotlib").use("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text())["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # outputs depend on the machine
            code = compile("".join(cell["source"]), f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            ended = eval(code, names)
            if inspect.isawaitable(ended):
                await ended
    rewards = names["rewards"]
    assert len(rewards) == 12
    assert max(rewards[-4:]) > rewards[0] + 0.2
