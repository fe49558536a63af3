"""``agl-slime chat``: converse with a model in a terminal with its agent's tools, or watch it do tasks one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from agl_slime.agent.scheduler import MultiTurnScheduler
from agl_slime.cli.evaluate import EvalConfig, prepare
from agl_slime.cli.settings import parse_command
from agl_slime.cli.try_agent import A_DAY_S, describe, rolling_out
from agl_slime.errors import ConfigError

_BYE = ("/bye", "/exit", "/quit")
_RUN_SETTINGS = {"agent": ..., "temperature": 0.0, "max_new_tokens": ..., "sglang_url": None, "engine": "embedded"}


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Converse with the newest model of a run, with its agent's tools, or with --tasks watch it do tasks one by one.
    /bye or Ctrl-D ends."""

    model: tyro.conf.Positional[Path]
    """A run's directory, a model's directory, smollm2, or a name on the hub."""
    tasks: bool = False
    """Show tasks one by one, each with its conversation and reward, instead of asking for your messages."""
    settings: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Settings of a run by their names, which take precedence over the run's own."""


def main(arguments: Sequence[str]) -> None:
    asyncio.run(chat(parse_command(ChatConfig, _RUN_SETTINGS, prog="agl-slime chat", arguments=arguments)))


async def chat(config: ChatConfig, *, read: Callable[[str], str] = input, write: Callable[[str], None] = print) -> None:
    """Converse until ``read`` raises ``EOFError`` or returns /bye."""
    limits = {"temperature": _RUN_SETTINGS["temperature"], "rollout_timeout": A_DAY_S, **config.settings}
    settings = EvalConfig(models=(config.model,), settings=limits)
    ready = await prepare(settings)
    async with rolling_out(ready) as roll_out:
        if not config.tasks:
            write("Say something; /bye ends.")
            task = _conversation(ready.agent, ready.tasks[0], read, write)
            member = await roll_out(task) if task is not None else None
            if member is not None and not member.ok:
                write(f"the conversation failed: {member.failure} {member.failure_message}")
            return
        for number, task in enumerate(ready.tasks):
            for line in describe(await roll_out(task)):
                write(line)
            last = number + 1 == len(ready.tasks)
            if not last and await asyncio.to_thread(_read_line, read, "next task (Enter) ") is None:
                return


def _conversation(
    agent: Any, task: Any, read: Callable[[str], str], write: Callable[[str], None]
) -> dict[str, Any] | None:
    """Read the first message and change ``agent`` for a conversation: it keeps its system message, and a person writes
    the message after each answer. ``None`` when the person has no message."""
    from agl_slime.agent.agent import SGLangLitAgent
    from agl_slime.environments.environment import Environment

    if isinstance(agent, Environment):
        raise ConfigError(f"--env {agent.settings.name} plays its own episodes; give --tasks to see them")
    if not isinstance(agent, SGLangLitAgent):
        raise ConfigError("this agent makes its own model calls, so messages cannot be added; give --tasks")
    prompt = agent.build_prompt(task)
    system = [message for message in prompt if message.get("role") == "system"] if isinstance(prompt, list) else []
    if not agent.build_tools(task):
        write("(the agent declares no tools, so the model has none here)")
    if (first := _read_line(read, "you: ")) is None:
        return None
    person_agent: Any = agent
    person_agent.scheduler, person_agent.max_turns = _Person(read, write), None
    person_agent.build_prompt = lambda task: task["messages"]
    person_agent.run = SGLangLitAgent.run.__get__(agent)
    person_agent.score = _no_score
    return {"messages": [*system, {"role": "user", "content": first}]}


async def _no_score(*_: Any) -> float:
    """A reward, which a rollout needs; a conversation is not scored."""
    return 0.0


def _read_line(read: Callable[[str], str], prompt: str) -> str | None:
    try:
        line = read(prompt)
    except EOFError:
        return None
    return None if line.strip() in _BYE else line


class _Person(MultiTurnScheduler):
    """Shows each answer, and the tool results before it, and asks a person for the next message."""

    def __init__(self, read: Callable[[str], str], write: Callable[[str], None]) -> None:
        super().__init__()
        self._read, self._write = read, write
        self._shown, self._next = 0, ""

    async def on_turn_end(self, infer_request: Any, result: Any, current_turn: int) -> None:
        for message in infer_request.messages[self._shown :]:
            if message.get("role") in ("tool", "assistant"):
                self._write(f"{message['role']}: {message.get('content')}")
        self._shown = len(infer_request.messages)

    def check_finished(self, infer_request: Any, result: Any, current_turn: int) -> bool:
        line = _read_line(self._read, "you: ")
        self._next = line or ""
        return line is None

    def step(self, infer_request: Any, result: Any, current_turn: int) -> Any:
        infer_request.messages.append({"role": "user", "content": self._next})
        return infer_request
