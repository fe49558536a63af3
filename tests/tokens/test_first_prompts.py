"""The first prompt of a group is rendered and tokenized once, without an effect on its members."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.template import _MAX_KEY_BYTES, _MAX_PROMPTS, ChatTemplate, PromptCache
from tests.harness.chat_templates import CHATML
from tests.harness.conversations import answer
from tests.harness.vocabularies import chat_tokenizer

QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]


class Counting:
    """A tokenizer that counts its renderings."""

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


DATED = CHATML + "{{ strftime_now('%d %b') }}"


@pytest.mark.parametrize(
    ("source", "options"), [(DATED, {}), (None, {}), ({"default": CHATML}, {}), (CHATML, {"chat_template": DATED})]
)
def test_a_template_that_may_write_something_else_is_rendered_each_time(source: Any, options: dict[str, Any]) -> None:
    tokenizer: Any = Counting(chat_tokenizer("anthropic", "chatml"), source)
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
