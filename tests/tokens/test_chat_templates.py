"""Messages as templates accept them, typed errors with the template's reason, the cache of first prompts, and answers
in parts: the fields that a template reads, its treatment of thinking and calls."""

import copy
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import PromptError
from agl_slime.gateway.protocol import Protocol
from agl_slime.tokens import forks
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.rendering import _MARK, direct_renderer
from agl_slime.tokens.template import _MAX_KEY_BYTES, _MAX_PROMPTS, ChatTemplate, PromptCache
from agl_slime.tokens.thinking import thinking_arguments
from tests.harness.chat_templates import CHATML, DROPS_THINKING, ENDS_WITH_TOKEN, SYSTEM_FIRST, TAKES_TURNS
from tests.harness.conversations import answer, text_of
from tests.harness.model_templates import MODELS, Ways, template_of
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


_KEYS = (
    "{% for m in messages %}{{ m.items() | length }}{{ m.get('role') }}{{ m['mine'] }}{{ m.mine }}{{ m.none }}"
    "{{ m.content.upper() }}{{ (loop.previtem or m).role }}{{ loop.cycle('a', 'b') }}{{ loop.index0 }}"
    "{{ m.__class__ is defined }}{{ loop._length is defined }}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "at_once"),
    [
        (CHATML, True),
        (DROPS_THINKING, True),
        (_KEYS, True),
        (ENDS_WITH_TOKEN, False),
        (CHATML + "end", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ '!' }}", True),
        ("{% if add_generation_prompt %}!{% endif %}" + CHATML, False),
        ("{% for m in messages %}{% if loop.last and add_generation_prompt %}!{% endif %}{% endfor %}", False),
    ],
)
def test_one_rendering_has_text_and_generation_prompt_where_it_can(source: str, at_once: bool) -> None:
    tokenizer, messages = small_tokenizer(source), [QUESTION, {**ANSWER, "mine": "key"}, QUESTION]
    render: Any = direct_renderer(tokenizer, None, {})
    apply = tokenizer.apply_chat_template
    closed, whole = (apply(messages, tokenize=False, add_generation_prompt=prompting) for prompting in (False, True))
    assert (render(messages, False), render(messages, True)) == (closed, whole)
    closed = closed.removesuffix("!")  # a generation prompt that the template always writes
    assert render.parts(messages) == ((closed, whole.removeprefix(closed)) if at_once else None)
    assert at_once is (render.parts([{**QUESTION, "content": f"x{_MARK.upper()}"}]) is not None)
    assert render.parts([{**QUESTION, "content": f"{_MARK}"}]) is None or source is _KEYS


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


# as Gemma's: another token ends an answer with calls, and content is written behind them
ENDS_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "{{ m.content }}{{ '<|results|>' if m.tool_calls else '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# as DeepSeek V4's: of thinking before the last question the end alone is written
LEAVES_THE_END = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last %}<think>{{ m.reasoning_content or '' }}{% endif %}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)

