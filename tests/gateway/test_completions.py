"""Completions: the engine is asked what the client sent, in tokens, and the client gets what was sampled, as text."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from agl_slime.gateway.raw import RawContext, RawMatch
from agl_slime.tokens.attributes import MESSAGES_NEW
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.template import chat_template
from tests.harness.gateway import TEMPLATE, Case, serving, trained_once
from tests.harness.tokenizers import small_tokenizer

END = "<|im_end|>"


def complete(case: Case, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 50, **more}
    answer = httpx.post(f"{case.llm.endpoint}/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def asked(case: Case) -> list[list[int]]:
    return [payload["input_ids"] for payload in case.payloads]


def test_prompt_that_extends_the_whole_answer_is_one_sample() -> None:
    with serving("one two", "three") as case:
        first = complete(case, "Count: ", logprobs=1)
        assert first["text"] == "one two"
        assert "".join(first["logprobs"]["tokens"]) == f"one two{END}"
        assert complete(case, f"Count: one two{END} and ")["text"] == "three"
        turns = case.turns
        held = turns[0].token_ids.tolist()
        assert asked(case)[1][: len(held)] == held
        assert case.tokenizer.decode(asked(case)[1]) == f"Count: one two{END} and "
        assert [turn.fork for turn in turns] == [None, None]
        assert len(case.segments) == 1
        trained_once(turns, case.segments)


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
    ids.append(0)  # what one does with its own changes nobody else's
    assert first("Count: one two") == ids[:-1]
    assert first("Count: two") != ids[:-1]
    assert encoded == ["Count: one two", "Count: two"]


def test_stop_token_omitted_by_the_client_is_not_sent_to_the_engine() -> None:
    with serving("one two", "three") as case:
        complete(case, "Count: ")
        complete(case, "Count: one two and ")
        turns = case.turns
        kept = turns[0].token_ids.tolist()[:-1]
        assert asked(case)[1][: len(kept)] == kept
        assert case.tokenizer.decode(asked(case)[1]) == "Count: one two and "
        assert [turn.fork for turn in turns] == [None, ForkReason.TEMPLATE]
        trained_once(turns, case.segments)


def test_growing_prompts_share_one_buffer_and_spans_hold_only_new_text() -> None:
    count, prompts = 40, ["Count: "]
    with serving("one two") as case:
        for _ in range(count):
            prompts.append(prompts[-1] + complete(case, prompts[-1])["text"] + f"{END} and three ")
        written = sum(len(span.attributes.get(MESSAGES_NEW, "")) for span in case.spans)
        assert written < 6 * len(prompts[-1])  # in each span all before it would be twenty times as much
        for turn, prompt in zip(case.turns, prompts, strict=False):
            assert turn.messages is not None
            assert "".join(message["content"] for message in turn.messages) == prompt
        assert case.attempt._root is not None
        held = {id(turn.prompt_ids.base) for turn in case.attempt._root.turns[count // 2 :]}
        assert len(held) == 1  # views of one buffer
        trained_once(case.turns, case.segments)


def test_answer_cut_by_max_tokens_is_continued_in_one_sample() -> None:
    with serving("one two three four") as case:
        text, turns = "Count: ", 3
        for _ in range(turns):
            text += complete(case, text, max_tokens=3)["text"]
        assert len(case.segments) == 1
        assert [turn.fork for turn in case.turns] == [None] * turns
        trained_once(case.turns, case.segments)


def test_text_after_a_stop_sequence_continues_the_conversation() -> None:
    for between in ("\nObservation: 4\n", " = 4\n"):
        with serving("Action: 2 + 2\nObservation: made up", "Done.") as case:
            first = complete(case, "Q\n", stop=["\nObs"])
            assert first["text"] == "Action: 2 + 2"
            prompt = f"Q\n{first['text']}{between}"
            complete(case, prompt)
            assert case.tokenizer.decode(asked(case)[1]) == prompt
            trained_once(case.turns, case.segments)


def test_second_answer_to_one_prompt_is_continued_with_its_tokens() -> None:
    with serving("one", "two", "three") as case:
        complete(case, "Say: ")
        complete(case, "Say: ")
        complete(case, f"Say: two{END}!")
        assert asked(case)[2][: case.turns[1].length] == case.turns[1].token_ids.tolist()
        assert len(case.segments) == 2
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("text", ["<think>a</think>\n\nFour.", "  <think>a b c", " Four. \n"])
def test_raw_text_stays_raw(text: str, streamed: bool) -> None:
    with serving(text, token_s=0.002 * streamed) as case:
        if not streamed:
            assert complete(case, "2+2=")["text"] == text
            return
        body = {"model": "m", "prompt": "2+2=", "max_tokens": 50, "stream": True}
        import openai

        client = openai.OpenAI(base_url=case.llm.endpoint, api_key="any", max_retries=0)
        chunks = list(client.completions.create(**body))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text
        assert len(chunks) > 2


def test_prompt_ids_are_sent_as_they_are() -> None:
    """Ids that no tokenizer would give for their text."""
    with serving("one", "two") as case:
        ids = [i for character in "Count to two" for i in case.tokenizer.encode(character, add_special_tokens=False)]
        assert ids != case.tokenizer.encode("Count to two", add_special_tokens=False)
        complete(case, ids)
        assert asked(case) == [ids]
        held = case.turns[0].token_ids.tolist()
        complete(case, [*held, *ids])
        assert asked(case)[1] == [*held, *ids]
        assert len(case.segments) == 1
        trained_once(case.turns, case.segments)
