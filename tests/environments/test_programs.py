"""Real command-line agents in the sandbox, without a network, through the gateway: to their end, scored, and each
sampled token trained once.

    AGL_ENV_PYTHON=… AGL_ENV_INSTALLS=DIR pytest -m environments tests/environments/test_programs.py

Programs that AGL_ENV_INSTALLS lacks are installed into it; without it these tests are skipped.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.environments.playing import needs_bubblewrap
from tests.gateway.test_programs import xml_call
from tests.harness.chat_templates import SYSTEM_FIRST
from tests.harness.environments import ask
from tests.harness.gateway import calling as call
from tests.harness.gateway import serving, trained_once

needs_programs = pytest.mark.skipif(
    "AGL_ENV_INSTALLS" not in os.environ, reason="AGL_ENV_INSTALLS names no directory of programs"
)
pytestmark = [pytest.mark.environments, needs_bubblewrap, needs_programs]

WRITE = "echo Rome > capital"
DONE = "It is done."


# the two answers of the model by harness
PROGRAMS: dict[str, tuple[str, str]] = {
    "bash": (call("bash", command=WRITE), DONE),
    "mini_swe_agent": (
        call("bash", command=WRITE),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ),
    "codex": (call("exec_command", cmd=WRITE), DONE),
    "claude_code": (call("Bash", command=WRITE, description="Write it."), DONE),
    "agl_opencode": (call("bash", command=WRITE, description="Write it."), DONE),
    "agl_qwen_code": (
        call("run_shell_command", command=WRITE, description="Write it.", is_background=False),
        DONE,
    ),
}


def run_program(harness: str, address: str, **options: Any) -> dict[str, Any]:
    """One episode of the program, with the model at ``address``."""
    request = {"harness": harness, "installs": os.environ["AGL_ENV_INSTALLS"], "address": address, **options}
    return ask("programs", stdin=request)


@pytest.mark.parametrize(
    ("harness", "answers", "template"),
    [
        *((harness, answers, {}) for harness, answers in PROGRAMS.items()),
        ("codex", (xml_call("exec_command", cmd=WRITE), DONE), {"template": SYSTEM_FIRST}),
    ],
)
def test_a_program_without_a_network_ends_is_scored_and_is_trained_exactly(
    harness: str, answers: tuple[str, str], template: dict[str, Any]
) -> None:
    with serving(*answers, context_length=10**6, **template) as case:
        episode = run_program(harness, case.llm.endpoint)
        case.close()

        assert episode["ok"], episode["errors"]
        assert episode["rewards"] == {"written": 1.0}
        assert episode["turns"] == len(case.turns) == 2, "no calls beside the task's"
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)


def test_program_without_a_reachable_model_fails_without_reward() -> None:
    episode = run_program("bash", "http://127.0.0.1:9/v1")  # a port without a listener

    assert not episode["ok"]
    assert episode["errors"]
    assert episode["rewards"] == {}
