"""Invariants of random conversations on real vocabularies and templates of each shape: arbitrary answers, tools, users,
and an agent that edits, backtracks and truncates.

Trained tokens are the engine's, forks are never silent, prompts are the template's.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agl_slime.engine.client.generation import FinishReason, Generation
from agl_slime.tokens.conversation import ChatContext, TextDigest
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.turn import Turn
from tests.harness.chat_templates import TEMPLATES
from tests.harness.examples import examples
from tests.harness.vocabularies import VOCABULARIES, chat_tokenizer

_PLAIN = "the; answer; is;42;\n;\n\n;  ; Größe;漢字;😀;é;def f(x):;\t; don't;aaaaaaaaaaaaaaaaa"
_MARKUP = '…;<;im_end;|>;</;{;"k": 1'
WORDS = f"{_PLAIN};{_MARKUP}".split(";")
phrase = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join)

Move = Literal["tool", "tools", "user", "repeat", "tip", "backtrack", "edit", "drop", "replace_answer"]
LINEAR: tuple[Move, ...] = ("tool", "tool", "tools", "user")
MOVES: tuple[Move, ...] = ("tool", *LINEAR, "user", "repeat", "tip", "backtrack", "edit", "drop", "replace_answer")


@dataclass
class Conversation:
    """A context after random turns, and the engine's record of them."""

    context: ChatContext
    turns: list[Turn] = field(default_factory=list)
    continued: list[bool] = field(default_factory=list)  # per turn: no fork was counted
    messages: list[list[dict[str, Any]]] = field(default_factory=list)  # per turn, of the prompt


@st.composite
def answers(draw: st.DrawFn, tokenizer: Any, template: str) -> Generation:
    """An answer as an engine samples it: not always the ids that the tokenizer would choose for its text."""
    shape = TEMPLATES[template]
    text = draw(phrase)
    if draw(st.booleans()):
        text = "<think>\n" * (not shape.opens_thinking) + f"{draw(phrase)}\n</think>\n\n{text}"
    if draw(st.integers(0, 3)) == 0:
        text += '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    cut = draw(st.integers(0, len(text))) if draw(st.booleans()) else 0  # split where no tokenizer would
    ids = [i for part in (text[:cut], text[cut:]) for i in tokenizer.encode(part, add_special_tokens=False)]
    finish: FinishReason = draw(st.sampled_from(["stop", "stop", "stop", "length", "abort"]))
    matched: int | str | None = None
    if finish == "stop":
        stop = draw(st.sampled_from([*shape.stops, "</tool_call>"]))
        if stop != "</tool_call>":
            matched = int(tokenizer.convert_tokens_to_ids(stop))
            ids = [*ids, matched]
        elif text.endswith(stop):
            matched, text = stop, text.removesuffix(stop)
        else:
            finish = "length"
    else:
        ids = ids[: draw(st.integers(0 if finish == "abort" else 1, len(ids)))]
        text = tokenizer.decode(ids, skip_special_tokens=False)
    log_probs = tuple(-float(n % 7) / 8 for n, _ in enumerate(ids))
    return Generation(output_ids=tuple(ids), log_probs=log_probs, text=text, finish_reason=finish, matched_stop=matched)


def ask(conversation: Conversation, generation: Generation) -> None:
    """One turn."""
    context = conversation.context
    messages = [dict(message) for message in context.messages]
    prompt, forks = context.prompt_ids(), context.forks.total()
    context.add_answer(prompt, generation)
    conversation.messages.append(messages)
    turn = Turn.from_generation(
        context.token_ids[: len(prompt)],
        generation,
        base_turn=len(conversation.turns) - 1 if conversation.turns else None,
        kept_tokens=context.kept_tokens,
        fork=context.fork,
    )
    conversation.turns.append(turn)
    conversation.continued.append(context.forks.total() == forks)


