"""Recorded conversations as Samples. The agent opens the session of a rollout, and recorded answers take the place of
sampled ones: prompts, tools and template are the rollout's, token by token."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_slime.agent.access import LLM_RESOURCE
from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.agent.session import RolloutSession, RolloutStopped
from agl_slime.agent.tools import ToolManager
from agl_slime.engine.client.generation import Generation
from agl_slime.errors import AglSlimeError, ConfigError, format_exception
from agl_slime.support.agl import LLM, Rollout
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.formats import HermesParser
from agl_slime.tokens.spans import Retokenizer
from agl_slime.tokens.turn import Trajectory
from agl_slime.types import Sample


async def read_conversations(
    rows: Sequence[Mapping[str, Any]], *, agent: SGLangLitAgent, model: str
) -> list[list[Sample]]:
    """The Samples of each conversation: the assistant's answers after the agent's prompt are under the mask.

    A row has ``messages`` and perhaps the ``task``, from which the agent makes the prompt; without it the prompt is
    what precedes the first answer, and ``tools`` declares the tools. Raises ``ConfigError``, which names the row.
    """
    conversations = []
    for number, row in enumerate(rows):
        try:
            conversations.append(await _read(row, agent=agent, model=model, number=number))
        except Exception as error:  # of the agent's build_prompt, too
            text = str(error) if isinstance(error, AglSlimeError | RolloutStopped) else format_exception(error)
            raise ConfigError(f"--demonstrations: conversation {number + 1}: {text}") from error
    return conversations


async def _read(row: Mapping[str, Any], *, agent: SGLangLitAgent, model: str, number: int) -> list[Sample]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not any(message.get("role") == "assistant" for message in messages):
        raise ConfigError("it needs `messages`, one of them the assistant's")
    first = next(place for place, message in enumerate(messages) if message["role"] == "assistant")
    task = row.get("task") or {"messages": messages[:first], "tools": row.get("tools")}
    vars(agent).pop("build_prompt", None)
    if "task" not in row:
        agent.build_prompt = lambda task: task["messages"]
    rollout = Rollout(rollout_id=f"demonstration-{number}", input=task, start_time=0.0)
    recorded = _RecordedAnswers()
    tools, agent._client = ToolManager(task=task), recorded
    try:
        session = await agent._open_session(task, {LLM_RESOURCE: LLM(endpoint="", model=model)}, rollout, tools)
        session._encoder = None  # no spans
        start = len(session.messages)
        for number, (message, demonstrated) in enumerate(zip(session.messages, messages, strict=False), 1):
            if (message["role"], message["content"]) != (demonstrated["role"], demonstrated["content"]):
                raise ConfigError(f"message {number} is not the agent's, which is {message['content']!r:.200}")
        for message in messages[start:]:
            if message["role"] == "assistant":
                recorded.answer = _answer(session, message)
                await session.ask()
            else:
                session.add(message)
    finally:
        await tools.aclose(keep=agent.tools)
    # the answers' log-probs are not known, and their ids are a valid encoding, perhaps not the sampled one
    turns = tuple(replace(turn, log_probs=None, token_source="retokenized") for turn in session.turns)
    trajectory = Trajectory(rollout_id=rollout.rollout_id, attempt_id="", task=task, turns=turns, reward=1.0)
    return convert_trajectory(trajectory, session.tokenizer, rollout_id=number).samples


class _RecordedAnswers:
    """A client of an engine that gives ``answer``."""

    answer: Generation

    async def generate(self, prompt_ids: Sequence[int], *_: Any, **__: Any) -> Generation:
        return self.answer


def _answer(session: RolloutSession, message: Mapping[str, Any]) -> Generation:
    """The answer as the model has to write it, by its template; where that has no calls, in Hermes' format."""
    template, tokenizer = session.context.template, session.tokenizer
    if message.get("tool_calls") and not template.fields.calls:
        if not isinstance(session.parser, HermesParser | None):
            raise ConfigError("the template writes no calls: put the call into `content`, as tool_parser reads it")
        message = {"role": "assistant", "content": str(message.get("content") or "") + _calls_text(message)}
    retokenizer = Retokenizer(tokenizer, template_kwargs=template.kwargs)
    _, ids = retokenizer.turn(session.messages, message, tools=template.tools)
    end = ids[-1] if ids and ids[-1] == tokenizer.eos_token_id else None
    text = tokenizer.decode(ids, skip_special_tokens=True)
    zeros = (0.0,) * len(ids)
    return Generation(output_ids=tuple(ids), log_probs=zeros, text=text, finish_reason="stop", matched_stop=end)


def _calls_text(message: Mapping[str, Any]) -> str:
    texts = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        texts.append(f"<tool_call>{json.dumps({'name': function['name'], 'arguments': arguments})}</tool_call>")
    return "".join(texts)
