"""Merging and forking of turns: on bare token ids, and on real vocabularies."""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import TraceError
from agl_slime.tokens.codec import find_ids
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.spans import Retokenizer
from agl_slime.tokens.tokenizer import set_template_kwargs
from agl_slime.tokens.turn import Turn
from tests.harness.conversations import linked
from tests.harness.samples import turn
from tests.harness.tokenizers import DROPS_THINKING, PLAIN, small_tokenizer
from tests.harness.trace_strategies import conversations
from tests.harness.vocabularies import chat_tokenizer

BRANCH, EDITED, NEW = ForkReason.BRANCH, ForkReason.EDITED_HISTORY, ForkReason.NEW_CONTEXT
DROPPED, TEMPLATE = ForkReason.DROPPED_THINKING, ForkReason.TEMPLATE


def test_untrained_turns_are_context_and_no_segment_ends_with_one():
    turns = [turn([1], [2]), turn([1, 2, 9], [3]), turn([1, 2, 9, 3, 7], [5])]
    [segment] = merge_turns(turns, untrained={0, 2})
    assert (segment.token_ids.tolist(), segment.loss_mask.tolist()) == ([1, 2, 9, 3], [0, 0, 0, 1])
    assert segment.log_probs is not None
    assert segment.log_probs.tolist() == [0.0, 0.0, 0.0, -0.5]
    assert merge_turns(turns, untrained={0, 1, 2}) == []


def test_an_empty_prompt_is_refused_and_a_turn_without_samples_skipped():
    with pytest.raises(TraceError, match="turn 0 has an empty prompt"):
        merge_turns([turn([], [1])])
    assert merge_turns([]) == merge_turns([turn([], [])]) == []


FOUR = [turn([1], [2]), turn([1, 2, 9], [3]), turn([1, 2, 8], [4]), turn([1, 2, 9, 3, 7], [5])]
STALE = [turn([1], [2]), turn([5], [6], base_turn=0, kept_tokens=1), turn([5, 6, 7], [8], base_turn=1, kept_tokens=2)]


