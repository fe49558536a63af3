"""Messages as templates accept them: system messages at their place, and a typed error with the template's reason."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from agl_slime.errors import PromptError
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.rendering import direct_renderer
from agl_slime.tokens.template import ChatTemplate
from tests.harness.chat_templates import CHATML, SYSTEM_FIRST, TAKES_TURNS
from tests.harness.conversations import answer
from tests.harness.model_templates import Ways, template_of
from tests.harness.tokenizers import small_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Use tools."}
QUESTION = {"role": "user", "content": "How many?"}
ANSWER = {"role": "assistant", "content": "Three."}


def rendered(template: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(tokenizer=small_tokenizer(template), **options).render(messages, generation_prompt=True)


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@pytest.mark.parametrize("template", [SYSTEM_FIRST, TAKES_TURNS])
@pytest.mark.parametrize(
    "messages",
    [(SYSTEM, DEVELOPER, QUESTION), (DEVELOPER, SYSTEM, QUESTION), (SYSTEM, QUESTION, ANSWER, DEVELOPER, QUESTION)],
)
def test_system_messages_are_one_where_a_template_wants_one(template: str, messages: tuple[Any, ...]) -> None:
    systems = [message["content"] for message in messages if message["role"] in ("system", "developer")]
    rest = [message for message in messages if message["role"] not in ("system", "developer")]
    merged = {"role": "system", "content": "\n\n".join(systems)}
    assert rendered(template, *messages, later_systems="first") == rendered(template, merged, *rest)


@pytest.mark.parametrize("template", [SYSTEM_FIRST, TAKES_TURNS])
def test_a_later_system_message_is_a_users_where_it_stands(template: str) -> None:
    reminder = {"role": "system", "content": "Be long."}
    text = rendered(template, SYSTEM, QUESTION, ANSWER, reminder, QUESTION)
    assert text.count("<|im_start|>system") + text.count("Be brief.") == (2 if template is SYSTEM_FIRST else 1)
    apart = "<|im_end|>\n<|im_start|>user\n" if template is SYSTEM_FIRST else "\n\n"
    assert f"<|im_start|>user\nBe long.{apart}How many?<|im_end|>" in text


def test_reminder_is_appended_to_a_tool_result_if_a_user_turn_is_refused() -> None:
    result = {"role": "tool", "tool_call_id": "call_0", "content": "one"}
    reminder = {"role": "system", "content": "Be long."}
    template = template_of(Ways(system="refused", alternate=True))
    assert "one\n\nBe long.<|im_end|>" in rendered(template, SYSTEM, QUESTION, calling({}), result, reminder)


def test_later_system_messages_are_unchanged_if_the_template_accepts_them() -> None:
    text = rendered(CHATML, SYSTEM, QUESTION, ANSWER, DEVELOPER, QUESTION)
    assert text.index("Three.") < text.index("<|im_start|>developer\nUse tools.")
    assert rendered(SYSTEM_FIRST, DEVELOPER, QUESTION).startswith("<|im_start|>system\nUse tools.")


def test_arguments_are_objects_but_where_a_template_can_only_write_text() -> None:
    messages = (QUESTION, calling({"x": "é", "n": {"y": 1e10}}))
    assert '<tool_call>f\n{"x": "é", "n": {"y": 10000000000.0}}' in rendered(template_of(Ways(calls="text")), *messages)
    assert "<parameter=x>\né\n</parameter>\n<parameter=n>\n{" in rendered(template_of(Ways(calls="items")), *messages)


def test_a_system_message_in_the_middle_forks_only_where_it_is_to_be_first() -> None:
    first: Any = {"later_systems": "first"}
    for template, options, fork in (
        (SYSTEM_FIRST, {}, None),
        (SYSTEM_FIRST, first, ForkReason.TEMPLATE),
        (CHATML, first, None),
    ):
        tokenizer = small_tokenizer(template)
        context = ChatContext(template=ChatTemplate(tokenizer=tokenizer, **options), messages=[SYSTEM, QUESTION])
        answer(context, tokenizer, "Three.")
        context.add({"role": "system", "content": "Now be long."}, QUESTION)
        prompt, _ = answer(context, tokenizer, "Three, as I said.")
        assert context.fork is fork
        assert tokenizer.decode(prompt).count("Now be long.") == 1


@pytest.mark.parametrize(
    ("template", "messages", "sentence"),
    [
        (SYSTEM_FIRST, [QUESTION, {"role": "critic", "content": "No."}], "Unexpected message role."),
        (TAKES_TURNS, [QUESTION, QUESTION], "Conversation roles must alternate"),
        (SYSTEM_FIRST, [QUESTION, calling('{"x": '), QUESTION], "Can only get item pairs from a mapping"),
        (CHATML, [QUESTION, {"role": "user", "content": {"x": 1}}], "can only concatenate str"),
        ("{{ messages | nothing }}", [QUESTION], "nothing"),
    ],
)
def test_template_error_is_a_prompt_error_with_its_message(template: str, messages: Any, sentence: str) -> None:
    context = ChatContext(template=ChatTemplate(tokenizer=small_tokenizer(template)), messages=messages)
    with pytest.raises(PromptError, match=sentence):
        context.prompt_ids()


def test_half_a_character_is_the_replacement_character_to_the_model() -> None:
    tokenizer = small_tokenizer(CHATML)
    question = {"role": "user", "content": "Größe of \udcff and \ud83d\ude00?"}
    context = ChatContext(template=ChatTemplate(tokenizer=tokenizer), messages=[question])
    assert "Größe of \ufffd and 😀?" in tokenizer.decode(context.prompt_ids())


class _Renders:
    """A tokenizer that renders by itself."""

    def __init__(self, template: str) -> None:
        self._tokenizer = small_tokenizer(template)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        return "mine: " + self._tokenizer.apply_chat_template(conversation, **kwargs)


def test_full_render_is_used_where_the_incremental_one_may_differ() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert callable(direct_renderer(small_tokenizer(CHATML), tools, {"enable_thinking": False}))
    same = CHATML + "{% if messages[0] is sameas messages[-1] %}same{% endif %}"
    for why, tokenizer, listed, options in (
        ("renders by itself", _Renders(CHATML), tools, {}),
        ("compares object identities", small_tokenizer(same), tools, {}),
        ("documents is an option", small_tokenizer(CHATML), tools, {"documents": []}),
        ("not plain JSON", small_tokenizer(CHATML), [{1: 2}], {}),
        ("not plain JSON", small_tokenizer(CHATML), tools, {"today": object()}),
        ("cannot be compiled", small_tokenizer("{% if %}"), tools, {}),
    ):
        assert why in str(direct_renderer(tokenizer, listed, options))
    template = ChatTemplate(tokenizer=cast("Any", _Renders(CHATML)))
    assert template.render([QUESTION], generation_prompt=True).startswith("mine: ")
    tuples: Any = {"role": "user", "content": "a", "extra": ("b",)}  # a list as JSON, and written with brackets
    shows = "{% for m in messages %}{{ m.extra }}{% endfor %}"
    assert rendered(shows, tuples) == "('b',)"


def test_a_schema_is_written_as_json_once_for_each_way_of_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [True, "é"]}}}]
    source = "{% for t in tools %}{{ t | tojson }}{{ t.function | tojson(indent=1) }}{{ t }}{% endfor %}"
    source += "{{ messages | length }}"
    template = ChatTemplate(tokenizer=small_tokenizer(source), tools=tools)
    first = template.render([QUESTION], generation_prompt=True)
    function = tools[0]["function"]
    indented = json.dumps(function, ensure_ascii=False, indent=1)
    assert first == f"{json.dumps(tools[0], ensure_ascii=False)}{indented}{tools[0]}1"
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("written again"))
    assert template.render([QUESTION, ANSWER], generation_prompt=True) == first[:-1] + "2"
