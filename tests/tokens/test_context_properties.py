"""Invariants of every conversation, on real vocabularies and templates of each shape.

Trained tokens are the engine's, forks are never silent, prompts are the template's.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_slime.engine.client.generation import Generation
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.template import ChatTemplate
from tests.harness.chat_templates import TEMPLATES
from tests.harness.examples import examples
from tests.harness.vocabularies import VOCABULARIES, chat_tokenizer
from tests.tokens.conversation_strategies import LINEAR, Conversation, conversations, phrase

CASES = [(vocabulary, template) for vocabulary in VOCABULARIES for template in TEMPLATES]
quick = settings(
    max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.parametrize(("vocabulary", "template"), CASES)
@quick
@given(data=st.data())
def test_any_conversation_is_exact_to_the_token(vocabulary: str, template: str, data: st.DataObject) -> None:
    tokenizer = chat_tokenizer(vocabulary, template)
    conversation = data.draw(conversations(tokenizer, template))
    each_sampled_token_is_trained_once_where_it_was_sampled(conversation, tokenizer)
    a_prompt_extends_the_context_or_a_fork_is_counted(conversation)
    a_prompt_is_the_templates(conversation, tokenizer, template)


def each_sampled_token_is_trained_once_where_it_was_sampled(conversation: Conversation, tokenizer: Any) -> None:
    turns = conversation.turns
    trained: dict[int, tuple[bytes, bytes]] = {}
    for segment in merge_turns(turns, tokenizer):
        covered = np.zeros(len(segment.loss_mask), dtype=np.int8)
        for at in segment.placements:
            assert at.turn not in trained
            assert segment.log_probs is not None
            trained[at.turn] = (
                segment.token_ids[at.start : at.end].tobytes(),
                segment.log_probs[at.start : at.end].tobytes(),
            )
            assert segment.token_ids[: at.start].tobytes() == turns[at.turn].prompt_ids.tobytes()
            covered[at.start : at.end] = 1
        assert (covered == segment.loss_mask).all()
    sampled = {i: turn for i, turn in enumerate(turns) if len(turn.response_ids)}
    assert trained == {
        i: (turn.response_ids.tobytes(), turn.log_probs.tobytes())
        for i, turn in sampled.items()
        if turn.log_probs is not None
    }


def a_prompt_extends_the_context_or_a_fork_is_counted(conversation: Conversation) -> None:
    """No fork is counted where the prompt extends the context; the turn records its base correctly."""
    first, *later = conversation.turns
    assert (first.base_turn, first.kept_tokens, first.fork) == (None, 0, None)
    for base, turn, continued in zip(conversation.turns, later, conversation.continued[1:], strict=False):
        extends = turn.prompt_ids[: base.length].tobytes() == base.token_ids.tobytes()
        assert extends == continued == (turn.fork is None)
        assert turn.prompt_ids[: turn.kept_tokens].tobytes() == base.token_ids[: turn.kept_tokens].tobytes()
        assert (turn.kept_tokens == base.length) == continued
    assert conversation.context.token_ids.tobytes() == conversation.turns[-1].token_ids.tobytes()


def a_prompt_is_the_templates(conversation: Conversation, tokenizer: Any, template: str) -> None:
    """Up to white space and empty blocks, and but for sampled tokens, which stay where the engine put them."""

    def read(ids: Any) -> str:
        return _squashed(tokenizer.decode(ids.tolist(), skip_special_tokens=False), tokenizer, template)

    for number, (turn, messages) in enumerate(zip(conversation.turns, conversation.messages, strict=True)):
        expected = _squashed(_rendering(conversation, messages), tokenizer, template)
        if read(turn.prompt_ids) == expected:
            continue
        spans = _sampled_in_prompt(conversation, number)
        starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(turn.prompt_ids)]
        first, *later = [read(turn.prompt_ids[start:stop]) for start, stop in zip(starts, ends, strict=True)]
        assert later
        assert expected.startswith(first)
        assert expected.endswith(later[-1])
        end = len(first)
        for piece in later:
            place = expected.find(piece, end)
            assert place >= 0
            end = place + len(piece)


def _sampled_in_prompt(conversation: Conversation, number: int) -> list[tuple[int, int]]:
    """The places of answers in the prompt of a turn, with the agent's text in them."""
    turn = conversation.turns[number]
    if turn.base_turn is None:
        return []
    base = conversation.turns[turn.base_turn]
    spans, start = _sampled_in_prompt(conversation, turn.base_turn), len(base.prompt_ids)
    written = conversation.messages[turn.base_turn][-1]
    if written["role"] == "assistant":
        start = spans.pop()[0] if spans else _start_of(conversation, base.prompt_ids, written["content"])
    spans.append((start, base.length))
    return [(start, min(end, turn.kept_tokens)) for start, end in spans if start < turn.kept_tokens]


