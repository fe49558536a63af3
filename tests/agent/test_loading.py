"""Loading an agent by name: every error is one sentence."""

import pickle
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.agent.loading import load_agent, only_agent
from agl_slime.errors import ConfigError
from agl_slime.support.agl import LLM, Rollout

REPOSITORY = Path(__file__).parents[2]

MODULE = """
from agl_slime import SGLangLitAgent

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

def ask(question):
    return 1.0
"""

FUNCTIONS = """
import functools
demonstrations = "shown"
def make_task(rng):
    return {"n": rng.random()}
class Asked:
    __hash__ = None
    async def __call__(self, task, llm):
        return 1.0
async def answer(task, llm, *, weight=0.0):
    return weight or 1.0
asked, weighted = Asked(), functools.partial(answer, weight=1.0)
method = asked.__call__
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "agent_under_test.py").write_text(MODULE)
    (tmp_path / "agent_needs.py").write_text("import a_package_that_nobody_has\n")
    (tmp_path / "agent_broken.py").write_text("def oops(:\n")
    (tmp_path / "agent_raises.py").write_text("raise RuntimeError('set MY_KEY first')\n")
    (tmp_path / "agent_opens.py").write_text("open('/no/such/data')")
    package = tmp_path / "agent_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "inner.py").write_text("from agent_package.missing import x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("agent_under_test", "agent_package")]:
        del sys.modules[name]


BY_FILE = """
from agl_slime import SGLangLitAgent
from beside_it import REWARD

class Good(SGLangLitAgent):
    def compute_reward(self, task, response):
        return REWARD
"""

_UNPICKLE = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).compute_reward({}, ''))"


def test_agent_file_is_loaded_from_any_directory_and_unpickled_anywhere(tmp_path, monkeypatch):
    home = tmp_path / "my agents"
    home.mkdir()
    (home / "math-agent.py").write_text(BY_FILE)
    (home / "beside_it.py").write_text("REWARD = 0.25")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    agent = load_agent("my agents/math-agent.py:Good")
    assert type(agent) is type(load_agent(f"{home}/math-agent.py:Good"))
    assert agent.compute_reward({}, "") == 0.25
    monkeypatch.chdir("/")
    command = [sys.executable, "-c", _UNPICKLE, pickle.dumps(agent).hex()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "0.25"
    monkeypatch.delitem(sys.modules, "beside_it")


def test_every_agent_of_the_repository_is_loaded_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    for name in ("lookup.py:Lookup", "lookup_tools.py:LookupTools", "research.py:Research", "reverse.py:Reverse"):
        assert load_agent(f"{REPOSITORY}/agents/{name}Agent").make_task(random.Random(0))


@pytest.mark.slow
def test_the_wheel_holds_this_package_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(build, check=True)
    [wheel] = tmp_path.glob("*.whl")
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"agl_slime"}


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_module:Agent", "there is no module 'no_such_module' here"),
        ("agent_needs:Agent", "module 'a_package_that_nobody_has', which is not installed"),
        ("agent_package.inner:Agent", "imports 'agent_package.missing', which does not exist"),
        ("agent_broken:Agent", "line 1"),
        ("agent_raises:Agent", "RuntimeError: set MY_KEY first (agent_raises.py, line 1)"),
        ("agent_under_test:Goood", "it has Good, NeedsArguments, Plain, Raises, TypeErrorInside, instance"),
        ("agent_under_test:Plain", "Plain is no agent: derive a class from agl_slime.SGLangLitAgent, or write a"),
        ("agent_under_test:ask", "ask(question) is no agent; its parameters must be task and llm, perhaps rollout too"),
        ("agent_under_test:NeedsArguments", "cannot be made without arguments"),
        ("agent_under_test:Raises", "RuntimeError: no license found (agent_under_test.py, line 17)"),
        ("agent_under_test:TypeErrorInside", "object of type 'int' has no len()"),
        ("agent_under_test", "module:Name"),
        (".relative:Good", "module:Name"),
        ("no_such_file.py:Good", "there is no file no_such_file.py"),
        ("agent_under_test.py:Goood", "has no class or agent 'Goood'; it has Good"),
        ("agent_opens.py:Good", "'/no/such/data'"),
        ("./agent_raises.py:Agent", "RuntimeError: set MY_KEY first (agent_raises.py, line 1)"),
        ("agent_package/inner:Agent", "path/to/file.py:Name"),
    ],
)
def test_unloadable_agent_is_an_error_in_one_sentence(path: str, sentence: str, here: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_agent(path)
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"--agent {path}")
    assert "\n" not in str(caught.value)


def reused(path: str) -> Any:
    """The agent at ``path``: the same object when it is loaded or unpickled later."""
    agent = load_agent(path)
    assert load_agent(path) is agent
    assert pickle.loads(pickle.dumps(agent)) is agent
    return agent


def test_agent_instance_of_a_module_is_reused_and_pickled_by_name(here: Path) -> None:
    source = "import agentlightning as agl\n@agl.rollout\ndef answer(task, llm):\n    return 1.0\n"
    (here / "agent_decorated.py").write_text(source)
    for path in ("agent_under_test:instance", "agent_decorated:answer", "agent_decorated.py:answer"):
        reused(path)
    assert type(load_agent("agent_under_test:Good")).__name__ == "Good"


async def test_a_function_of_task_and_llm_is_an_agent_with_its_modules_tasks(here: Path) -> None:
    (here / "agent_function.py").write_text(FUNCTIONS)
    for name in ("asked", "weighted"):
        (here / f"only_{name}.py").write_text(f"{FUNCTIONS}\n{name}_ = {name}\ndel answer, weighted, asked, method")
        assert only_agent(f"only_{name}.py") == f"only_{name}.py:{name}_"
    names = ("answer", "weighted", "asked", "method")
    for path in ("agent_function.py:answer", *(f"agent_function:{name}" for name in names), "only_asked.py"):
        agent = reused(path)
        assert agent.make_task(random.Random(0)) == {"n": random.Random(0).random()}
        assert agent.demonstrations == "shown"
        resources: Any = {"main_llm": LLM(endpoint="http://127.0.0.1:9", model="m", sampling_parameters={})}
        rollout: Any = Rollout(rollout_id="ro-1", input={}, start_time=0.0)
        assert await agent.rollout_async({}, resources, rollout) == 1.0
