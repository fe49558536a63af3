"""What templates take: system messages where they want them, and a typed error that says why where they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from agl_slime.errors import PromptError
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import ChatTemplate
from tests.chat_templates import CHATML, SYSTEM_FIRST, TAKES_TURNS
from tests.conversations import answer
from tests.model_templates import Ways, template_of
from tests.trace_tokenizers import small_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Use tools."}
QUESTION = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Three."}


def rendered(template: str, *messages: dict[str, Any], opening: bool = True) -> str:
    return ChatTemplate(tokenizer=small_tokenizer(template)).render(messages, opening=opening)


@pytest.mark.parametrize("template", [SYSTEM_FIRST, TAKES_TURNS])
@pytest.mark.parametrize(
    "messages",
    [(SYSTEM, DEVELOPER, QUESTION), (DEVELOPER, SYSTEM, QUESTION), (SYSTEM, QUESTION, ANSWER, DEVELOPER, QUESTION)],
)
def test_system_messages_are_one_where_a_template_wants_one(template: str, messages: tuple[Any, ...]) -> None:
    said = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    others = [message for message in messages if message["role"] not in ("system", "developer")]
    merged = {"role": "system", "content": "\n\n".join(said)}
    assert rendered(template, *messages) == rendered(template, merged, *others)


def test_a_template_that_writes_system_messages_anywhere_gets_them_as_they_are() -> None:
    text = rendered(CHATML, SYSTEM, QUESTION, ANSWER, DEVELOPER, QUESTION)
    assert text.index("Three.") < text.index("<|im_start|>developer\nUse tools.")


def test_a_developers_message_is_the_systems_where_a_template_knows_only_that() -> None:
    assert rendered(SYSTEM_FIRST, DEVELOPER, QUESTION).startswith("<|im_start|>system\nUse tools.")


def test_arguments_are_objects_but_where_a_template_can_only_write_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": "é", "n": {"y": 1e10}}}}
    messages = (QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]})
    assert '<tool_call>f\n{"x": "é", "n": {"y": 10000000000.0}}' in rendered(template_of(Ways(calls="text")), *messages)
    assert "x=é\nn={" in rendered(template_of(Ways(calls="items")), *messages)


def test_a_system_message_in_the_middle_forks_where_it_has_to_stand_first_and_not_elsewhere() -> None:
    for template, fork in ((SYSTEM_FIRST, ForkReason.TEMPLATE), (CHATML, None)):
        tokenizer = small_tokenizer(template)
        context = ChatContext(template=ChatTemplate(tokenizer=tokenizer), messages=[SYSTEM, QUESTION])
        answer(context, tokenizer, "Three.")
        context.add({"role": "system", "content": "Now be long."}, QUESTION)
        prompt, _ = answer(context, tokenizer, "Three, as I said.")
        assert context.fork is fork
        assert tokenizer.decode(prompt).count("Now be long.") == 1


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (SYSTEM_FIRST, [QUESTION, {"role": "critic", "content": "No."}], "Unexpected message role."),
        (TAKES_TURNS, [QUESTION, QUESTION], "Conversation roles must alternate"),
        (
            SYSTEM_FIRST,
            [QUESTION, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": '}}]}, QUESTION],
            "Can only get item pairs from a mapping",
        ),
        (CHATML, [QUESTION, {"role": "user", "content": {"x": 1}}], "can only concatenate str"),
        ("{{ messages | nothing }}", [QUESTION], "nothing"),
    ],
)
def test_what_a_template_refuses_is_a_typed_error_with_its_words(template: str, messages: Any, said: str) -> None:
    context = ChatContext(template=ChatTemplate(tokenizer=small_tokenizer(template)), messages=messages)
    with pytest.raises(PromptError, match=said):
        context.prompt_ids()


def test_half_a_character_is_the_replacement_character_to_the_model() -> None:
    tokenizer = small_tokenizer(CHATML)
    question = {"role": "user", "content": "Größe of \udcff and \ud83d\ude00?"}
    context = ChatContext(template=ChatTemplate(tokenizer=tokenizer), messages=[question])
    assert "Größe of \ufffd and 😀?" in tokenizer.decode(context.prompt_ids())
