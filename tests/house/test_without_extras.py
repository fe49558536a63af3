"""Imports load only the needed parts: the package without its extras, the smoke test without torch."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.house.test_house import HEAVY

REPOSITORY = Path(__file__).resolve().parents[2]

# As where they are not installed: nothing finds them, so an import raises and importlib.util.find_spec gives None.
BLOCKER = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec

def find_installed(name, path=None, target=None):
    return None if name.partition(".")[0] in {names!r} else find_spec(name, path, target)

PathFinder.find_spec = find_installed
"""

_ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no network


def python(
    *arguments: str, without: tuple[str, ...] = (), directory: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python of its own in the repository, in which the modules ``without`` seem not to be installed."""
    paths = [str(REPOSITORY)]
    if without:
        assert directory is not None
        (directory / "sitecustomize.py").write_text(BLOCKER.format(names=set(without)))
        paths.insert(0, str(directory))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 90}
    return subprocess.run([sys.executable, *arguments], cwd=REPOSITORY, env=environment, check=False, **options)


def test_importing_the_package_or_the_report_loads_nothing_heavy() -> None:
    program = """
import sys, time
began = time.process_time()
import agl_slime
took = time.process_time() - began
import json
packages = set(sys.modules)
import agl_slime.report
print(json.dumps({"took": took, "package": [*packages], "report": [*sys.modules], "names": dir(agl_slime)}))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert not {"agentlightning", "aiohttp", "numpy", *HEAVY} & {*answer["package"]}
    assert not {*HEAVY} & {*answer["report"]}
    assert answer["took"] < 0.2
    assert {"OnlineRLLoop", "SGLangLitAgent", "AGLDataSource", "rollout_to_sample"} <= {*answer["names"]}


def test_every_public_name_can_be_imported() -> None:
    import agl_slime

    assert [getattr(agl_slime, name).__name__ for name in agl_slime.__all__] == [*agl_slime.__all__]
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = agl_slime.Nonsense  # type: ignore[attr-defined]


def test_help_needs_no_agent_lightning(tmp_path: Path) -> None:
    done = python("train.py", "--help", without=("agentlightning", "torch", "transformers"), directory=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--num-iterations" in done.stdout


@pytest.mark.parametrize(
    "without",
    [("torch", "safetensors", "tensorboard"), pytest.param((), marks=pytest.mark.slow)],
    ids=["core install", "all extras"],
)
def test_the_smoke_test_passes(without: tuple[str, ...], tmp_path: Path) -> None:
    began = time.monotonic()
    done = python("examples/smoke_test.py", without=without, directory=tmp_path)
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("ok: the Sample is what slime trains on\n")
    assert "status COMPLETED, reward 1.0" in done.stdout
    assert "Traceback" not in done.stderr
    # 6 s on a quiet machine, nearly all of it Agent Lightning's import; the limit that users are promised is 15 s
    assert took < 15 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def test_train_py_without_packages_or_on_an_old_python_says_so(tmp_path: Path) -> None:
    without = python("train.py", without=("tyro",), directory=tmp_path)
    old = python(
        "-c", "import runpy, sys; sys.version_info = (3, 10, 4); runpy.run_path('train.py', run_name='__main__')"
    )
    for done, text in ((without, "has no tyro: in an environment"), (old, "Python 3.11 to 3.13, and this is 3.10")):
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert text in done.stderr


def output(program: str) -> list[str]:
    """Lines that a fresh Python prints, without a warning."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=_ENVIRONMENT, check=False
    )
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr
    return done.stdout.splitlines()


PROGRAMS = {
    "litellm is imported with the class that uses it": """
import sys
import agl_slime.support.agl
assert not {"litellm", "openai"} & set(sys.modules)
import agentlightning
assert not isinstance(object(), agentlightning.LLMProxy)
assert "litellm" not in sys.modules
proxy = agentlightning.LLMProxy(port=4321, model_list=[])
from agentlightning import llm_proxy
from litellm.proxy.proxy_server import app
assert type(proxy) is llm_proxy.LLMProxy
assert proxy.server_launcher.app is app
assert isinstance(proxy, agentlightning.LLMProxy)
assert isinstance(proxy, agentlightning.trainer.trainer.LLMProxy)
assert agentlightning.Trainer(n_workers=1, llm_proxy=proxy).llm_proxy is proxy
class Mine(agentlightning.LLMProxy):
    pass
assert Mine.__mro__[1] is llm_proxy.LLMProxy
assert issubclass(Mine, agentlightning.LLMProxy)
""",
    "Agent Lightning's tracer finds litellm": """
import agl_slime.support.agl
from agentlightning import instrumentation
assert instrumentation.LITELLM_INSTALLED
from agentlightning.instrumentation.litellm import instrument_litellm, patched_set_attributes
instrument_litellm()
from litellm.integrations.opentelemetry import OpenTelemetry
assert OpenTelemetry.set_attributes is patched_set_attributes
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_of_agent_lightning_works_with_a_late_litellm(name: str) -> None:
    output(PROGRAMS[name])


def test_an_agent_that_imports_agent_lightning_loads_without_litellm(tmp_path: Path) -> None:
    """As in an environment made by scripts/install_in_slime.sh."""
    (tmp_path / "mine.py").write_text("import agentlightning as agl\n\n@agl.rollout\ndef mine(task, llm): ...\n")
    program = f"""
import sys
sys.modules["litellm"] = None
from agl_slime.agent.loading import load_agent
print(type(load_agent({str(tmp_path / "mine.py")!r} + ":mine")).__name__)
"""
    assert output(program) == ["FunctionalLitAgent"]
