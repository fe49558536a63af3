"""Real command-line agents in the sandbox, with the network cut off, through the gateway: to their end, scored, and
each sampled token trained once.

    AGL_ENV_PYTHON=… AGL_ENV_INSTALLS=DIR pytest -m environments tests/environments/test_programs.py

Programs are installed into AGL_ENV_INSTALLS when it does not have them yet; without it these tests are skipped.
"""

from __future__ import annotations

import os
import shutil

import pytest

from tests.gateway.test_programs import xml_call
from tests.harness.chat_templates import SYSTEM_FIRST
from tests.harness.environments import ask
from tests.harness.gateway import calling as call
from tests.harness.gateway import serving, trained_once

pytestmark = [
    pytest.mark.environments,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: bwrap is not on the PATH"),
    pytest.mark.skipif("AGL_ENV_INSTALLS" not in os.environ, reason="AGL_ENV_INSTALLS names no directory of programs"),
]

WRITE = "echo Rome > capital"
DONE = "It is done."


# by harness: what the model says, and how many Samples the rollout becomes
PROGRAMS: dict[str, tuple[tuple[str, ...], int]] = {
    "bash": ((call("bash", command=WRITE), DONE), 1),
    "mini_swe_agent": (
        (call("bash", command=WRITE), call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
        1,
    ),
    "codex": ((call("exec_command", cmd=WRITE), DONE), 1),
    "claude_code": ((call("Bash", command=WRITE, description="Write it."), DONE), 1),
    "agl_opencode": ((call("bash", command=WRITE, description="Write it."), DONE), 1),
    "agl_qwen_code": (
        (call("run_shell_command", command=WRITE, description="Write it.", is_background=False), DONE),
        1,
    ),
}


@pytest.mark.parametrize("harness", PROGRAMS)
def test_a_program_without_a_network_ends_is_scored_and_is_trained_exactly(harness: str) -> None:
    says, samples = PROGRAMS[harness]
    with serving(*says, context_length=10**6) as case:
        request = {"harness": harness, "installs": os.environ["AGL_ENV_INSTALLS"], "address": case.llm.endpoint}
        found = ask("programs", stdin=request)
        case.close()

        assert found["ok"], found["errors"]
        assert found["rewards"] == {"written": 1.0}
        assert found["turns"] == len(case.turns) == 2, "no calls beside the task's"
        assert len(case.segments) == samples
        trained_once(case.turns, case.segments)


def test_codex_on_a_system_first_template_is_one_sample() -> None:
    with serving(xml_call("exec_command", cmd=WRITE), DONE, template=SYSTEM_FIRST, context_length=10**6) as case:
        request = {"harness": "codex", "installs": os.environ["AGL_ENV_INSTALLS"], "address": case.llm.endpoint}
        found = ask("programs", stdin=request)
        case.close()

        assert found["rewards"] == {"written": 1.0}, found["errors"]
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)


def test_program_without_a_reachable_model_fails_without_reward() -> None:
    request = {
        "harness": "bash",
        "installs": os.environ["AGL_ENV_INSTALLS"],
        "address": "http://127.0.0.1:9/v1",  # nothing listens there
    }
    found = ask("programs", stdin=request)

    assert not found["ok"]
    assert found["errors"]
    assert found["rewards"] == {}
