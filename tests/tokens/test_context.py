"""The conversation in tokens: kept and added ids, forks and their reasons; at the end, properties of any
conversation."""

import copy
import logging
import re
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from agl_slime.engine.client.generation import FinishReason, Generation
from agl_slime.errors import ConfigError, PromptError
from agl_slime.tokens import forks
from agl_slime.tokens.blanks import TextDigest
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.template import ChatTemplate, chat_template
from agl_slime.tokens.turn import Turn
from tests.harness.chat_templates import CHATML, TEMPLATES
from tests.harness.conversations import answer, text_of
from tests.harness.examples import examples
from tests.harness.vocabularies import VOCABULARIES, base_tokenizer, chat_tokenizer

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
COUNTED = "First I count. Then three."


def conversation(template: str, vocabulary: str = "anthropic", **options: Any) -> tuple[ChatContext, Any]:
    tokenizer = chat_tokenizer(vocabulary, template)
    return ChatContext(template=ChatTemplate(tokenizer=tokenizer, **options), messages=QUESTION), tokenizer


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def test_next_prompt_extends_the_context_by_the_templates_text() -> None:
    context, tokenizer = conversation("chatml")
    prompt, generation = answer(context, tokenizer, "Three.")
    with pytest.raises(ConfigError, match="prompt_ids"):
        context.add_answer([1, 2], generation)
    context.add(user("Sure?"))
    added = tokenizer.encode("\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    assert context.prompt_ids() == [*prompt, *generation.output_ids, *added]


def test_ids_that_the_tokenizer_would_not_choose_are_kept() -> None:
    context, tokenizer = conversation("chatml")
    odd = tokenizer.encode("answ", add_special_tokens=False) + tokenizer.encode("er", add_special_tokens=False)
    assert odd != tokenizer.encode("answer", add_special_tokens=False)
    prompt = context.prompt_ids()
    ids = (*odd, tokenizer.eos_token_id)
    generation = Generation(output_ids=ids, log_probs=(-0.1,) * len(ids), text="answer", finish_reason="stop")
    context.add_answer(prompt, generation)
    context.add(user("Sure?"))
    assert context.prompt_ids()[len(prompt) : len(prompt) + 2] == odd
    assert not context.forks


@pytest.mark.parametrize("template", ["chatml", "groups_tools", "drops_thinking"])
def test_a_truncated_answer_is_closed_by_the_template(template: str) -> None:
    context, tokenizer = conversation(template)
    prompt, generation = answer(context, tokenizer, "Three or maybe", finish="length")
    context.add(tool("3"))
    added = text_of(tokenizer, context.prompt_ids()[len(prompt) + len(generation.output_ids) :])
    assert added.startswith(tokenizer.eos_token)
    assert context.open_boundaries == 0


def test_a_sampled_stop_token_or_string_is_part_of_the_conversation() -> None:
    for template, text, options, message, added in (
        # a token that the template does not write; the next role's marker, which is not doubled; a string
        ("groups_tools", "Three.", {"stop": "<|endoftext|>"}, user("Sure?"), "<|endoftext|><|im_end|>\n<|im_start|>"),
        ("role_markers", "Three.", {"stop": "<|user|>"}, user("Sure?"), "<|user|>\nSure?<|assistant|>\n"),
        ("chatml", "{}</call>", {"matched": "</call>"}, tool("ok"), "<|im_end|>\n<|im_start|>tool\nok"),
    ):
        context, tokenizer = conversation(template)
        prompt, _ = answer(context, tokenizer, text, **options)
        assert context.messages[-1]["content"] == text
        context.add(message)
        assert text_of(tokenizer, context.prompt_ids()[len(prompt) :]).startswith(text + added)


def test_results_are_grouped_as_the_template_groups_them() -> None:
    tools = [{"type": "function", "function": {"name": "count"}}]
    context, tokenizer = conversation("groups_tools", tools=tools)
    prompt, _ = answer(context, tokenizer, "<tool_call>a</tool_call><tool_call>b</tool_call>")
    assert '{"type": "function", "function": {"name": "count"}}' in text_of(tokenizer, prompt)
    context.add(tool("1"), tool("2"))
    results = "".join(f"\n<tool_response>\n{n}\n</tool_response>" for n in (1, 2))
    assert f"<|im_start|>user{results}<|im_end|>" in text_of(tokenizer, context.prompt_ids())
    answer(context, tokenizer, "Wait.")
    assert not context.forks
    del context.messages[-1]  # between two results, which are one group without it
    context.add(tool("3"))
    answer(context, tokenizer, "Three.")
    assert context.forks.total() == 1


@pytest.mark.parametrize(
    ("text", "options", "blocks"),
    [
        ("Three.", {}, 0),
        ("\nThree.\n", {}, 0),
        ("<think>\n\n</think>\n\nThree.", {}, 3),
        ("<think>Short.</think>Three.", {}, 0),
        ("Three.", {"template_kwargs": {"enable_thinking": False}}, 4),  # opened with an empty block
    ],
)
def test_white_space_and_empty_blocks_are_no_fork(text: str, options: dict[str, Any], blocks: int) -> None:
    """Qwen3 writes an empty thinking block into the last answer and none into earlier ones: a difference in text only,
    not in the sampled tokens."""
    context, tokenizer = conversation("drops_thinking", **options)
    for n in range(3):
        answer(context, tokenizer, text)
        context.add(tool(str(n)))
    assert text_of(tokenizer, context.prompt_ids()).count("<think>\n\n</think>") == blocks
    assert not context.forks


def test_fork_keeps_the_common_prefix_and_each_class_is_logged_once(caplog, monkeypatch):
    """A template that drops thinking from each answer forks in each turn; the prompt before the dropped answer stays as
    it was."""
    monkeypatch.setattr(forks, "_explained", set())
    with caplog.at_level(logging.INFO, logger="agl_slime.tokens.forks"):
        for _ in range(3):
            context, tokenizer = conversation("reasoner")
            first, _ = answer(context, tokenizer, "count\n</think>\n\nThree.")
            context.add(user("Sure?"))
            second, _ = answer(context, tokenizer, "sure\n</think>\n\nYes.")
    opening = tokenizer.encode("<｜Assistant｜><think>\n", add_special_tokens=False)
    assert second[: len(first) - len(opening)] == first[: -len(opening)]
    assert context.forks == {ForkReason.DROPPED_THINKING: 1}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "template" in caplog.text


def test_template_that_rewrites_the_beginning_forks_despite_equal_end() -> None:
    """The beginning changes with the number of messages, in a text of the same length."""
    first = "{{- '<|im_start|>system\\n' + ('short' if messages | length < 4 else 'long.') + '<|im_end|>\\n' }}"
    context, tokenizer = conversation(first + CHATML)
    answer(context, tokenizer, "Three.")
    context.add(user("Sure?"))
    prompt, _ = answer(context, tokenizer, "Yes.")
    assert text_of(tokenizer, prompt).startswith("<|im_start|>system\nlong.<|im_end|>")
    assert context.forks == {ForkReason.TEMPLATE: 1}


def long_rollout(context: ChatContext, tokenizer: Any, turns: int) -> None:
    for n in range(turns):
        answer(context, tokenizer, "<think>\nthought\n</think>\n\n" * (n % 3 > 0) + f"call {n}")
        context.add(*[tool(f"result {n}")] * (1 + (n % 5 == 4)))


@pytest.mark.parametrize(("template", "n_forks"), [("forgets_results", 36), ("drops_thinking", 0), ("role_markers", 0)])
def test_rendering_the_ends_gives_the_prompts_of_rendering_the_whole(template: str, n_forks: int) -> None:
    """Of a long conversation the ends are rendered, as far back as the template looks."""
    contexts = []
    for exact in (True, False):
        context, tokenizer = conversation(template)
        context._windows_exact = exact
        long_rollout(context, tokenizer, 40)
        contexts.append(context)
    ends, whole = contexts
    assert ends._windows_exact
    assert ends.forks == whole.forks == ({ForkReason.TEMPLATE: n_forks} if n_forks else {})
    assert ends.token_ids.tolist() == whole.token_ids.tolist()


def test_template_beyond_the_window_is_rendered_whole_once_noticed() -> None:
    """The fourth message disappears once there are more than 50: noticed when the conversation has doubled."""
    start, end = "{{- '<|im_start|>' + message.role", "'<|im_end|>\\n' }}"
    source = CHATML.replace(start, "{%- if not (loop.index0 == 3 and messages | length > 50) %}" + start, 1)
    context, tokenizer = conversation(source.replace(end, end + "{%- endif %}", 1))
    long_rollout(context, tokenizer, 45)
    assert context.forks == {ForkReason.TEMPLATE: 1}
    assert not context._windows_exact
    assert "result 0" not in text_of(tokenizer, context.token_ids)


@pytest.mark.parametrize(
    ("place", "text", "question", "kept_text", "reason"),
    [
        (-1, "Four.", True, "", ForkReason.EDITED_HISTORY),
        (0, "Be long.", True, None, ForkReason.EDITED_HISTORY),
        (-1, "First I count. Wait,", False, "First I count.", ForkReason.EDITED_HISTORY),
        # an answer that goes on, without its end
        (-1, f"{COUNTED} But", False, COUNTED, ForkReason.BRANCH),
    ],
)
def test_edits_fork_and_keep_the_sampled_ids_before_them(place, text, question, kept_text, reason):
    context, tokenizer = conversation("chatml")
    prompt, generation = answer(context, tokenizer, COUNTED)
    context.messages[place]["content"] = text
    if question:
        context.add(user("Sure?"))
    edited, _ = answer(context, tokenizer, " Yes.")
    if kept_text is not None:
        common = len(tokenizer.encode(kept_text, add_special_tokens=False))
        prefix = [*prompt, *generation.output_ids[:common]]
        assert edited[: len(prefix)] == prefix
    assert text in text_of(tokenizer, edited)
    assert context.forks == {reason: 1}


def test_going_back_keeps_the_ids_of_earlier_answers() -> None:
    context, tokenizer = conversation("chatml")
    first, generation = answer(context, tokenizer, "Three.")
    context.add(user("Sure?"))
    answer(context, tokenizer, "Yes.")
    del context.messages[3:]
    context.add(user("Really?"))
    prompt, _ = answer(context, tokenizer, "No.")
    history = [*first, *generation.output_ids]
    assert prompt[: len(history)] == history
    assert context.forks == {ForkReason.BRANCH: 1}


@pytest.mark.parametrize("finish", ["length", "abort"])
def test_truncated_answer_continues_with_its_tokens(finish: Any) -> None:
    context, tokenizer = conversation("chatml")
    empty, _ = answer(context, tokenizer, "", finish="abort")  # before the first token
    prompt, generation = answer(context, tokenizer, "Three or", finish=finish)
    assert (prompt, len(context.messages)) == (empty, 3)
    assert context.prompt_ids() == prompt + list(generation.output_ids)
    answer(context, tokenizer, " four.")
    assert context.messages[-1] == {"role": "assistant", "content": "Three or four."}
    assert not context.forks
    context.add(user("Sure?"))
    assert "assistant\nThree or four.<|im_end|>\n<|im_start|>user\nSure?" in text_of(tokenizer, context.prompt_ids())


def test_a_token_boundary_that_a_merge_might_cross_is_counted() -> None:
    context, tokenizer = conversation("bare", "qwen")
    answer(context, tokenizer, "Thre", finish="length")
    context.messages[-1]["content"] += "e apples"
    continued, _ = answer(context, tokenizer, " left.")
    assert continued[-2:] == tokenizer.encode("e apples", add_special_tokens=False)
    assert context.open_boundaries == 1


def test_without_a_template_text_is_verbatim_and_messages_are_refused() -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    made = (PreTrainedTokenizerFast(tokenizer_object=copy.deepcopy(base_tokenizer("anthropic"))) for _ in range(2))
    bare, begins = made
    begins.add_special_tokens({"bos_token": "<begin>"})
    begins._tokenizer.post_processor = TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", begins.convert_tokens_to_ids("<begin>"))]
    )
    for tokenizer in (bare, begins):
        text = "Once upon a time, there was  "
        context = ChatContext(template=chat_template(tokenizer), messages=[{"role": "text", "content": text}])
        prompt, generation = answer(context, tokenizer, " a king", finish="length")
        assert prompt == tokenizer.encode(text)
        context.add({"role": "text", "content": " who"})
        assert text_of(tokenizer, context.prompt_ids()).removeprefix("<begin>") == f"{text} a king who"
        assert context.prompt_ids()[: len(context.token_ids)] == [*prompt, *generation.output_ids]
        context.add(user("Why?"))
        with pytest.raises(PromptError, match=r"no chat template.*--model-path"):
            context.prompt_ids()
    assert prompt[0] == begins.convert_tokens_to_ids("<begin>")
    template = chat_template(bare, template_kwargs={"chat_template": "{{ messages[0].content }}"})
    assert template.render([{"role": "user", "content": "x"}], generation_prompt=False) == "x"


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
