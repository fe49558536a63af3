"""An import of Agent Lightning through this package leaves litellm out, and all of Agent Lightning works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no network


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
