"""What a session knows of its prompts goes with its turns through the store: nothing is searched for, and branches keep
the engine's ids."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.rollout.session import RolloutSession
from agl_slime.sglang.generation import Generation
from agl_slime.trace import segments
from agl_slime.types import Sample
from tests.conversations import ScriptedClient
from tests.integration.rollouts import run_rollout
from tests.vocabularies import chat_tokenizer

TASK = {"prompt": "How many?", "label": "3"}


class Agent(SGLangLitAgent):
    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0


async def run(
    agent: type[Agent], answers: list[Any], template: str = "groups_tools"
) -> tuple[list[Sample], ScriptedClient]:
    tokenizer = chat_tokenizer("anthropic", template)
    client = ScriptedClient(tokenizer, answers)
    finished = await run_rollout(agent(tokenizer=tokenizer, client=client), TASK)
    return finished.convert(tokenizer).samples, client


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*_: Any) -> int:
        raise AssertionError("a turn that says why it forks was compared with those before it")

    monkeypatch.setattr(segments, "common_prefix", compared)


async def test_a_conversation_is_one_sample_without_a_search() -> None:
    class Asks(Agent):
        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            await session.ask()
            await session.ask({"role": "user", "content": "Sure?"})

    samples, client = await run(Asks, ["Three.", "Yes."])
    [sample] = samples
    assert sample.metadata["forks"] == {}
    assert sample.tokens == client.prompts[1] + list(client.generations[1].output_ids)


async def test_a_branch_keeps_the_ids_that_were_sampled_and_is_told_apart() -> None:
    class Branches(Agent):
        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            await session.ask()
            other = session.branch(session.messages)
            await session.ask({"role": "user", "content": "Sure?"})
            await other.ask({"role": "user", "content": "Really?"})
            await session.branch([{"role": "user", "content": "Judge."}]).ask()

    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    ids = (*tokenizer.encode("answ", add_special_tokens=False), *tokenizer.encode("er", add_special_tokens=False))
    odd = Generation(  # the tokenizer would make other tokens of this
        output_ids=ids, log_probs=(-1.0,) * len(ids), text="answer", finish_reason="length"
    )
    samples, client = await run(Branches, [odd, "Yes.", "No.", "Good."])
    n = len(client.prompts[0])
    assert tuple(client.prompts[2][n : n + len(ids)]) == ids
    assert [sample.metadata["fork_reason"] for sample in samples] == [None, "branch", "new_context"]


async def test_samples_of_one_prompt_that_are_asked_for_at_once_are_branches() -> None:
    class BestOf(Agent):
        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            for attempt in [session.branch(session.messages) for _ in range(3)]:
                await attempt.ask()

    samples, client = await run(BestOf, ["One.", "Two.", "Three."])
    assert len({tuple(prompt) for prompt in client.prompts}) == 1
    assert [sample.metadata["fork_reason"] for sample in samples] == [None, "branch", "branch"]


class Watched:
    """A tokenizer that notes which threads encode long text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.threads: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, **options: Any) -> list[int]:
        if len(text) > 8_000:
            self.threads.append(threading.current_thread())
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("edited", [True, False], ids=["edited", "by the template"])
async def test_a_fork_of_a_long_conversation_is_tokenized_off_the_loop(edited: bool) -> None:
    """fault 20: what was added is short, but the fork renders and tokenizes everything that came before."""
    loops: list[threading.Thread] = []
    watched = Watched(chat_tokenizer("anthropic", "drops_thinking"))

    class Forks(Agent):
        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            loops.append(threading.current_thread())
            await session.ask()
            for n in range(10):
                await session.ask({"role": "tool", "content": f"{n} the page says so " * 100})
            if edited:
                session.messages[0]["content"] = "How few?"
            await session.ask({"role": "user", "content": "Sure?"})

    answer = "<think>\nWell.\n</think>\n\nOne."
    client = ScriptedClient(watched, [answer] * 12)
    finished = await run_rollout(Forks(tokenizer=watched, client=client), TASK)
    assert finished.status == "succeeded"
    assert watched.threads
    assert loops[0] not in watched.threads
