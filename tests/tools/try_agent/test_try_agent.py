"""``agl-slime try``: a task's rollout is shown message by message, with tools, reward and tokens."""

import asyncio
from pathlib import Path

import pytest

from agl_slime.cli.main import main
from agl_slime.data.results import MemberResult
from agl_slime.errors import ConfigError
from agl_slime.tokens.turn import Trajectory, Turn
from agl_slime.tools.try_agent.command import describe, try_task
from tests.harness.training import needs_torch

pytestmark = needs_torch

AGENT = '''
from agl_slime import SGLangLitAgent


class Mine(SGLangLitAgent):
    max_turns = 1
    tools_in_prompt = False

    def make_task(self, rng):
        return {"prompt": "I do not know.", "number": rng.random()}

    def build_tools(self, task):
        def lookup(key: str) -> str:
            """The value under a key."""
            return "72"

        return [lookup]

    def score(self, task, trajectory):
        if task.get("broken"):
            raise ValueError("the judge is broken\x1b]0;a title\x07")
        return {"all": 0.25, "brief": 1.0}
'''


def attempt(agent: str | None, task: int, **settings: object) -> list[str]:
    lines: list[str] = []
    asyncio.run(try_task(agent, task, write=lines.append, **settings))
    return lines


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text(
        '{"prompt": "first"}\n{"prompt": "second"}\n{"prompt": "x\\u009b2J", "broken": 1}\n'
    )
    return f"{tmp_path / 'mine.py'}:Mine"


def test_a_task_is_shown_with_tools_reward_and_tokens(policy_dir: Path, embedded_engine: str, agent: str) -> None:
    lines = attempt(agent, 3, model=policy_dir, sglang_url=embedded_engine, max_new_tokens=8)
    assert lines[0] == "user: I do not know."
    assert lines[1].startswith("assistant: ")
    assert "[turn 1: " in lines[2]
    assert lines[3:5] == ["tools: offered lookup", "reward: 0.25 (brief 1)"]
    sampled = int(lines[2].partition(" sampled")[0].rpartition(" ")[2])
    assert lines[5].startswith(f"tokens: {sampled} of {sampled} sampled are trained, in 1 Sample of ")


def test_the_task_is_chosen_by_its_number(policy_dir: Path, embedded_engine: str, agent: str, tmp_path: Path) -> None:
    settings = {"model": policy_dir, "sglang_url": embedded_engine, "tasks": tmp_path / "tasks.jsonl"}
    assert attempt(agent, 1, **settings)[0] == "user: second"
    for task, sentence in (
        (3, "there are 3 tasks, numbered from 0"),
        (-1, "must be from 0 to 99999, got -1"),
        (10**9, "must be from 0 to 99999, got"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            attempt(agent, task, **settings)
    with pytest.raises(ConfigError, match="agl-slime demo-policy makes one"):
        attempt(agent, 0)


def test_a_failure_names_the_line_of_the_agent(policy_dir, embedded_engine, agent, tmp_path, capsys):
    flags = ["--tasks", str(tmp_path / "tasks.jsonl"), "--model", str(policy_dir), "--sglang-url", embedded_engine]
    assert main(["try", str(tmp_path / "mine.py"), "--task", "2", *flags]) == 1  # the file's only agent
    output = capsys.readouterr()
    assert "user: x\\x9b2J\n" in output.out  # which would clear the screen
    line = next(n for n, text in enumerate(AGENT.splitlines(), 1) if "raise ValueError" in text)
    assert f"failed: ValueError the judge is broken\\x1b]0;a title\\x07 (mine.py, line {line}" in output.out
    assert "error: the rollout failed" in output.err


def turn(number: int, chat: list[tuple[str, str]], answer: str) -> Turn:
    messages = tuple({"role": role, "content": content} for role, content in chat)
    return Turn(prompt_ids=[1] * (number + 1), response_ids=[2], messages=messages, text=answer)


def test_each_message_is_shown_once_and_branches_are_marked() -> None:
    question = ("user", "how many?")
    turns = (
        turn(0, [question], "call"),
        turn(1, [question, ("assistant", "call"), ("tool", "7")], "seven"),
        turn(2, [("user", "summarize")], "short"),
        turn(3, [question, ("assistant", "call"), ("tool", "8")], "eight"),
        turn(4, [question, ("user", "well?")], "nine"),
    )
    trajectory = Trajectory(rollout_id="r", attempt_id="a", task={}, turns=turns, stop_reason="max_turns")
    member = MemberResult(rollout_id="r", group_id="g", reward=0.5, rewards={"primary": 0.5}, trajectory=trajectory)
    lines = [line for line in describe(member) if not line.startswith("  [turn")]
    assert lines == [
        *("user: how many?", "assistant: call", "tool: 7", "assistant: seven"),
        *("(another conversation)", "user: summarize", "assistant: short"),
        *("tool: 8", "assistant: eight", "user: well?", "assistant: nine"),
        *("reward: 0.5", "cut off: max_turns"),
    ]