# as DeepSeek R1's: of answers with calls only the first has its content, with thinking
WRITES_ONE_CONTENT = (
    "{% set ns = namespace(called=false) %}{% for m in messages %}"
    "{% if not (m.tool_calls and ns.called) %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% set ns.called = true %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# as Mistral Nemo's: the system message is in the last message, if that is the user's
SYSTEM_LAST = (
    "{% for m in messages[1:] %}<|im_start|>{{ m.role }}\n"
    "{{ messages[0].content if loop.last and m.role == 'user' }}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# as gpt-oss's: marks of channels in content are refused
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if '<|message|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}"
    "<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if m.role == 'assistant' and loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ASK, THEN = [{"role": "user", "content": "?"}], {"role": "user", "content": "And then?"}
RESULT = {"role": "tool", "tool_call_id": "call_0", "content": "one"}


def context_of(template: str, *tokens: str, messages: Any = ASK, **options: Any) -> tuple[ChatContext, Any]:
    """A conversation under a template, and its tokenizer with further special tokens."""
    tokenizer = copy.deepcopy(small_tokenizer(template))
    tokenizer.add_tokens([*tokens], special_tokens=True)
    return ChatContext(template=ChatTemplate(tokenizer=tokenizer, **options), messages=messages), tokenizer


@pytest.mark.parametrize("place", [2, 14])  # a result; the answer to the second question
def test_content_that_a_template_moves_stays_where_it_was_sampled(place: int) -> None:
    """A prompt that forks is the template's own, with the content behind the results."""
    context, tokenizer = context_of(template_of(MODELS["Gemma 4"]), tools=TOOLS)
    for number in range(12):
        prompt, _ = answer(context, tokenizer, f"I look {number}.\n{CALL}")
        assert (context.fork, text_of(tokenizer, prompt).count("I look")) == (None, number)
        context.add({"role": "tool", "tool_call_id": "call_0", "content": "one"}, *[THEN] * (number == 5))
    result = "<tool_response>one</tool_response>"
    assert text_of(tokenizer, context.prompt_ids()).endswith(f"I look 11.\n{CALL}<|im_end|>{result}")
    context.messages[place] = {**context.messages[place], "content": "two"}
    for fork in (ForkReason.EDITED_HISTORY, None):
        prompt, _ = answer(context, tokenizer, f"I look again.\n{CALL}")
        assert context.fork is fork
        text = text_of(tokenizer, prompt)
        assert f"I look 0.\n{CALL}<|im_end|><tool_response>{'two' if place == 2 else 'one'}</tool_response>" in text
        assert f"{CALL}<|im_end|>{result}I look 11.<|im_end|>\n" in text
        context.add({"role": "tool", "tool_call_id": "call_0", "content": "one"})
    assert text.endswith(f"I look again.\n{CALL}<|im_end|>{result}")


@pytest.mark.parametrize("rest", ["", "Then", '<tool_call>\n{"name": "wea'])
def test_answer_truncated_after_a_call_is_closed_as_the_template_does(rest: str) -> None:
    context, tokenizer = context_of(ENDS_CALLS, "<|results|>", tools=TOOLS)
    first, generation = answer(context, tokenizer, CALL + rest, finish="length")
    context.add(THEN)
    ids = [*first, *generation.output_ids]
    following = context.prompt_ids()
    assert following[: len(ids)] == ids
    added = "<|results|><|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(following[len(ids) :]) == added


@pytest.mark.parametrize(
    ("source", "said", "following", "kept", "fork"),
    [
        (LEAVES_THE_END, ["So Rome.</think>Rome."], THEN, "assistant\n</think>Rome.", ForkReason.DROPPED_THINKING),
        (WRITES_ONE_CONTENT, [f"t\n</think>\n\nI look.{CALL}"] * 2, RESULT, "t\n</think>", ForkReason.DROPPED_THINKING),
        (SYSTEM_LAST, ["Rome."], RESULT, "user\n?<|im_end|>", ForkReason.TEMPLATE),
    ],
)
def test_a_fork_is_of_dropped_thinking_if_the_template_drops_any(source, said, following, kept, fork):
    context, tokenizer = context_of(source, messages=[SYSTEM, *ASK], tools=TOOLS)
    for text in said:
        answer(context, tokenizer, text)
        context.add(following)
    prompt, _ = answer(context, tokenizer, "Yes.")
    assert text_of(tokenizer, prompt).count(kept) == 1
    assert context.forks == {fork: 1}


@pytest.mark.parametrize("options", [{"stop": "<|return|>"}, {"finish": "length"}])
def test_an_answer_in_a_channel_is_content_without_its_marks(options: Any) -> None:
    context, tokenizer = context_of(CHANNELS, "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    answer(context, tokenizer, "<|channel|>final<|message|>Rome.", **options)
    context.add(THEN)
    prompt, _ = answer(context, tokenizer, "<|channel|>final<|message|>Oslo.", **options)
    assert context.fork is None
    end = options.get("stop", "<|end|>")
    assert tokenizer.decode(prompt) == (
        f"<|start|>user<|message|>?<|end|><|start|>assistant<|channel|>final<|message|>Rome.{end}"
        "<|start|>user<|message|>And then?<|end|><|start|>assistant"
    )


def in_fields(source: str, text: str) -> dict[str, Any]:
    template = ChatTemplate(tokenizer=small_tokenizer(source), tools=TOOLS)
    return template.fields.convert(text, template.reader).message


def test_answer_parts_are_in_the_fields_that_the_template_reads() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    text = f"<think>\nLet me see.\n</think>\n\nI look.\n{CALL}"
    renamed = template_of(Ways()).replace("reasoning_content", "deep_thoughts")
    for source, name in ((template_of(Ways(reads="field")), "reasoning_content"), (renamed, "deep_thoughts")):
        assert in_fields(source, text) == {
            "role": "assistant",
            "content": "I look.",
            name: "Let me see.",
            "tool_calls": [call],
        }
    assert in_fields(CHATML, text) == {"role": "assistant", "content": text}  # it knows of neither
    ended = in_fields(template_of(Ways(thinking="none")), f"<think>\nLet me see.\n{CALL}</think>I look.")  # by the call
    assert (ended["content"], ended["tool_calls"]) == ("<think>\nLet me see.</think>\n\nI look.", [call])
    two = f"{CALL}\n{CALL}"
    assert len(in_fields(template_of(Ways()), two)["tool_calls"]) == 2
    assert in_fields(template_of(Ways(calls="one")), two) == {"role": "assistant", "content": two}


def test_a_fork_of_dropped_thinking_names_the_argument_that_keeps_it(caplog, monkeypatch):
    monkeypatch.setattr(forks, "_explained", set())
    source = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.reasoning_content and ((keep_thinking is defined and keep_thinking) or loop.last) %}"
        "{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}{{- m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    for kwargs, reasons in (({}, {ForkReason.DROPPED_THINKING: 1}), ({"keep_thinking": True}, {})):
        context, tokenizer = context_of(source, template_kwargs=kwargs)
        answer(context, tokenizer, "<think>\nLet me count.\n</think>\n\nThree.")
        context.add(THEN)
        answer(context, tokenizer, "Yes.")
        assert context.forks == reasons
    assert "The template argument keep_thinking=true keeps it." in caplog.text


def test_an_answer_cut_within_its_thinking_is_closed_as_the_template_does() -> None:
    context, tokenizer = context_of(template_of(MODELS["Qwen3.8"]))
    answer(context, tokenizer, "I thought", finish="length")
    context.add(THEN)
    second, _ = answer(context, tokenizer, "so\n</think>\n\nDone.")
    assert context.fork is None
    messages = [*ASK, {"role": "assistant", "content": "", "reasoning_content": "I thought"}, THEN]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text_of(tokenizer, second) == whole


def test_reminder_after_a_tool_result_keeps_thinking_unlike_a_question() -> None:
    """As on Qwen3.5, which takes a user's message for a new question."""
    call = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    reminder = {"role": "system", "content": "Keep going."}
    for later, fork, place in (
        ("in_place", None, "<tool_response>\none\n\nKeep going.\n</tool_response>"),
        ("user", ForkReason.DROPPED_THINKING, "<|im_start|>user\nKeep going.<|im_end|>"),
        ("first", ForkReason.TEMPLATE, "Be brief.\n\nKeep going.<|im_end|>"),
    ):
        options: Any = {"tools": TOOLS, "later_systems": later, "messages": MESSAGES}
        context, tokenizer = context_of(template_of(MODELS["Qwen3.5"]), **options)
        answer(context, tokenizer, f"t\n</think>\n\n{call}")
        context.add({"role": "tool", "content": "one"}, reminder)
        prompt, _ = answer(context, tokenizer, "t\n</think>\n\nDone.")
        assert context.fork is fork, later
        assert place in text_of(tokenizer, prompt)


REAL = os.environ.get("AGL_SLIME_CHAT_TEMPLATES", "")
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_KNOWN = "{{ raise_exception('unknown') if reasoning_effort is defined and reasoning_effort not in "
WAYS = {
    "flag": "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
    "off by default": "{% if thinking is defined and thinking %}<think>{% else %}</think>{% endif %}",
    "flag for off": "{% if skip_thinking is defined and skip_thinking %}<think></think>{% endif %}",
    "any word": "Reasoning: {{ reasoning_effort or 'medium' }}",
    "three words": _KNOWN + "('low', 'medium', 'xhigh') }}{{ reasoning_effort or 'xhigh' }}",
    "word for off": _KNOWN + "('no_think', 'low', 'high') }}{{ reasoning_effort or 'no_think' }}",
    "flag of a level": "{{ 'brief' if low_effort is defined and low_effort }}",
    "one word": "{{ 'more' if reasoning_effort is defined and reasoning_effort == 'max' }}",
    "budget": "{% set n = thinking_budget if thinking_budget is defined else -1 %}{{ '' if n == -1 else n or 'none' }}",
    "always": "<think>\n",
    "never": "",
}
OFF, ON, ADAPTIVE = ({"thinking": {"type": kind}} for kind in ("disabled", "enabled", "adaptive"))


def effort(level: str) -> dict[str, Any]:
    return {"reasoning_effort": level}


SERVED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("flag", OFF, {"enable_thinking": False}),
    ("flag", {"thinking": {"type": "enabled", "budget_tokens": 0}}, {"enable_thinking": False}),
    ("flag", effort("none"), {"enable_thinking": False}),
    ("flag", {"reasoning": {"effort": "none"}}, {"enable_thinking": False}),
    ("flag", {"reasoning": {"enabled": False}}, {"enable_thinking": False}),
    ("flag", {**OFF, "output_config": {"effort": "high"}}, {"enable_thinking": False}),
    ("flag", {**ADAPTIVE, "output_config": {"effort": "low"}}, {}),
    ("flag", effort("auto"), {}),
    ("off by default", effort("minimal"), {"thinking": True}),
    ("off by default", ADAPTIVE, {"thinking": True}),
    ("off by default", OFF, {}),
    ("flag for off", OFF, {"skip_thinking": True}),
    ("flag for off", ON, {}),
    *(
        ("any word", effort(level), {"reasoning_effort": word})
        for level, word in (("none", "low"), ("minimal", "low"), ("high", "high"), ("max", "high"))
    ),
    ("any word", effort("medium"), {}),
    ("three words", {"output_config": {"effort": "minimal"}}, {"reasoning_effort": "low"}),
    ("three words", {"reasoning": {"effort": "medium"}}, {"reasoning_effort": "medium"}),
    ("three words", effort("high"), {}),
    ("word for off", effort("medium"), {"reasoning_effort": "high"}),
    ("word for off", ON, {"reasoning_effort": "high"}),
    ("word for off", OFF, {}),
    ("flag of a level", effort("minimal"), {"low_effort": True}),
    ("flag of a level", effort("high"), {}),
    ("one word", effort("xhigh"), {"reasoning_effort": "max"}),
    ("budget", {"thinking": {"type": "enabled", "budget_tokens": 512}}, {"thinking_budget": 512}),
    ("budget", {"reasoning": {"max_tokens": 512}}, {"thinking_budget": 512}),
    ("budget", OFF, {"thinking_budget": 0}),
    ("budget", ON, {}),
    ("always", ON, {}),
]
INEFFECTIVE: list[tuple[str, dict[str, Any], set[str]]] = [
    ("flag", effort("telepathy"), {"reasoning_effort"}),
    ("flag of a level", effort("medium"), {"reasoning_effort"}),
    ("one word", effort("low"), {"reasoning_effort"}),
    ("always", OFF, {"thinking"}),
    ("always", {**ADAPTIVE, "output_config": {"effort": "low"}}, {"output_config"}),
    ("never", {**ADAPTIVE, "output_config": {"effort": "low"}}, {"thinking", "output_config"}),
    ("never", {"reasoning": {"effort": "high", "summary": "auto"}}, {"reasoning"}),
]


def arguments(source: str, body: dict[str, Any], **kwargs: Any) -> tuple[dict[str, Any], set[str]]:
    tokenizer = small_tokenizer(source)
    template = ChatTemplate(tokenizer=tokenizer, template_kwargs=kwargs)
    served, ineffective = thinking_arguments(template, Protocol.thinking_request(body))
    return served, {*ineffective}


@pytest.mark.parametrize(("way", "body", "served"), SERVED)
def test_a_request_to_think_sets_the_templates_argument(way: str, body: dict[str, Any], served: dict[str, Any]):
    assert arguments(TURNS + WAYS[way], body) == (served, set())


@pytest.mark.parametrize(("way", "body", "fields"), INEFFECTIVE)
def test_a_request_that_the_template_cannot_serve_is_named(way: str, body: dict[str, Any], fields: set[str]) -> None:
    assert arguments(TURNS + WAYS[way], body) == ({}, fields)


def test_the_runs_argument_is_not_changed_by_a_request() -> None:
    aliases = "{% set thinking = thinking if thinking is defined else enable_thinking %}" + WAYS["off by default"]
    for way, body, kwargs in (
        (aliases, effort("high"), {"enable_thinking": False}),
        (WAYS["any word"], effort("high"), {"reasoning_effort": "low"}),
    ):
        assert arguments(TURNS + way, body, **kwargs) == ({}, {"reasoning_effort"})
    assert arguments(TURNS + WAYS["flag"], OFF, enable_thinking=False) == ({}, set())


PUBLISHED: list[tuple[str, dict[str, Any], dict[str, Any] | None]] = [
    ("qwen3", OFF, {"enable_thinking": False}),
    ("qwen3.8", effort("medium"), {"reasoning_effort": "medium"}),
    ("qwen3.8", effort("minimal"), {"reasoning_effort": "low"}),
    ("glm-4.5", effort("none"), {"enable_thinking": False}),
    ("kimi-k2.5", OFF, {"thinking": False}),
    ("deepseek-v3.1", ADAPTIVE, {"thinking": True}),
    ("deepseek-v4", effort("max"), {"thinking": True, "reasoning_effort": "max"}),
    ("gpt-oss", effort("xhigh"), {"reasoning_effort": "high"}),
    ("nemotron-3-super", effort("low"), {"low_effort": True}),
    ("nemotron-3-ultra", effort("medium"), {"medium_effort": True}),
    ("hunyuan-3", ON, {"reasoning_effort": "high"}),
    ("seed-oss", {"thinking": {"type": "enabled", "budget_tokens": 512}}, {"thinking_budget": 512}),
    ("gemma-4", ON, {"enable_thinking": True}),
    ("smollm3", OFF, {"enable_thinking": False}),
    ("minimax-m2", OFF, None),
    ("llama-3.1", effort("low"), None),
]


@pytest.mark.slow
@pytest.mark.skipif(not REAL, reason="AGL_SLIME_CHAT_TEMPLATES names no directory of models' own *.jinja files")
@pytest.mark.parametrize(("model", "body", "served"), PUBLISHED)
def test_published_templates_have_these_arguments(model: str, body: dict[str, Any], served: dict[str, Any] | None):
    source = (Path(REAL) / f"{model}.jinja").read_text(encoding="utf-8")
    assert arguments(source, body) == ({}, {*body}) if served is None else arguments(source, body) == (served, set())
