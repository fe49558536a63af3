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
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return chat_tokenizer(request.param, PLAIN)


def prompt(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return tokenizer.encode(text, add_special_tokens=False)


def answered(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def call(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    answer: str,
    end: str = "<|im_end|>",
    **options: Any,
) -> Turn:
    """A turn that samples ``answer`` after the rendered messages."""
    ids = tokenizer.encode(answer + end, add_special_tokens=False)
    prompt_ids = prompt(tokenizer, messages, **options)
    return Turn(prompt_ids=prompt_ids, response_ids=ids, log_probs=[-0.5] * len(ids), text=answer)


def reasons(turns: list[Turn], tokenizer: PreTrainedTokenizerFast | None) -> list[ForkReason | None]:
    return [segment.fork_reason for segment in merge_turns(turns, tokenizer)]


def two_turns(
    tokenizer: PreTrainedTokenizerFast, sampled: str, rendered: str | None = None, **options: Any
) -> list[Turn]:
    """An answer, and a call whose prompt renders the conversation through the template, the answer as ``rendered`` (by
    default as it was sampled)."""
    history = [USER, answered(sampled if rendered is None else rendered), AGAIN]
    return [call(tokenizer, [USER], sampled, **options), call(tokenizer, history, "Madrid.", **options)]


THOUGHT, ANSWER, ROME = "<think>\nFrance, so Paris.\n</think>", "It is Paris.", "It is Rome, no: Milan."
# the block and the call after it begin with the same characters, <t
THEN_A_CALL = "<think>\nLook it up.\n</think>\n<tool_call>\n{}\n</tool_call>"
OPENS_HISTORY = PLAIN.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
)
EDITS = ("It is Lyon.", "It is Milan.", "It is Rome", "It is Rome, no: Milan. Probably.", "", "Milan.")


@pytest.mark.parametrize("vocabulary", ["anthropic", "deepseek"])
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


def test_white_space_in_a_call_and_another_end_of_turn_are_the_templates_doing(tokenizer: PreTrainedTokenizerFast):
    first = call(tokenizer, [USER], '<tool_call>\n{"name":"find","arguments":{"key":"a b"}}\n</tool_call>')
    parsed = {**answered(""), "tool_calls": [{"function": {"name": "find", "arguments": {"key": "a b"}}}]}
    second = call(tokenizer, [USER, parsed, result("Paris")], "It is Paris.")
    assert reasons([first, second], tokenizer) == [None, ForkReason.TEMPLATE]
    first = call(tokenizer, [USER], ANSWER, end="<|im_start|>")
    assert reasons([first, two_turns(tokenizer, ANSWER)[1]], tokenizer) == [None, ForkReason.TEMPLATE]


def test_the_same_text_in_other_ids_is_retokenization(tokenizer: PreTrainedTokenizerFast):
    first, second = two_turns(tokenizer, ANSWER)
    letters = [i for letter in ANSWER for i in tokenizer.encode(letter, add_special_tokens=False)]
    sampled = [*letters, tokenizer.eos_token_id]
    assert tokenizer.decode(sampled) == tokenizer.decode(first.response_ids.tolist())
    assert sampled != first.response_ids.tolist()
    spelled = Turn(prompt_ids=first.prompt_ids, response_ids=sampled, log_probs=[-0.5] * len(sampled))
    assert reasons([spelled, second], tokenizer) == [None, ForkReason.RETOKENIZATION]


def test_changes_before_a_kept_answer_are_edits(tokenizer: PreTrainedTokenizerFast):
    shorter = [{"role": "user", "content": "Capital?"}, answered(ANSWER), AGAIN]
    turns = [call(tokenizer, [USER], ANSWER), call(tokenizer, shorter, "Madrid.")]
    assert reasons(turns, tokenizer) == [None, ForkReason.EDITED_HISTORY]
    history, turns = [USER], []
    for text, observation in (("look up france", "a long page about France"), ("look up spain", "a page about Spain")):
        turns.append(call(tokenizer, history, text))
        history += [answered(text), result(observation)]
    history[2] = result("(shortened)")
    turns.append(call(tokenizer, history, "Madrid."))
    assert reasons(turns, tokenizer) == [None, ForkReason.EDITED_HISTORY]


def test_several_turns_after_one_prompt_or_answer_are_branches(tokenizer: PreTrainedTokenizerFast):
    turns = [call(tokenizer, [USER], text) for text in ("Paris.", "Lyon.", "Paris.")]
    assert reasons(turns, tokenizer) == [None, ForkReason.BRANCH, ForkReason.BRANCH]
    turns = [call(tokenizer, [USER], "look up")]
    for page in ("Paris", "Lyon", "Nice"):
        turns.append(call(tokenizer, [USER, answered("look up"), result(page)], "It is " + page))
    assert reasons(turns, tokenizer) == [None, ForkReason.BRANCH, ForkReason.BRANCH]


def test_another_agents_conversation_is_a_new_context(tokenizer: PreTrainedTokenizerFast):
    first, again = two_turns(tokenizer, ANSWER)
    messages = [{"role": "system", "content": "You judge."}, {"role": "user", "content": "Is it true?"}]
    [agent, critic] = merge_turns([first, call(tokenizer, messages, "Yes."), again], tokenizer)
    assert [at.turn for at in agent.placements] == [0, 2]
    assert critic.fork_reason == ForkReason.NEW_CONTEXT


def test_without_a_tokenizer_drift_counts_as_an_edit():
    tokenizer = chat_tokenizer("anthropic", DROPS_THINKING)
    turns = two_turns(tokenizer, "<think>\nParis?\n</think>\n\nIt is Paris.")
    assert reasons(turns, None) == [None, ForkReason.EDITED_HISTORY]


def test_a_run_of_tokens_is_found_only_on_token_boundaries():
    hay = np.array([0x01020304, 0x05060708], dtype=np.int32)
    shifted = np.frombuffer(hay.tobytes()[1:5], dtype=np.int32)
    assert not contains(hay, shifted)
    assert contains(hay, hay[1:])
    assert not contains(hay[1:], hay)
