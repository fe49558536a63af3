"""Why a turn does not continue its rollout: each class of fork, on a real vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from agl_slime.tokens.forks import ForkReason, contains
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.turn import Turn
from tests.harness.tokenizers import DROPS_THINKING, PLAIN, chat_tokenizer

USER = {"role": "user", "content": "What is the capital of France?"}
AGAIN = {"role": "user", "content": "And of Spain?"}


@pytest.fixture(params=["anthropic", "deepseek"])
def vocabulary(request: pytest.FixtureRequest) -> str:
    return request.param


def prompt(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def call(tokenizer: PreTrainedTokenizerFast, prompt_ids: list[int], answer: str, *, end: str = "<|im_end|>") -> Turn:
    ids = tokenizer.encode(answer + end, add_special_tokens=False)
    return Turn(prompt_ids=prompt_ids, response_ids=ids, log_probs=[-0.5] * len(ids), text=answer)


def reasons(turns: list[Turn], tokenizer: PreTrainedTokenizerFast | None) -> list[ForkReason | None]:
    return [segment.fork_reason for segment in merge_turns(turns, tokenizer)]


def two_turns(
    tokenizer: PreTrainedTokenizerFast, sampled: str, rendered: str | None = None, **options: Any
) -> list[Turn]:
    """An answer, and a call whose prompt renders the conversation through the template, the answer as ``rendered`` (by
    default as it was sampled)."""
    first = call(tokenizer, prompt(tokenizer, [USER], **options), sampled)
    answer = {"role": "assistant", "content": sampled if rendered is None else rendered}
    return [first, call(tokenizer, prompt(tokenizer, [USER, answer, AGAIN], **options), "Madrid.")]


def test_a_template_that_keeps_history_does_not_fork(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    [segment] = merge_turns(two_turns(tokenizer, "It is Paris."), tokenizer)
    assert len(segment.placements) == 2


THOUGHT, ANSWER, ROME = "<think>\nFrance, so Paris.\n</think>", "It is Paris.", "It is Rome, no: Milan."
# the block and what follows it begin with the same characters, <t
THEN_A_CALL = "<think>\nLook it up.\n</think>\n<tool_call>\n{}\n</tool_call>"
OPENS_HISTORY = PLAIN.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
EDITS = ("It is Lyon.", "It is Milan.", "It is Rome", "It is Rome, no: Milan. Probably.", "", "Milan.")


@pytest.mark.parametrize(
    ("template", "sampled", "rendered", "options", "reason"),
    [
        (DROPS_THINKING, f"{THOUGHT}\n\n{ANSWER}", None, {}, ForkReason.DROPPED_THINKING),
        (DROPS_THINKING, THEN_A_CALL, None, {}, ForkReason.DROPPED_THINKING),
        (DROPS_THINKING, THOUGHT, None, {}, ForkReason.DROPPED_THINKING),
        (DROPS_THINKING, ANSWER, None, {"enable_thinking": False}, ForkReason.TEMPLATE),
        (OPENS_HISTORY, ANSWER, None, {}, ForkReason.TEMPLATE),
        *((PLAIN, ROME, rendered, {}, ForkReason.EDITED_HISTORY) for rendered in EDITS),
    ],
    ids=["thinking", "thinking before a call", "only thinking", "block in the prompt", "block in the history", *EDITS],
)
def test_an_answer_that_comes_back_otherwise_forks_for_its_reason(
    vocabulary: str, template: str, sampled: str, rendered: str | None, options: dict[str, Any], reason: ForkReason
):
    tokenizer = chat_tokenizer(vocabulary, template)
    assert reasons(two_turns(tokenizer, sampled, rendered, **options), tokenizer) == [None, reason]


def test_white_space_in_a_tool_call_is_the_templates_doing(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    sampled = '<tool_call>\n{"name":"find","arguments":{"key":"a b"}}\n</tool_call>'
    first = call(tokenizer, prompt(tokenizer, [USER]), sampled)
    parsed = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "find", "arguments": {"key": "a b"}}}],
    }
    second = call(tokenizer, prompt(tokenizer, [USER, parsed, {"role": "tool", "content": "Paris"}]), "It is Paris.")
    assert reasons([first, second], tokenizer) == [None, ForkReason.TEMPLATE]


def test_another_end_of_turn_is_the_templates_doing(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    first = call(tokenizer, prompt(tokenizer, [USER]), "It is Paris.", end="<|im_start|>")
    second = two_turns(tokenizer, "It is Paris.")[1]
    assert reasons([first, second], tokenizer) == [None, ForkReason.TEMPLATE]


def test_the_same_text_in_other_ids_is_retokenization(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    first, second = two_turns(tokenizer, "It is Paris.")
    one_by_one = [i for letter in "It is Paris." for i in tokenizer.encode(letter, add_special_tokens=False)]
    sampled = [*one_by_one, tokenizer.eos_token_id]
    assert tokenizer.decode(sampled) == tokenizer.decode(first.response_ids.tolist())
    assert sampled != first.response_ids.tolist()
    spelled = Turn(prompt_ids=first.prompt_ids, response_ids=sampled, log_probs=[-0.5] * len(sampled))
    assert reasons([spelled, second], tokenizer) == [None, ForkReason.RETOKENIZATION]


def test_a_question_that_the_agent_changed_before_a_kept_answer_is_an_edit(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    first = call(tokenizer, prompt(tokenizer, [USER]), "It is Paris.")
    shorter = [{"role": "user", "content": "Capital?"}, {"role": "assistant", "content": "It is Paris."}, AGAIN]
    assert reasons([first, call(tokenizer, prompt(tokenizer, shorter), "Madrid.")], tokenizer) == [
        None,
        ForkReason.EDITED_HISTORY,
    ]


def test_an_observation_that_the_agent_shortened_later_is_an_edit(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    history: list[dict[str, Any]] = [USER]
    turns = []
    for answer, observation in (
        ("look up france", "a very long page about France"),
        ("look up spain", "a very long page about Spain"),
    ):
        turns.append(call(tokenizer, prompt(tokenizer, history), answer))
        history += [{"role": "assistant", "content": answer}, {"role": "tool", "content": observation}]
    history[2] = {"role": "tool", "content": "(shortened)"}
    turns.append(call(tokenizer, prompt(tokenizer, history), "Madrid."))
    assert reasons(turns, tokenizer) == [None, ForkReason.EDITED_HISTORY]


def test_several_samples_of_one_prompt_are_branches(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    ids = prompt(tokenizer, [USER])
    turns = [call(tokenizer, ids, answer) for answer in ("Paris.", "Lyon.", "Paris.")]
    assert reasons(turns, tokenizer) == [None, ForkReason.BRANCH, ForkReason.BRANCH]


def test_continuing_an_earlier_turn_is_a_branch(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    answer = {"role": "assistant", "content": "look up"}
    turns = [call(tokenizer, prompt(tokenizer, [USER]), "look up")]
    for page in ("Paris", "Lyon", "Nice"):
        turns.append(
            call(tokenizer, prompt(tokenizer, [USER, answer, {"role": "tool", "content": page}]), "It is " + page)
        )
    assert reasons(turns, tokenizer) == [None, ForkReason.BRANCH, ForkReason.BRANCH]


def test_another_agents_conversation_is_a_new_context(vocabulary: str):
    tokenizer = chat_tokenizer(vocabulary, PLAIN)
    first = call(tokenizer, prompt(tokenizer, [USER]), "It is Paris.")
    critic = call(
        tokenizer,
        prompt(tokenizer, [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Is it true?"}]),
        "Yes.",
    )
    back = two_turns(tokenizer, "It is Paris.")[1]
    [own, other] = merge_turns([first, critic, back], tokenizer)
    assert [at.turn for at in own.placements] == [0, 2]
    assert other.fork_reason == ForkReason.NEW_CONTEXT


def test_without_a_tokenizer_drift_counts_as_an_edit():
    tokenizer = chat_tokenizer("anthropic", DROPS_THINKING)
    assert reasons(two_turns(tokenizer, "<think>\nParis?\n</think>\n\nIt is Paris."), None) == [
        None,
        ForkReason.EDITED_HISTORY,
    ]


def test_a_run_of_tokens_is_found_only_on_token_boundaries():
    hay = np.array([0x01020304, 0x05060708], dtype=np.int32)
    shifted = np.frombuffer(hay.tobytes()[1:5], dtype=np.int32)
    assert not contains(hay, shifted)
    assert contains(hay, hay[1:])
    assert not contains(hay[1:], hay)