@pytest.mark.parametrize(
    ("turns", "segments", "reasons"),
    [
        # no token between the two: the agent took the generation up again
        pytest.param([turn([1], [2, 3]), turn([1, 2, 3], [4])], [[0, 1]], [], id="continued at once"),
        pytest.param([*FOUR, turn([1, 2, 8, 4, 7], [6])], [[0, 1, 3], [2, 4]], [BRANCH], id="branches alternate"),
        pytest.param([turn([1], [2]), turn([1], [2]), turn([1, 2, 9], [3])], [[0], [1, 2]], [BRANCH], id="equal"),
        pytest.param([turn([1, 2, 3], [4]), turn([1, 2], [5])], [[0], [1]], [BRANCH], id="part of a prompt"),
        # the last prompt extends the first answer; the first token that the third answer shares with it is chance
        pytest.param(
            [turn([1, 2], [3]), turn([1, 2, 3, 9], [8]), turn([1, 2], [3, 4]), turn([1, 2, 3, 5], [6])],
            [[0, 1], [2], [3]],
            [BRANCH, BRANCH],
            id="prefix of another answer",
        ),
        # observation 50 became 60, the answer to it stayed, the answer after that was dropped
        pytest.param(
            [
                turn([1], [10, 11]),
                turn([1, 10, 11, 50], [20, 21]),
                turn([1, 10, 11, 50, 20, 21, 51], [30, 31]),
                turn([1, 10, 11, 60, 20, 21, 52], [40]),
            ],
            [[0, 1, 2], [3]],
            [EDITED],
            id="a later answer after a change",
        ),
        # two conversations share the system prompt; the history of the second is changed
        pytest.param(
            [turn([1, 2, 70], [10]), turn([1, 2, 80], [20, 21]), turn([1, 2, 81, 20, 21, 90], [30])],
            [[0], [1], [2]],
            [NEW, EDITED],
            id="edit of the most recent conversation",
        ),
        pytest.param([turn([1], []), turn([], []), turn([1], [2])], [[2]], [], id="without samples"),
        # by its tokens the third turn would be an edit; the conversation recorded the template as the reason
        pytest.param(
            [
                turn([1], [10, 11]),
                turn([1, 10, 11, 50], [20], base_turn=0, kept_tokens=3),
                turn([1, 10, 60], [30], base_turn=1, kept_tokens=2, fork=TEMPLATE),
            ],
            [[0, 1], [2]],
            [TEMPLATE],
            id="placed by its base turn",
        ),
        pytest.param(
            [turn([1], [2]), *(turn([1, 2, n], [3], base_turn=0, kept_tokens=2) for n in (8, 9))],
            [[0, 1], [2]],
            [BRANCH],
            id="the second turn on one base",
        ),
        pytest.param(
            [
                turn([1], [2]),
                turn([1, 2, 9, 9], [], base_turn=0, kept_tokens=2),
                turn([1, 2, 9, 8], [3], base_turn=1, kept_tokens=3, fork=BRANCH),
            ],
            [[0, 2]],
            [],
            id="base without samples",
        ),
        # a trajectory without its first turns, whose numbers mean other turns now
        pytest.param(STALE, [[0], [1, 2]], [BRANCH], id="stale base"),
        pytest.param(STALE[1:], [[0, 1]], [], id="stale base, first turn gone"),
        pytest.param(
            [STALE[0], turn([9], [9]), STALE[2], turn([1, 2, 3], [4], base_turn=7, kept_tokens=2)],
            [[0, 3], [1], [2]],
            [NEW, BRANCH],
            id="base that does not exist",
        ),
    ],
)
def test_turns_are_merged_or_fork_for_a_reason(turns: list[Turn], segments: list[list[int]], reasons: list[ForkReason]):
    merged = merge_turns(turns)
    assert [[place.turn for place in segment.placements] for segment in merged] == segments
    assert [segment.fork_reason for segment in merged] == [None, *reasons]


@given(conversations(min_response=1, links=False), st.booleans())
def test_a_turn_that_extends_the_end_of_a_segment_never_forks(turns: list[Turn], says_so: bool):
    """Against the rule written as a search: a new segment starts only when no segment's whole content begins the
    prompt."""
    turns = linked(turns) if says_so else turns
    segments = merge_turns(turns)
    for segment in segments:
        index = segment.placements[0].turn
        prompt = turns[index].prompt_ids.tolist()
        extended = []
        for earlier in segments:
            ends = [place.end for place in earlier.placements if place.turn < index]
            if ends and earlier.token_ids[: ends[-1]].tolist() == prompt[: ends[-1]]:
                extended.append(ends[-1])
        prefixes = [turn.length for turn in turns[:index] if turn.token_ids.tolist() == prompt[: turn.length]]
        assert not extended or max(prefixes) > max(extended)


@given(
    st.lists(
        st.tuples(st.text(max_size=10), st.lists(st.integers(0, 399), min_size=1, max_size=12)), min_size=2, max_size=4
    )
)
def test_retokenized_text_forks_with_that_reason_and_no_other(exchanges: list[tuple[str, list[int]]]):
    """Any tokens are sampled, half characters too; each next prompt is rendered from the text, as a chat API does."""
    tokenizer = small_tokenizer()
    history: list[dict[str, str]] = []
    turns: list[Turn] = []
    for question, sampled in exchanges:
        history.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
        response = [*sampled, tokenizer.eos_token_id]
        turns.append(Turn(prompt_ids=tokenizer.encode(text), response_ids=response, log_probs=[-1.0] * len(response)))
        history.append({"role": "assistant", "content": tokenizer.decode(sampled)})
    segments = merge_turns(turns, tokenizer)
    assert {segment.fork_reason for segment in segments[1:]} <= {ForkReason.RETOKENIZATION}