def move(draw: st.DrawFn, conversation: Conversation, allowed: tuple[Move, ...]) -> None:
    """An agent's step between two answers."""
    messages = conversation.context.messages
    kind = draw(st.sampled_from(allowed))
    answer_places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if kind in ("tool", "tools"):
        conversation.context.add(
            *({"role": "tool", "content": draw(phrase)} for _ in range(1 if kind == "tool" else 3))
        )
    elif kind == "user":
        conversation.context.add({"role": "user", "content": draw(phrase)})
    elif kind == "tip":  # the model continues an answer after the agent's text
        messages[-1]["content"] += draw(phrase)
    elif kind == "backtrack":
        content = messages[-1]["content"]
        messages[-1]["content"] = content[: draw(st.integers(0, len(content)))] + draw(phrase)
    elif kind == "edit":
        messages[draw(st.integers(0, len(messages) - 1))]["content"] = draw(phrase)
        conversation.context.add({"role": "user", "content": draw(phrase)})
    elif kind == "drop":  # back to the question of an earlier answer, or to that answer
        del messages[draw(st.sampled_from(answer_places)) + draw(st.integers(0, 1)) :]
        if messages[-1]["role"] == "assistant":
            conversation.context.add({"role": "user", "content": draw(phrase)})
    elif kind == "replace_answer":
        messages[answer_places[-1]] = {"role": "assistant", "content": draw(phrase)}
        conversation.context.add({"role": "tool", "content": draw(phrase)})


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
LISTED = [{"type": "function", "function": FUNCTION}]


@st.composite
def conversations(
    draw: st.DrawFn, tokenizer: Any, template: str, allowed: tuple[Move, ...] = MOVES, turns: tuple[int, int] = (1, 5)
) -> Conversation:
    messages = [{"role": "user", "content": draw(phrase)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(phrase)})
    chat_template = ChatTemplate(tokenizer=tokenizer, tools=draw(st.sampled_from([None, LISTED])))
    conversation = Conversation(ChatContext(template=chat_template, messages=messages))
    ask(conversation, draw(answers(tokenizer, template)))
    for _ in range(draw(st.integers(*turns)) - 1):
        move(draw, conversation, allowed)
        ask(conversation, draw(answers(tokenizer, template)))
    return conversation


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
        assert segment.log_probs is not None
        covered = np.zeros_like(segment.loss_mask)
        for place in segment.placements:
            assert place.turn not in trained
            assert segment.token_ids[: place.start].tobytes() == turns[place.turn].prompt_ids.tobytes()
            span = slice(place.start, place.end)
            trained[place.turn] = segment.token_ids[span].tobytes(), segment.log_probs[span].tobytes()
            covered[span] = 1
        assert (covered == segment.loss_mask).all()
    sampled = {i: (turn.response_ids, turn.log_probs) for i, turn in enumerate(turns) if len(turn.response_ids)}
    assert trained == {i: (ids.tobytes(), probs.tobytes()) for i, (ids, probs) in sampled.items() if probs is not None}


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


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "bare"])
@quick
@given(data=st.data())
def test_linear_conversations_never_fork_where_templates_append(template: str, data: st.DataObject) -> None:
    tokenizer = chat_tokenizer("qwen", template)
    conversation = data.draw(conversations(tokenizer, template, allowed=LINEAR))
    if template != "role_markers":  # markers end answers: no merge reaches across a boundary
        assert conversation.context.open_boundaries == 0
    if template in ("chatml", "groups_tools", "role_markers", "ends_with_token", "drops_empty_blocks", "counts_rounds"):
        assert not conversation.context.forks
        assert len(merge_turns([turn for turn in conversation.turns if len(turn.response_ids)], tokenizer)) <= 1


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "forgets_results"])
@settings(max_examples=examples(2), deadline=None)
@given(data=st.data())
def test_any_long_conversation_renders_as_the_template_does(template: str, data: st.DataObject) -> None:
    """A step that renders differently in the window and in the whole (a question among tools) is noticed at once."""
    tokenizer = chat_tokenizer("qwen", template)
    conversation = data.draw(conversations(tokenizer, template, ("tool", "user", "tip"), (30, 40)))
    a_prompt_extends_the_context_or_a_fork_is_counted(conversation)
    a_prompt_is_the_templates(conversation, tokenizer, template)


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
    return squash(text)


def squash(text: str) -> str:
    return re.sub(r"<(\w+)></\1>", "", "".join(text.split()))


PIECES = ["<", ">", "</", "a", "<b>", "</b>", " ", "é", "�", "x y", "<think>\n\n</think>", "<a></a>", "<a><a></a>"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@given(TEXTS, TEXTS, st.integers(1, 9))
@example("<", "<<think>\n\n</think>", 1)
@example("<|user|>\nhi <think>\n\n</think>four", "<|user|>hi four\n", 3)
@example("<|user|>hi four", "<|user|>hi Four", 3)
def test_a_digest_of_pieces_is_that_of_the_whole_wherever_it_is_cut(text: str, second: str, size: int) -> None:
    written = TextDigest(text[:size])
    for start in range(size, len(text), size):
        written.add(text[start : start + size])
    assert written.matches(text)
    assert written.copy().matches(text + "<a", "<a")
    assert written.matches(second) == (squash(second) == squash(text))
