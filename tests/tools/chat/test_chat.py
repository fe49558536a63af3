"""``agl-slime chat``: a person's lines are the model's prompts, and a task shows its reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_slime.cli.chat import ChatConfig, chat
from agl_slime.cli.settings import command_config
from agl_slime.errors import ConfigError
from tests.tools.runs import needs_torch

pytestmark = needs_torch

AGENT = '''
import random
from agl_slime import SGLangLitAgent
from agl_slime.cli.demo import LookupDemonstrations


def lookup(key: str) -> str:
    """The value under a key."""
    return "seventy-two"


class Asker(SGLangLitAgent):
    demonstrations = LookupDemonstrations()
    tools = [lookup]
    tools_in_prompt = False

    def make_task(self, rng: random.Random):
        return self.demonstrations.make_task(rng)

    def build_prompt(self, task):
        return self.demonstrations.prompt(task)

    def compute_reward(self, task, response):
        return 0.25
'''


def talk(config: ChatConfig, *says: str) -> str:
    """The output for a person with these input lines."""
    output: list[str] = []
    lines: Iterator[str] = iter(says)

    def read(prompt: str) -> str:
        try:
            line = next(lines)
        except StopIteration:
            raise EOFError from None
        output.append(prompt + line)
        return line

    asyncio.run(chat(config, read=read, write=output.append))
    assert next(lines, None) is None, "the last lines were not read"
    return "\n".join(output)


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "asker.py").write_text(AGENT)
    return f"{tmp_path / 'asker.py'}:Asker"


def test_each_input_line_is_answered_and_tasks_show_rewards(policy_dir: Path, embedded_engine: str, agent: str) -> None:
    settings = {"model": policy_dir, "agent": agent, "sglang_url": embedded_engine}
    output = talk(command_config(ChatConfig, **settings), "I do not know.", "I do not know.", "/bye").splitlines()
    assert output[0] == "Say something; /bye ends."
    assert [line.partition(":")[0] for line in output[1:]] == ["you", "assistant", "you", "assistant", "you"]
    text = talk(command_config(ChatConfig, **settings, tasks=True), "", "/bye")
    assert text.count("system: Call lookup") == 2
    assert text.count("reward: 0.25") == 2


def test_an_agent_that_makes_its_own_calls_is_no_conversation(
    policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    code = "from agl_slime.support.agl import LitAgent\nclass Own(LitAgent):\n    make_task = lambda self, rng: {}\n"
    (tmp_path / "own.py").write_text(code)
    agent = f"{tmp_path / 'own.py'}:Own"
    config = command_config(ChatConfig, model=policy_dir, agent=agent, sglang_url=embedded_engine)
    with pytest.raises(ConfigError, match="give --tasks"):
        talk(config, "hello")
