"""A session records its prompts with its turns: the store never searches for a prefix, and branches keep the engine's
ids."""

import threading
from typing import Any

import pytest

from agl_slime.agent.session import RolloutSession
from agl_slime.engine.client.generation import Generation
from agl_slime.errors import ConfigError
from agl_slime.tokens import forks
from tests.agent.multi_turn_agents import Agent, rollout
from tests.harness.samples import trained_ids
from tests.harness.tokenizers import HeldTokenizer
from tests.harness.vocabularies import chat_tokenizer


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(*_: Any) -> int:
        raise AssertionError("a turn that names its fork was compared with earlier turns")

    monkeypatch.setattr(forks, "common_prefix", compared)


async def test_branch_keeps_the_sampled_ids_and_is_marked() -> None:
    class Branches(Agent):
        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            await session.ask()
            branches = [session.branch(session.messages) for _ in range(2)]
            await session.ask({"role": "user", "content": "Sure?"})
            for branch in branches:  # the second asks the first's prompt once more, as best-of-n does
                await branch.ask({"role": "user", "content": "Really?"})
            await session.branch([{"role": "user", "content": "Judge."}]).ask()

    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    ids = (*tokenizer.encode("answ", add_special_tokens=False), *tokenizer.encode("er", add_special_tokens=False))
    odd = Generation(  # the tokenizer would make other tokens of this
        output_ids=ids, log_probs=(-1.0,) * len(ids), text="answer", finish_reason="length"
    )
    played = await rollout(Branches, [odd, "Yes.", "No.", "Never.", "Good."])
    prompts = played.client.prompts
    n = len(prompts[0])
    assert tuple(prompts[2][n : n + len(ids)]) == ids
    assert prompts[2] == prompts[3]
    assert [sample.metadata["fork_reason"] for sample in played.samples] == [None, "branch", "branch", "new_context"]


@pytest.mark.parametrize("edited", [True, False], ids=["edited", "by the template"])
async def test_a_fork_of_a_long_conversation_is_tokenized_off_the_loop(edited: bool) -> None:
    """The new message is short, but a fork renders and tokenizes the whole conversation."""
    loops: list[threading.Thread] = []
    tokenizing: list[threading.Thread] = []
    tokenizer = chat_tokenizer("anthropic", "drops_thinking")
    watched = HeldTokenizer(tokenizer, lambda: tokenizing.append(threading.current_thread()))

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
    played = await rollout(Forks, [answer] * 12, tokenizer=watched)
    assert played.finished.status == "succeeded"
    assert tokenizing
    assert loops[0] not in tokenizing


async def test_each_branch_with_a_role_has_its_reward() -> None:
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

    samples = (await rollout(Several, ["Two.", "Yes.", "Four.", "Yes.", "Three."])).samples
    assert [sample.reward for sample in samples] == [0.25, 0.75, 1.0]
    assert len({sample.rollout_id for sample in samples}) == 1


@pytest.mark.parametrize("keeps", [True, False])
async def test_tool_output_inside_the_answer_is_one_sample_if_stop_token_is_kept(keeps: bool) -> None:
    """As in slime's example of a code interpreter."""

    class Interprets(Agent):
        keep_stop_token = keeps

        async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
            for output in ("<interpreter>\n3\n</interpreter>\n", "<interpreter>\n4\n</interpreter>\n", ""):
                await session.ask()
                session.messages[-1]["content"] += output

    played = await rollout(Interprets, ["<code>1 + 2</code>", "<code>2 * 2</code>", "Three."])
    assert len(played.samples) == (1 if keeps else 3)
    assert trained_ids(*played.samples) == played.sampled
    if keeps:
        text = played.tokenizer.decode(played.sample.tokens)
        assert "<code>1 + 2</code><|im_end|><interpreter>\n3\n</interpreter>\n<code>2 * 2</code><|im_end|>" in text
