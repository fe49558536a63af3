"""Agents of more than one turn over a scripted engine, and the Samples that come of their rollouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.tokens.converter import Conversion
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import Finished, run_rollout
from tests.harness.vocabularies import chat_tokenizer

TASK = {"prompt": "How many?", "label": "3", "table": {"kz": "three"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "kz"}}\n</tool_call>'


def look(key: str) -> str:
    """Look a key up."""
    return TASK["table"][key]  # type: ignore[index]


class Agent(SGLangLitAgent):
    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float("three" in response.lower())


class ToolAgent(Agent):
    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        return [look]


@dataclass
class Played:
    """A rollout that has ended, with its agent and the client that answered it."""

    finished: Finished
    agent: Any
    client: ScriptedClient
    tokenizer: Any

    @cached_property
    def conversion(self) -> Conversion:
        assert self.finished.failure is None, self.finished.failure
        return self.finished.convert(self.tokenizer)

    @property
    def samples(self) -> list[Any]:
        return self.conversion.samples

    @property
    def sample(self) -> Any:
        (sample,) = self.samples
        return sample

    @property
    def failure(self) -> str:
        assert self.finished.failure is not None
        return self.finished.failure[1]

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(prompt) for prompt in self.client.prompts]

    @property
    def sampled(self) -> list[int]:
        return [token for generation in self.client.generations for token in generation.output_ids]


async def rollout(
    agent_class: type[SGLangLitAgent],
    answers: Sequence[Any],
    template: str = "groups_tools",
    *,
    task: Any = TASK,
    tokenizer: Any = None,
    **attributes: Any,
) -> Played:
    """One rollout of an agent with ``attributes`` whose engine gives ``answers``, in order."""
    tokenizer = tokenizer or chat_tokenizer("anthropic", template)
    client = ScriptedClient(tokenizer, answers)
    agent = agent_class(tokenizer=tokenizer, client=client)
    for name, value in attributes.items():
        setattr(agent, name, value)
    return Played(await run_rollout(agent, task), agent, client, tokenizer)
