"""What importing Agent Lightning through this package loads, and that all of Agent Lightning still works."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SERVER = "litellm.proxy.proxy_server"
_ENVIRONMENT = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no network


def said(program: str) -> list[str]:
    """Lines that a fresh Python prints, without a warning."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=_ENVIRONMENT, check=False
    )
    assert (done.returncode, "Warning" in done.stderr) == (0, False), done.stderr
    return done.stdout.splitlines()


def test_the_proxy_server_is_imported_by_whom_it_is_used() -> None:
    program = f"""
import sys
import agl_slime.support.agl
print("{_SERVER}" in sys.modules)
import agentlightning
from agentlightning import llm_proxy
print(llm_proxy.app)
proxy = agentlightning.LLMProxy(port=4321, model_list=[])
print(type(llm_proxy.app).__name__, llm_proxy.app is proxy.server_launcher.app, llm_proxy.save_worker_config.__module__)
import {_SERVER} as server
print(server.app is llm_proxy.app)
"""
    assert said(program) == ["False", "None", f"FastAPI True {_SERVER}", "True"]


@pytest.mark.slow
def test_who_imported_it_before_keeps_it() -> None:
    program = f"""
import {_SERVER} as server
import agl_slime.support.agl
from agentlightning import llm_proxy
print(llm_proxy.app is server.app)
"""
    assert said(program) == ["True"]


@pytest.mark.slow
def test_who_imports_it_afterwards_gets_it() -> None:
    program = f"""
import agl_slime.support.agl
from {_SERVER} import app
print(type(app).__name__)
"""
    assert said(program) == ["FastAPI"]
