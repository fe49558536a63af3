"""The first prompt of a group is rendered and tokenized once, and nobody can tell."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.template import _MAX_KEY_BYTES, _MAX_PROMPTS, ChatTemplate, PromptCache
from tests.harness.chat_templates import CHATML
from tests.harness.conversations import answer
from tests.harness.vocabularies import chat_tokenizer

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]


class Counting:
    """A tokenizer that counts what it is asked to render."""

    def __init__(self, tokenizer: Any, source: Any = CHATML) -> None:
        self._tokenizer = tokenizer
        self.chat_template = source
        self.rendered = 0

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        self.rendered += 1
        return self._tokenizer.apply_chat_template(conversation, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@pytest.fixture
def counting() -> Any:
    return Counting(chat_tokenizer("anthropic", "chatml"))


def test_a_group_renders_its_prompt_once_and_its_members_go_their_own_ways(counting: Any) -> None:
    template = ChatTemplate(tokenizer=counting)
    plain: Any = chat_tokenizer("anthropic", "chatml")
    alone = ChatContext(template=ChatTemplate(tokenizer=plain), messages=QUESTION)
    members = [ChatContext(template=template, messages=QUESTION) for _ in range(4)]
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


def test_an_answer_begun_in_the_prompt_is_a_part_of_it(counting: Any) -> None:
    template = ChatTemplate(tokenizer=counting)
    begun = [*QUESTION, {"role": "assistant", "content": "About"}]
    contexts = [ChatContext(template=template, messages=messages) for messages in (QUESTION, begun, begun)]
    plain, first, second = (context.prompt_ids() for context in contexts)
    assert first == second == [*plain, *counting.encode("About", add_special_tokens=False)]


def test_message_edited_after_the_prompt_does_not_change_others(counting: Any) -> None:
    template = ChatTemplate(tokenizer=counting)
    first = ChatContext(template=template, messages=QUESTION)
    expected = first.prompt_ids()
    first.messages[1]["content"] = "How few?"
    assert first.prompt_ids() != expected
    assert ChatContext(template=template, messages=QUESTION).prompt_ids() == expected


@pytest.mark.parametrize("source", [CHATML + "{{ strftime_now('%d %b') }}", None, {"default": CHATML}])
def test_a_template_that_may_write_something_else_is_asked_each_time(source: Any) -> None:
    tokenizer: Any = Counting(chat_tokenizer("anthropic", "chatml"), source)
    template = ChatTemplate(tokenizer=tokenizer)
    assert template.prompt_cache is None


def test_the_template_that_the_arguments_name_decides(counting: Any) -> None:
    dated = ChatTemplate(tokenizer=counting, template_kwargs={"chat_template": CHATML + "{{ strftime_now('%d') }}"})
    assert dated.prompt_cache is None


def test_messages_equal_in_python_but_not_to_a_template_are_distinct() -> None:
    class Shouting(str):
        def __str__(self) -> str:
            return self.upper()

    held: PromptCache[int] = PromptCache()
    variants: list[Any] = [1, True, 1.0, "1", [1], (1,), {"a": 1, "b": 2}, {"b": 2, "a": 1}]
    given = [held.get([{"content": variant}], lambda n=n: n) for n, variant in enumerate(variants)]
    assert given == list(range(len(variants)))
    assert [held.get([{"content": variant}], lambda: -1) for variant in variants] == given
    # a type of the user's own may say anything: it is asked each time
    assert [held.get([{"content": Shouting("a")}], lambda n=n: n) for n in range(2)] == [0, 1]


def test_a_text_cut_within_a_character_is_a_key_like_any_other() -> None:
    held: PromptCache[int] = PromptCache()
    assert [held.get([{"content": "half \ud83d"}], lambda n=n: n) for n in range(2)] == [0, 0]


def test_cache_is_bounded_and_evicts_the_least_recently_used() -> None:
    held: PromptCache[int] = PromptCache()

    def kept(number: int) -> bool:
        return held.get([{"content": number}], lambda: -1) == number

    for number in range(_MAX_PROMPTS):
        held.get([{"content": number}], lambda n=number: n)
    assert kept(0)  # used again: now the youngest
    held.get([{"content": "one more"}], lambda: 0)
    assert kept(0)
    assert not kept(1)
    half = [[{"content": letter * (_MAX_KEY_BYTES // 2 - 30)}] for letter in "ab"]
    assert [held.get(messages, lambda n=n: n) for n, messages in enumerate(half * 2)] == [0, 1, 0, 1]
    assert not kept(0)  # there was no room for the rest
    assert 0 < sum(map(len, held._results)) <= _MAX_KEY_BYTES
    longest = [{"content": "x" * _MAX_KEY_BYTES}]
    assert [held.get(longest, lambda n=n: n) for n in range(2)] == [0, 1]
    assert not held._results


def test_threads_get_the_prompts_of_their_messages() -> None:
    held: PromptCache[str] = PromptCache()
    wrong: list[str] = []
    together = threading.Barrier(4)

    def ask() -> None:
        together.wait(10)
        for n in range(2_000):
            name = str(n % (2 * _MAX_PROMPTS))
            if (got := held.get([{"content": name}], lambda name=name: name)) != name:
                wrong.append(got)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)
