"""``examples/repair``: code of an agent neither reads nor changes what tests expect, and stays in its sandbox."""

import random
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.demonstrations import answers, warm_up_sample
from tests.harness.gateway import calling, one_sample, serving

EXAMPLE = Path(__file__).parents[2] / "examples" / "repair"
pytestmark = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="runs code in bubblewrap: apt-get install bubblewrap"
)


@pytest.fixture(scope="module")
def task(modules: Any) -> dict[str, Any]:
    _, data = modules
    return next(data.tasks_of(data.HELD_OUT, random.Random(0)))


def test_the_right_function_passes_and_the_faulty_one_does_not(modules: Any, task: dict[str, Any]) -> None:
    agent, data = modules
    assert agent.score_source(task, task["right"]) == {"score": 1.0, "right": 1.0}
    assert agent.score_source(task, task["source"])["score"] == 0.0
    shown = {str(arguments[0]): value for arguments, value in task["tests"]}
    by_heart = f"def smallest(numbers):\n    return {shown}.get(str(numbers))"
    assert agent.score_source(task, by_heart) == {"score": 0.1, "right": 0.0}
    workspace = agent.Workspace(task)
    assert workspace.test().startswith("smallest(")
    small = agent.SmallRepairAgent()
    *_, prompt, answer = data.demonstration(small, task)["messages"]
    assert task["source"].splitlines()[3] in prompt["content"]
    answers = {answer["content"]: 1.0, f"{answer['content']}(": 0.0, "99 pass": 0.0, "": 0.0}
    assert {text: small.score(task, SimpleNamespace(response=text))["score"] for text in answers} == answers
    assert workspace.edit(9, "") == "Error: the lines are numbered from 1 to 6"
    assert workspace.edit(**edit_of(data, task)) == "edited"
    assert (workspace.test(), workspace.source) == ("all tests pass", task["right"])


def test_the_smallest_versions_held_out_functions_have_other_names(modules: Any) -> None:
    _, data = modules
    named = {}
    for split, words in data.WORDS.items():
        tasks = data.tasks_of("".join(data.renamed(data.TRAIN, word) for word in words), random.Random(0))
        named[split] = {task["name"] for task in tasks}
        assert len(named[split]) > 6 * len(words)
    assert not named["train"] & named["held_out"]


def edit_of(data: Any, task: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the demonstration's edit."""
    messages = data.demonstration(data.RepairAgent(), task)["messages"]
    calls = [message["tool_calls"][0]["function"] for message in messages if message.get("tool_calls")]
    return next(call["arguments"] for call in calls if call["name"] == "edit")


ATTACKS = {
    "ends": "import os\nos._exit(0)",
    "is equal to everything": "class Equal:\n    __eq__ = lambda *_: True\ndef smallest(numbers):\n    return Equal()",
    "writes results": "import json\njson.dumps = lambda *_: '{\"value\": -6}'\ndef smallest(numbers): pass",
    "writes lines": "import os\nos.write(1, b'{\"value\": -6}\\n' * 15)\nos._exit(0)",
    "prints without end": "import os\nwhile True: os.write(1, b'x' * 2**20)",
    "loops": "while True: pass",
    "sleeps": "import time\ntime.sleep(10**6)",
    "leaves a process": "import os, time\nif os.fork(): time.sleep(10**6)\nwhile True: pass",
    "takes memory": "kept = [bytearray(2**24) for _ in range(10**4)]",
    "is no Python": "def",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_has_no_reward_and_ends(
    attack: str, modules: Any, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, _ = modules
    monkeypatch.setattr(agent, "SECONDS", 1)
    monkeypatch.setattr(agent, "WAIT", 1)
    assert agent.score_source(task, ATTACKS[attack]) == {"score": 0.0, "right": 0.0}


def test_the_sandbox_has_nothing_of_the_host(modules: Any, tmp_path: Path) -> None:
    agent, _ = modules
    source = """
import os, socket, sys
def look(path, port):
    def tries(action):
        try:
            return bool(action())
        except OSError:
            return False
    frame, texts = sys._getframe(), []
    while frame:
        texts.append(repr({**frame.f_globals, **frame.f_locals}))
        frame = frame.f_back
    return {
        "file": tries(lambda: os.stat(path)),
        "users": tries(lambda: open("/etc/passwd")),
        "home": tries(lambda: os.listdir(os.path.expanduser("~root"))),
        "network": tries(lambda: socket.create_connection(("127.0.0.1", port), timeout=1)),
        "system": tries(lambda: open("/usr/written", "w")),
        "expected": any("SECRET" + "7" in text for text in texts),
        "environment": len(os.environ) > 3,
        "scratch": tries(lambda: open("/tmp/written", "w")),
    }
"""
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        arguments = [str(tmp_path / "file"), server.getsockname()[1]]
        (text,) = agent.failures(source, "look", [[arguments, "SECRET7"]])
    assert [
        name for name in ("file", "users", "home", "network", "system", "expected") if f"'{name}': True" in text
    ] == []
    assert "'scratch': True" in text
    assert not Path("/tmp/written").exists()


def test_mini_swe_agent_plays_the_task(modules: Any, task: dict[str, Any]) -> None:
    pytest.importorskip("minisweagent", reason="plays: pip install mini-swe-agent")
    import mini_agent

    _, data = modules
    edit = edit_of(data, task)
    commands = [f"sed -i '{edit['line']}s/.*/{edit['text']}/' smallest.py", "python3 test.py && echo passes"]
    calls = [calling("bash", command=each) for each in [*commands, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]]
    with serving(*calls, sampling={"max_new_tokens": 2000}, context_length=10**6) as case:
        assert mini_agent.repair(task, case.llm) == {"score": 1.0, "right": 1.0}
        one_sample(case, 3)


def test_the_warm_up_sees_the_tokens_of_mini_swe_agent(modules: Any, task: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("minisweagent", reason="plays: pip install mini-swe-agent")
    import mini_agent

    agent, data = modules
    row = data.demonstration(agent.SmallRepairAgent(), task, foreign=True)
    tokenizer, sample = warm_up_sample(row, tmp_path)
    with serving(*answers(row), tokenizer=tokenizer, sampling={"max_new_tokens": 2000}, context_length=10**6) as case:
        assert mini_agent.repair_small(task, case.llm) == {"score": 1.0, "right": 1.0}
        (turn,) = case.turns
    assert [*turn.prompt_ids, *turn.response_ids] == sample.tokens