USER = {"role": "user", "content": "What is the capital of France?"}
AGAIN = {"role": "user", "content": "And of Spain?"}


@pytest.fixture(params=["anthropic", "deepseek"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return chat_tokenizer(request.param, PLAIN)


def answered(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def call(tokenizer: Any, messages: list[dict[str, Any]], answer: str, end: str = "<|im_end|>", **options: Any) -> Turn:
    """A turn that samples ``answer`` after the rendered messages."""
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    prompt_ids, ids = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer + end))
    return Turn(prompt_ids=prompt_ids, response_ids=ids, log_probs=[-0.5] * len(ids), text=answer)


def reasons(turns: list[Turn], tokenizer: Any) -> list[ForkReason | None]:
    return [segment.fork_reason for segment in merge_turns(turns, tokenizer)]


def two_turns(tokenizer: Any, sampled: str, rendered: str | None = None, **options: Any) -> list[Turn]:
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
        (DROPS_THINKING, f"{THOUGHT}\n\n{ANSWER}", None, {}, DROPPED),
        (DROPS_THINKING, THEN_A_CALL, None, {}, DROPPED),
        (DROPS_THINKING, THOUGHT, None, {}, DROPPED),
        (DROPS_THINKING, ANSWER, None, {"enable_thinking": False}, TEMPLATE),
        (OPENS_HISTORY, ANSWER, None, {}, TEMPLATE),
        *((PLAIN, ROME, rendered, {}, EDITED) for rendered in EDITS),
    ],
    ids=["thinking", "thinking before a call", "only thinking", "block in the prompt", "block in the history", *EDITS],
)
def test_an_answer_that_comes_back_otherwise_forks_for_its_reason(
    vocabulary: str, template: str, sampled: str, rendered: str | None, options: dict[str, Any], reason: ForkReason
):
    tokenizer = chat_tokenizer(vocabulary, template)
    assert reasons(two_turns(tokenizer, sampled, rendered, **options), tokenizer) == [None, reason]


def test_white_space_and_other_ends_of_turn_are_the_templates_doing(tokenizer: Any):
    first = call(tokenizer, [USER], '<tool_call>\n{"name":"find","arguments":{"key":"a b"}}\n</tool_call>')
    parsed = {**answered(""), "tool_calls": [{"function": {"name": "find", "arguments": {"key": "a b"}}}]}
    second = call(tokenizer, [USER, parsed, result("Paris")], "It is Paris.")
    assert reasons([first, second], tokenizer) == [None, TEMPLATE]
    first, second = two_turns(tokenizer, ANSWER)
    assert reasons([first, second], tokenizer) == [None]
    assert reasons([call(tokenizer, [USER], ANSWER, "<|im_start|>"), second], tokenizer) == [None, TEMPLATE]


def test_the_same_text_in_other_ids_is_retokenization(tokenizer: Any):
    first, second = two_turns(tokenizer, ANSWER)
    letters = [i for letter in ANSWER for i in tokenizer.encode(letter, add_special_tokens=False)]
    sampled = [*letters, tokenizer.eos_token_id]
    assert tokenizer.decode(sampled) == tokenizer.decode(first.response_ids.tolist())
    assert sampled != first.response_ids.tolist()
    spelled = Turn(prompt_ids=first.prompt_ids, response_ids=sampled, log_probs=[-0.5] * len(sampled))
    assert reasons([spelled, second], tokenizer) == [None, ForkReason.RETOKENIZATION]
    assert reasons([spelled, second], None) == [None, EDITED]


def test_a_run_of_tokens_is_found_only_on_token_boundaries():
    hay = np.array([0x01020304, 0x05060708], dtype=np.int32)
    shifted = np.frombuffer(hay.tobytes()[1:5], dtype=np.int32)
    places = [find_ids(ids.tobytes(), part.tobytes()) for ids, part in ((hay, shifted), (hay, hay[1:]), (hay[1:], hay))]
    assert places == [-1, 1, -1]