def _start_of(conversation: Conversation, prompt_ids: Any, written: str) -> int:
    """The start of an answer that the agent began, at the end of the prompt; the prompt's end if there is none."""
    tokenizer, length = conversation.context.template.tokenizer, len(prompt_ids)
    texts = {start: tokenizer.decode(prompt_ids[start:].tolist()) for start in range(length, -1, -1)}
    return next((start for start, text in texts.items() if text and text.strip() == written.strip()), length)


@pytest.mark.parametrize(
    "template", ["chatml", "groups_tools", "role_markers", "ends_with_token", "drops_empty_blocks", "counts_rounds"]
)
@quick
@given(data=st.data())
def test_templates_that_only_append_never_fork(template: str, data: st.DataObject) -> None:
    tokenizer = chat_tokenizer("qwen", template)
    conversation = data.draw(conversations(tokenizer, template, allowed=LINEAR))
    assert not conversation.context.forks
    assert len(merge_turns([turn for turn in conversation.turns if len(turn.response_ids)], tokenizer)) <= 1


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in ("bare", "role_markers")])
@quick
@given(data=st.data())
def test_no_merge_can_reach_across_a_boundary_where_markers_end_answers(template: str, data: st.DataObject) -> None:
    conversation = data.draw(conversations(chat_tokenizer("anthropic", template), template, allowed=LINEAR))
    assert conversation.context.open_boundaries == 0


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "forgets_results"])
@settings(max_examples=examples(2), deadline=None)
@given(data=st.data())
def test_any_long_conversation_renders_as_the_template_does(template: str, data: st.DataObject) -> None:
    """A step that renders differently in the window and in the whole (a question among tools) is noticed at once."""
    tokenizer = chat_tokenizer("qwen", template)
    conversation = data.draw(
        conversations(tokenizer, template, allowed=("tool", "user", "tip"), min_turns=30, max_turns=40)
    )
    a_prompt_extends_the_context_or_a_fork_is_counted(conversation)
    a_prompt_is_the_templates(conversation, tokenizer, template)


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name not in ("forgets_results", "counts_rounds")])
@settings(max_examples=examples(2), deadline=None)
@given(data=st.data())
def test_rendering_the_ends_gives_the_prompts_that_rendering_all_gives(template: str, data: st.DataObject) -> None:
    tokenizer = chat_tokenizer("anthropic", template)
    texts = data.draw(st.lists(phrase, min_size=1, max_size=3))
    roles = data.draw(st.lists(st.sampled_from(["tool", "tool", "tool", "tools", "user"]), min_size=36, max_size=44))
    ends, whole = (
        ChatContext(
            template=ChatTemplate(tokenizer=tokenizer),
            messages=[{"role": role, "content": role} for role in ("system", "user")],
        )
        for _ in range(2)
    )
    whole._windows_exact = False
    stop = int(tokenizer.convert_tokens_to_ids(TEMPLATES[template].end))
    for n, role in enumerate(roles):
        text = f"{texts[n % len(texts)]}{n}"
        if n % 3:
            text = "<think>\n" * (not TEMPLATES[template].opens_thinking) + f"thought {n}\n</think>\n\n{text}"
        ids = (*tokenizer.encode(text, add_special_tokens=False), stop)
        generation = Generation(
            output_ids=ids, log_probs=(-0.5,) * len(ids), text=text, finish_reason="stop", matched_stop=stop
        )
        for context in (ends, whole):
            context.add_answer(context.prompt_ids(), generation)
            context.add(*[{"role": role.removesuffix("s"), "content": f"{role} {n}"}] * (1 + (role == "tools")))
        assert ends.token_ids.tobytes() == whole.token_ids.tobytes()
    assert ends.forks == whole.forks
    assert ends._windows_exact


def _rendering(conversation: Conversation, messages: list[dict[str, Any]]) -> str:
    template: ChatTemplate = conversation.context.template
    in_fields = conversation.context._answers.messages(messages)
    if messages[-1]["role"] == "assistant":
        return template.render(in_fields[:-1], generation_prompt=True) + messages[-1]["content"]
    return template.render(in_fields, generation_prompt=True)


def _squashed(text: str, tokenizer: Any, template: str) -> str:
    # encoded and decoded once: vocabularies with a normalizer do not give every text back
    text = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False)
    for token in TEMPLATES[template].stops:
        text = text.replace(token, "")
    return re.sub(r"<(\w+)></\1>", "", "".join(text.split()))
