"""Agents of more than one turn over a scripted engine, and which of its tokens are trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agl_slime import SGLangLitAgent
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import Finished, run_rollout
from tests.harness.vocabularies import chat_tokenizer

TASK = {"prompt": "How many?", "label": "3", "table": {"kz": "three"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "kz"}}\n</tool_call>'


class Agent(SGLangLitAgent):
    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float("three" in response.lower())


class ToolAgent(Agent):
    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        def look(key: str) -> str:
            """Look a key up."""
            return task["table"][key]

        return [look]


async def rollout(
    agent_class: type[Agent], answers: list[Any], template: str = "groups_tools", **declared: Any
) -> tuple[Finished, ScriptedClient]:
    tokenizer = chat_tokenizer("anthropic", template)
    client = ScriptedClient(tokenizer, answers)
    agent = agent_class(tokenizer=tokenizer, client=client)
    for name, value in declared.items():
        setattr(agent, name, value)
    return await run_rollout(agent, TASK), client


def sampled(client: ScriptedClient) -> list[int]:
    return [token for generation in client.generations for token in generation.output_ids]
