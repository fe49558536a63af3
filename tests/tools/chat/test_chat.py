"""``agl-slime chat``: what a person says is what the model is asked, and a task shows its reward."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason='the engine needs torch: pip install "agl-slime[local]"')

from agl_slime.cli.chat import ChatConfig, chat
from agl_slime.cli.settings import command_config
from agl_slime.errors import ConfigError

AGENT = '''
import random
from agl_slime import SGLangLitAgent
from agl_slime.cli.demo import LookupDemonstrations


def lookup(key: str) -> str:
    """What is stored under a key."""
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
    """What is shown to somebody who says these lines, and then nothing more."""
    shown: list[str] = []
    lines: Iterator[str] = iter(says)

    def read(prompt: str) -> str:
        try:
            said = next(lines)
        except StopIteration:
            raise EOFError from None
        shown.append(prompt + said)
        return said

    asyncio.run(chat(config, read=read, write=shown.append))
    assert next(lines, None) is None, "somebody was not asked"
    return "\n".join(shown)


@pytest.fixture
def agent(tmp_path: Path) -> str:
    (tmp_path / "asker.py").write_text(AGENT)
    return f"{tmp_path / 'asker.py'}:Asker"


def test_each_input_line_is_answered(policy_dir: Path, embedded_engine: str, agent: str) -> None:
    config = command_config(ChatConfig, model=policy_dir, agent=agent, sglang_url=embedded_engine)
    shown = talk(config, "I do not know.", "I do not know.", "/bye").splitlines()
    assert shown[0] == "Say something; /bye ends."
    assert [line.partition(":")[0] for line in shown[1:]] == ["you", "assistant", "you", "assistant", "you"]


def test_a_task_is_shown_with_its_conversation_and_reward(policy_dir: Path, embedded_engine: str, agent: str) -> None:
    config = command_config(ChatConfig, model=policy_dir, agent=agent, sglang_url=embedded_engine, tasks=True)
    shown = talk(config, "", "/bye")
    assert shown.count("system: Call lookup") == 2
    assert shown.count("reward: 0.25") == 2


def test_an_agent_that_makes_its_own_calls_is_no_conversation(
    policy_dir: Path, embedded_engine: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(
        "from agl_slime.support.agl import LitAgent\n\n\nclass Own(LitAgent):\n    make_task = lambda self, rng: {}\n"
    )
    config = command_config(
        ChatConfig, model=policy_dir, agent=f"{tmp_path / 'own.py'}:Own", sglang_url=embedded_engine
    )
    with pytest.raises(ConfigError, match="give --tasks"):
        talk(config, "hello")
