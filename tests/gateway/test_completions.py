"""Completions: the engine is asked for the client's text in tokens, and the client receives the samples as text."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agl_slime.gateway.raw import RawContext, RawMatch
from agl_slime.tokens.attributes import MESSAGES_NEW
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import chat_template
from tests.gateway.protocols import delta_of, events_of
from tests.harness.gateway import TEMPLATE, Case, one_sample, post, serving, trained_once
from tests.harness.tokenizers import small_tokenizer

END = "<|im_end|>"


def complete(case: Case, prompt: Any, **fields: Any) -> dict[str, Any]:
    return post(case, "completions", **{"prompt": prompt, "max_tokens": 50, **fields})["choices"][0]


def prompt_ids(case: Case) -> list[list[int]]:
    return [payload["input_ids"] for payload in case.payloads]


def test_prompt_that_extends_the_whole_answer_is_one_sample() -> None:
    with serving("one two", "three") as case:
        first = complete(case, "Count: ", logprobs=1)
        assert first["text"] == "one two"
        tokens = first["logprobs"]["tokens"]
        text = "".join(tokens)
        assert text == f"one two{END}"
        for token, offset in zip(tokens, first["logprobs"]["text_offset"], strict=True):
            assert text[offset:].startswith(token)
        assert complete(case, f"Count: one two{END} and ")["text"] == "three"
        first_ids = case.turns[0].token_ids.tolist()
        assert prompt_ids(case)[1][: len(first_ids)] == first_ids
        assert case.tokenizer.decode(prompt_ids(case)[1]) == f"Count: one two{END} and "
        one_sample(case)


def test_the_members_of_a_group_share_the_ids_of_their_first_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    template, encoded = chat_template(small_tokenizer(TEMPLATE)), []
    encode = template.tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(template.tokenizer, "encode", counted)

    def first(text: str) -> list[int]:
        match = RawMatch([{"role": "text", "content": text}], 0, [], 0, None, None, None)
        return RawContext(template, match, []).prompt_ids()

    ids = first("Count: one two")
    ids.append(0)  # a member's change of its ids changes no other member's
    assert first("Count: one two") == ids[:-1]
    assert first("Count: two") != ids[:-1]
    assert encoded == ["Count: one two", "Count: two"]


def test_stop_token_omitted_by_the_client_is_not_sent_to_the_engine() -> None:
    with serving("one two", "three") as case:
        complete(case, "Count: ")
        complete(case, "Count: one two and ")
        without_stop = case.turns[0].token_ids.tolist()[:-1]
        assert prompt_ids(case)[1][: len(without_stop)] == without_stop
        assert case.tokenizer.decode(prompt_ids(case)[1]) == "Count: one two and "
        assert [turn.fork for turn in case.turns] == [None, ForkReason.TEMPLATE]
        trained_once(case.turns, case.segments)


def test_growing_prompts_share_one_buffer_and_spans_hold_only_new_text() -> None:
    count, prompts = 40, ["Count: "]
    with serving("one two") as case:
        for _ in range(count):
            prompts.append(prompts[-1] + complete(case, prompts[-1])["text"] + f"{END} and three ")
        written = sum(len(span.attributes.get(MESSAGES_NEW, "")) for span in case.spans)
        assert written < 6 * len(prompts[-1])  # a span with its whole prompt would make it twenty times as much
        for turn, prompt in zip(case.turns, prompts, strict=False):
            assert turn.messages is not None
            assert "".join(message["content"] for message in turn.messages) == prompt
        assert case.attempt._root is not None
        buffers = {id(turn.prompt_ids.base) for turn in case.attempt._root.turns[count // 2 :]}
        assert len(buffers) == 1
        trained_once(case.turns, case.segments)


def test_answer_cut_by_max_tokens_is_continued_in_one_sample() -> None:
    with serving("one two three four") as case:
        text = "Count: "
        for _ in range(3):
            text += complete(case, text, max_tokens=3)["text"]
        one_sample(case, 3)


def test_text_after_a_stop_sequence_continues_the_conversation() -> None:
    for between in ("\nObservation: 4\n", " = 4\n"):
        with serving("Action: 2 + 2\nObservation: made up", "Done.") as case:
            first = complete(case, "Q\n", stop=["\nObs"])
            assert first["text"] == "Action: 2 + 2"
            prompt = f"Q\n{first['text']}{between}"
            complete(case, prompt)
            assert case.tokenizer.decode(prompt_ids(case)[1]) == prompt
            trained_once(case.turns, case.segments)


def test_second_answer_to_one_prompt_is_continued_with_its_tokens() -> None:
    with serving("one", "two", "three") as case:
        for prompt in ("Say: ", "Say: ", f"Say: two{END}!"):
            complete(case, prompt)
        assert prompt_ids(case)[2][: case.turns[1].length] == case.turns[1].token_ids.tolist()
        assert len(case.segments) == 2
        trained_once(case.turns, case.segments)


def test_raw_text_stays_raw() -> None:
    for text in ("<think>a</think>\n\nFour.", "  <think>a b c", " Four. \n"):
        with serving(text, token_s=0.002) as case:
            assert complete(case, "2+2=")["text"] == text
            body = {"model": "m", "prompt": "2+2=", "max_tokens": 50, "stream": True}
            pieces = [*map(delta_of, events_of(httpx.post(f"{case.llm.endpoint}/completions", json=body)))]
            assert "".join(pieces) == text
            assert len(pieces) > 2


def test_prompt_ids_are_sent_as_they_are() -> None:
    """Ids that no tokenizer would give for their text."""
    with serving("one", "two") as case:
        ids = [i for character in "Count to two" for i in case.tokenizer.encode(character, add_special_tokens=False)]
        assert ids != case.tokenizer.encode("Count to two", add_special_tokens=False)
        complete(case, ids)
        longer = [*case.turns[0].token_ids.tolist(), *ids]
        complete(case, longer)
        assert prompt_ids(case) == [ids, longer]
        one_sample(case)
