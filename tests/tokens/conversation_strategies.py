"""Random conversations on real vocabularies and templates: arbitrary answers, tools, users, and an agent that edits,
backtracks and truncates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import strategies as st

from agl_slime.engine.client.generation import FinishReason, Generation
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.turn import Turn
from tests.harness.chat_templates import TEMPLATES

_PLAIN = (
    "the",
    " answer",
    " is",
    "42",
    "\n",
    "\n\n",
    "  ",
    " Größe",
    "漢字",
    "😀",
    "é",
    "def f(x):",
    "\t",
    " don't",
    "a" * 17,
)
_MARKUP = ("…", "<", "im_end", "|>", "</", "{", '"k": 1')
WORDS = _PLAIN + _MARKUP
phrase = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join)

Move = Literal["tool", "tools", "user", "repeat", "tip", "backtrack", "edit", "drop", "replace_answer"]
LINEAR: tuple[Move, ...] = ("tool", "tool", "tools", "user")
MOVES: tuple[Move, ...] = ("tool", *LINEAR, "user", "repeat", "tip", "backtrack", "edit", "drop", "replace_answer")


@dataclass
class Conversation:
    """A context that was driven through random turns, and what the engine recorded."""

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
        thought = draw(phrase)
        text = f"{thought}\n</think>\n\n{text}" if shape.opens_thinking else f"<think>\n{thought}\n</think>\n\n{text}"
    if draw(st.integers(0, 3)) == 0:
        text += '\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    if draw(st.booleans()):  # split where no tokenizer would
        cut = draw(st.integers(0, len(text)))
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


@st.composite
def conversations(
    draw: st.DrawFn,
    tokenizer: Any,
    template: str,
    *,
    allowed: tuple[Move, ...] = MOVES,
    min_turns: int = 1,
    max_turns: int = 5,
) -> Conversation:
    messages = [{"role": "user", "content": draw(phrase)}]
    if draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": draw(phrase)})
    tools = (
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
        if draw(st.booleans())
        else None
    )
    conversation = Conversation(ChatContext(template=ChatTemplate(tokenizer=tokenizer, tools=tools), messages=messages))
    ask(conversation, draw(answers(tokenizer, template)))
    for _ in range(draw(st.integers(min_turns - 1, max_turns - 1))):
        move(draw, conversation, allowed)
        ask(conversation, draw(answers(tokenizer, template)))
    return conversation
