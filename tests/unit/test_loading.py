"""Loading the agent that a person named: whatever is wrong with it is one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_slime.errors import ConfigError
from agl_slime.rollout.loading import load_agent

MODULE = """
from agl_slime import SGLangLitAgent
import json as Json

class Good(SGLangLitAgent):
    def compute_reward(self, task, response):
        return 1.0

class Plain:
    pass

class NeedsArguments(SGLangLitAgent):
    def __init__(self, url):
        super().__init__()

class Raises(SGLangLitAgent):
    def __init__(self):
        raise RuntimeError("no license found")

class TypeErrorInside(SGLangLitAgent):
    def __init__(self):
        super().__init__()
        len(5)

instance = Good()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "agent_under_test.py").write_text(MODULE)
    (tmp_path / "agent_needs.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "agent_broken.py").write_text("def oops(:\n")
    (tmp_path / "agent_raises.py").write_text("raise RuntimeError('set MY_KEY first')\n")
    package = tmp_path / "agent_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from agent_package.missing import x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("agent_under_test", "agent_package")]:
        del sys.modules[name]


def test_an_agent_in_the_working_directory_is_found(here: Path) -> None:
    assert type(load_agent("agent_under_test:Good")).__name__ == "Good"


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("no_such_module:Agent", "there is no module 'no_such_module' here"),
        ("agent_under_test.inner:Agent", "there is no module 'agent_under_test.inner'"),
        ("agent_needs:Agent", "module 'a_package_that_nobody_has', which is not installed"),
        ("agent_package.inner:Agent", "imports 'agent_package.missing', which is not there"),
        ("agent_broken:Agent", "line 1"),
        ("agent_raises:Agent", "RuntimeError: set MY_KEY first (agent_raises.py, line 1)"),
        ("agent_under_test:Goood", "has no class 'Goood'; it has Good, NeedsArguments, Plain, Raises, TypeErrorInside"),
        ("agent_under_test:Plain", "not an Agent Lightning LitAgent"),
        ("agent_under_test:Json", "not an Agent Lightning LitAgent"),
        ("agent_under_test:instance", "not an Agent Lightning LitAgent"),
        ("agent_under_test:NeedsArguments", "cannot be made without arguments"),
        ("agent_under_test:Raises", "RuntimeError: no license found (agent_under_test.py, line 18)"),
        ("agent_under_test:TypeErrorInside", "object of type 'int' has no len()"),
        ("agent_under_test:", "module:Class"),
        (":Good", "module:Class"),
        ("agent_under_test", "module:Class"),
        (".relative:Good", "module:Class"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence_that_names_it(path: str, says: str, here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(path)
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"--agent {path}")
    assert "\n" not in str(caught.value)
