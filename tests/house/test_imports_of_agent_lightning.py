"""What importing Agent Lightning through this package loads, and that all of Agent Lightning still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no network


def said(program: str) -> list[str]:
    """Lines that a fresh Python prints, without a warning."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=_ENVIRONMENT, check=False
    )
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_litellm_is_imported_by_whom_it_is_used() -> None:
    program = """
import sys
import agl_slime.support.agl
print("litellm" in sys.modules, "openai" in sys.modules)
import agentlightning
print(isinstance(object(), agentlightning.LLMProxy), "litellm" in sys.modules)
proxy = agentlightning.LLMProxy(port=4321, model_list=[])
from agentlightning import llm_proxy
from litellm.proxy.proxy_server import app
print(type(proxy) is llm_proxy.LLMProxy, proxy.server_launcher.app is app)
print(isinstance(proxy, agentlightning.LLMProxy), isinstance(proxy, agentlightning.trainer.trainer.LLMProxy))
print(agentlightning.Trainer(n_workers=1, llm_proxy=proxy).llm_proxy is proxy)
class Mine(agentlightning.LLMProxy):
    pass
print(Mine.__mro__[1] is llm_proxy.LLMProxy, issubclass(Mine, agentlightning.LLMProxy))
"""
    assert said(program) == ["False False", "False False", "True True", "True True", "True", "True True"]


def test_an_agent_that_imports_agent_lightning_loads_without_litellm(tmp_path: Path) -> None:
    """As in an environment made by scripts/install_in_slime.sh."""
    (tmp_path / "mine.py").write_text("import agentlightning as agl\n\n@agl.rollout\ndef mine(task, llm): ...\n")
    program = f"""
import sys
sys.modules["litellm"] = None
from agl_slime.agent.loading import load_agent
print(type(load_agent({str(tmp_path / "mine.py")!r} + ":mine")).__name__)
"""
    assert said(program) == ["FunctionalLitAgent"]


@pytest.mark.slow
def test_agent_lightnings_tracer_finds_litellm() -> None:
    program = """
import agl_slime.support.agl
from agentlightning import instrumentation
print(instrumentation.LITELLM_INSTALLED)
from agentlightning.instrumentation.litellm import instrument_litellm, patched_set_attributes
instrument_litellm()
from litellm.integrations.opentelemetry import OpenTelemetry
print(OpenTelemetry.set_attributes is patched_set_attributes)
"""
    assert said(program) == ["True", "True"]


@pytest.mark.slow
def test_earlier_import_of_agent_lightning_is_kept() -> None:
    program = """
import agentlightning
from agentlightning import llm_proxy
import agl_slime.support.agl
print(agentlightning.LLMProxy is llm_proxy.LLMProxy)
"""
    assert said(program) == ["True"]
