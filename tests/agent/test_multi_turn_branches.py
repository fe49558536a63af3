"""What a session knows of its prompts goes with its turns through the store: nothing is searched for, and branches keep
the engine's ids."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.session import RolloutSession
from agl_slime.engine.client.generation import Generation
from agl_slime.errors import ConfigError
from agl_slime.tokens import forks
from agl_slime.types import Sample
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import run_rollout
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer

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

    monkeypatch.setattr(forks, "common_prefix", compared)


async def test_a_conversation_is_one_sample_without_a_search() -> None:
    class Asks(Agent):
        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            await session.ask()
            await session.ask({"role": "user", "content": "Sure?"})

    samples, client = await run(Asks, ["Three.", "Yes."])
    [sample] = samples
    assert sample.metadata["forks"] == {}
    assert sample.tokens == client.prompts[1] + list(client.generations[1].output_ids)


async def test_branch_keeps_the_sampled_ids_and_is_marked() -> None:
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
    """The new message is short, but a fork renders and tokenizes the whole conversation."""
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


async def test_branches_have_rewards_of_their_own_by_role() -> None:
    """Solvers and a judge that reads them, as in slime's example of several agents."""

    class Several(Agent):
        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            for name, reward in (("first", 0.25), ("second", 0.75)):
                solver = session.branch([{"role": "user", "content": f"How many, {name}?"}], role=name)
                await solver.ask()
                await solver.ask({"role": "user", "content": "Sure?"})
                solver.set_reward(reward)
            await session.ask({"role": "user", "content": "Who is right?"})
            with pytest.raises(ConfigError, match="only a branch with a role"):
                session.set_reward(1.0)

    samples, _ = await run(Several, ["Two.", "Yes.", "Three.", "Yes.", "The second."])
    assert [sample.reward for sample in samples] == [0.25, 0.75, 1.0]
    assert len({sample.rollout_id for sample in samples}) == 1


@pytest.mark.parametrize("kept", [True, False])
async def test_tool_output_inside_the_answer_is_one_sample_if_stop_token_is_kept(kept: bool) -> None:
    """As in slime's example of a code interpreter."""

    class Interprets(Agent):
        keep_stop_token = kept

        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            for output in ("<interpreter>\n3\n</interpreter>\n", "<interpreter>\n4\n</interpreter>\n", ""):
                await session.ask()
                session.messages[-1]["content"] += output

    samples, client = await run(Interprets, ["<code>1 + 2</code>", "<code>2 * 2</code>", "Three."])
    assert len(samples) == (1 if kept else 3)
    sampled = [token for generation in client.generations for token in generation.output_ids]
    trained = trained_ids(*samples)
    assert trained == sampled
    if kept:
        text = chat_tokenizer("anthropic", "groups_tools").decode(samples[0].tokens)
        assert "<code>1 + 2</code><|im_end|><interpreter>\n3\n</interpreter>\n<code>2 * 2</code><|im_end|>" in text