# -- text conversations as tokens -------------------------------------------------------------------------------------


UNMARKED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""No special token separates the messages: the end of an answer and the text after it can merge into one token."""


@pytest.mark.parametrize(("template", "end"), [(PLAIN, "<|im_end|>"), (UNMARKED, "")], ids=["ChatML", "unmarked"])
@pytest.mark.parametrize("vocabulary", ["anthropic", "deepseek"])
def test_a_conversation_that_only_grows_is_one_sequence(vocabulary: str, template: str, end: str):
    tokenizer = chat_tokenizer(vocabulary, template)
    retokenizer = Retokenizer(tokenizer)
    history: list[dict[str, Any]] = []
    turns = []
    for index in range(5):
        history.append({"role": "user", "content": f"Question {index}?"})
        answer = {"role": "assistant", "content": f"Answer {index}!\n"}
        prompt, response = retokenizer.turn([*history], answer)
        turns.append(Turn(prompt_ids=prompt, response_ids=response, token_source="retokenized"))
        history.append(answer)
    [segment] = merge_turns(turns, tokenizer)
    text = tokenizer.decode(segment.token_ids.tolist())
    assert text == tokenizer.apply_chat_template(history, tokenize=False).rstrip()
    sampled = [tokenizer.decode(segment.token_ids[p.start : p.end].tolist()) for p in segment.placements]
    texts = [f"Answer {i}!\n{end}" if end else f"Answer {i}!" for i in range(5)]
    assert [text.lstrip() for text in sampled] == texts


HI, HELLO = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Hello"}


def test_text_that_the_template_adds_after_an_answer_is_not_sampled():
    tokenizer = chat_tokenizer("anthropic", PLAIN.replace("<|im_end|>\n", "<|im_end|>\n---\n"))
    _, response = Retokenizer(tokenizer).turn(HI, HELLO)
    assert tokenizer.decode(response) == "Hello<|im_end|>"


def test_template_that_opens_the_answer_leaves_the_answers_text():
    """The prompt ends with an empty thinking block that the finished answer does not have."""
    tokenizer = copy.copy(chat_tokenizer("anthropic", DROPS_THINKING))
    set_template_kwargs(tokenizer, {"enable_thinking": False})
    prompt, response = Retokenizer(tokenizer).turn(HI, HELLO)
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(response) == "Hello"


def test_without_a_template_text_is_unchanged_and_a_conversation_refused():
    tokenizer = chat_tokenizer("anthropic", None)
    prompt, response = Retokenizer(tokenizer).turn(HI, HELLO)
    assert (tokenizer.decode(prompt), tokenizer.decode(response)) == ("Hi", "Hello")
    with pytest.raises(TraceError, match=r"no chat template.* 2 messages"):
        Retokenizer(tokenizer).turn([{"role": "system", "content": "a"}, *HI], HELLO)
    tokenizer = chat_tokenizer("anthropic", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TraceError, match=r"cannot render these messages: .*roles must alternate"):
        Retokenizer(tokenizer).turn(HI, HELLO)


def test_the_next_roles_mark_is_the_answers_where_nothing_else_ends_it() -> None:
    """GLM samples it. The next prompt begins with it, so the conversation stays one sequence."""
    tokenizer = chat_tokenizer("anthropic", "role_markers")
    retokenizer = Retokenizer(tokenizer)
    called = {**answered("I look."), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    prompt, response = retokenizer.turn(HI, called)
    assert tokenizer.decode(response) == "I look.<|observation|>"
    history = [*HI, called, result("one")]
    second, response = retokenizer.turn(history, answered("One."))
    assert second[: len(prompt)] == prompt
    assert tokenizer.decode(second).count("<|observation|>") == 1
    assert tokenizer.decode(response) == "One.<|user|>"
    assert tokenizer.decode(retokenizer.turn(history, answered("One"), finish_reason="length")[1]) == "One"
