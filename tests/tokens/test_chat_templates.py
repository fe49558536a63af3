"""Messages as templates accept them, typed errors with the template's reason, and the cache of first prompts."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agl_slime.errors import PromptError
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.rendering import direct_renderer
from agl_slime.tokens.template import _MAX_KEY_BYTES, _MAX_PROMPTS, ChatTemplate, PromptCache
from tests.harness.chat_templates import CHATML, SYSTEM_FIRST, TAKES_TURNS
from tests.harness.conversations import answer
from tests.harness.model_templates import Ways, template_of
from tests.harness.tokenizers import Rendering, small_tokenizer
from tests.harness.vocabularies import chat_tokenizer

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


def test_full_render_is_used_where_the_incremental_one_may_differ() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    plain = small_tokenizer(CHATML)
    assert callable(direct_renderer(plain, tools, {"enable_thinking": False}))
    same = CHATML + "{% if messages[0] is sameas messages[-1] %}same{% endif %}"
    renders: Any = Rendering(plain, prefix="mine: ")
    for why, tokenizer, listed, options in (
        ("renders by itself", renders, tools, {}),
        ("compares object identities", small_tokenizer(same), tools, {}),
        ("documents is an option", plain, tools, {"documents": []}),
        ("not plain JSON", plain, [{1: 2}], {}),
        ("not plain JSON", plain, tools, {"today": object()}),
        ("cannot be compiled", small_tokenizer("{% if %}"), tools, {}),
    ):
        assert why in str(direct_renderer(tokenizer, listed, options))
    assert ChatTemplate(tokenizer=renders).render([QUESTION], generation_prompt=True).startswith("mine: ")
    tuples: Any = {"role": "user", "content": "a", "extra": ("b",)}  # a list as JSON, and written with brackets
    assert rendered("{% for m in messages %}{{ m.extra }}{% endfor %}", tuples) == "('b',)"


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


# -- first prompts: rendered and tokenized once per group -------------------------------------------------------------


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]


@pytest.fixture
def counting() -> Any:
    return Rendering(chat_tokenizer("anthropic", "chatml"))


def test_a_group_renders_its_prompt_once_and_its_members_go_their_own_ways(counting: Any) -> None:
    template = ChatTemplate(tokenizer=counting)
    plain: Any = chat_tokenizer("anthropic", "chatml")
    alone = ChatContext(template=ChatTemplate(tokenizer=plain), messages=MESSAGES)
    members = [ChatContext(template=template, messages=MESSAGES) for _ in range(4)]
    assert not template.opens_thinking  # a probe, once per template
    counting.rendered = 0
    prompts = [member.prompt_ids() for member in members]
    assert counting.rendered == 2  # with the opening of an answer and without
    assert prompts == [alone.prompt_ids()] * 4
    prompts[0].append(7)  # a caller's list is its own
    assert members[1].prompt_ids() == alone.prompt_ids()
    for number, member in enumerate([*members[1:], alone]):
        answer(member, counting, f"It is {number}.")
        member.add({"role": "user", "content": "Sure?"})
    texts = [counting.decode(member.prompt_ids(), skip_special_tokens=False) for member in members[1:]]
    assert [f"It is {n}." in text for n, text in enumerate(texts)] == [True] * 3
    assert not any(member.forks for member in members)


def test_an_answer_begun_in_the_prompt_is_in_it_and_edits_stay_private(counting: Any) -> None:
    template = ChatTemplate(tokenizer=counting)
    begun = [*MESSAGES, {"role": "assistant", "content": "About"}]
    contexts = [ChatContext(template=template, messages=messages) for messages in (MESSAGES, begun, begun)]
    plain, first, second = (context.prompt_ids() for context in contexts)
    assert first == second == [*plain, *counting.encode("About", add_special_tokens=False)]
    contexts[0].messages[1]["content"] = "How few?"
    assert contexts[0].prompt_ids() != plain
    assert ChatContext(template=template, messages=MESSAGES).prompt_ids() == plain


DATED = CHATML + "{{ strftime_now('%d %b') }}"


@pytest.mark.parametrize(
    ("source", "options"), [(DATED, {}), (None, {}), ({"default": CHATML}, {}), (CHATML, {"chat_template": DATED})]
)
def test_a_template_that_may_write_something_else_is_rendered_each_time(source: Any, options: dict[str, Any]) -> None:
    tokenizer: Any = Rendering(chat_tokenizer("anthropic", "chatml"), source)
    assert ChatTemplate(tokenizer=tokenizer, template_kwargs=options).prompt_cache is None


def lookups(cache: PromptCache[int], contents: list[Any]) -> list[int]:
    """The cached number of each content; an absent one gets its index."""
    return [cache.get([{"content": content}], lambda n=n: n) for n, content in enumerate(contents)]


def test_messages_equal_in_python_but_not_to_a_template_are_distinct() -> None:
    class Shouting(str):
        def __str__(self) -> str:
            return self.upper()

    cache: PromptCache[int] = PromptCache()
    variants: list[Any] = [1, True, 1.0, "1", [1], (1,), {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    assert lookups(cache, variants * 2) == [*range(len(variants))] * 2
    assert lookups(cache, [Shouting("a")] * 2) == [0, 1]  # a user's type may render as anything: never cached
    assert lookups(cache, ["half \ud83d"] * 2) == [0, 0]


def test_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    cache: PromptCache[int] = PromptCache()

    def cached(number: int) -> bool:
        return cache.get([{"content": number}], lambda: -1) == number

    lookups(cache, [*range(_MAX_PROMPTS)])
    assert cached(0)  # used again: now the youngest
    lookups(cache, ["one more"])
    assert cached(0)
    assert not cached(1)
    half = [letter * (_MAX_KEY_BYTES // 2 - 30) for letter in "ab"]
    assert lookups(cache, half * 2) == [0, 1, 0, 1]
    assert not cached(0)  # there was no room for the rest
    assert 0 < sum(map(len, cache._results)) <= _MAX_KEY_BYTES
    assert lookups(cache, ["x" * _MAX_KEY_BYTES] * 2) == [0, 1]
    assert not cache._results


def test_threads_get_the_prompts_of_their_messages() -> None:
    cache: PromptCache[str] = PromptCache()
    together = threading.Barrier(4)

    def ask() -> list[str]:
        together.wait(10)
        names = [str(n % (2 * _MAX_PROMPTS)) for n in range(2_000)]
        return [name for name in names if cache.get([{"content": name}], lambda name=name: name) != name]

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(ask) for _ in range(4)]
        assert [future.result(30) for future in futures] == [[]] * 4
