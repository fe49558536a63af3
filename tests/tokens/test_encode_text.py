"""``encode_text`` gives the ids of ``tokenizer.encode``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.tokens.tokenizer import encode_text
from tests.harness.tokenizers import chat_tokenizer, small_tokenizer

_TEXTS = st.lists(
    st.one_of(
        st.text(st.characters(codec="utf-8"), max_size=40),
        st.sampled_from(["<|im_start|>", "<|im_end|>", "\n", "  ", "the quick brown fox", "é", "漢字", "🙂", "\r\n"]),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(params=["small", "anthropic", "deepseek"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return small_tokenizer() if request.param == "small" else chat_tokenizer(request.param)


@given(text=_TEXTS, special=st.booleans())
def test_ids_are_those_of_encode(tokenizer: Any, text: str, special: bool) -> None:
    assert encode_text(tokenizer, text, add_special_tokens=special) == tokenizer.encode(
        text, add_special_tokens=special
    )


def test_a_limit_that_another_use_left_cuts_nothing() -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    whole = tokenizer.encode("many words are here", add_special_tokens=False)
    tokenizer("many words are here", truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.truncation is not None
    assert encode_text(tokenizer, "many words are here") == whole


def test_special_tokens_that_are_split_stay_split() -> None:
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.split_special_tokens = True
    ids = encode_text(tokenizer, "a<|im_end|>")
    assert tokenizer.eos_token_id not in ids
    assert ids == tokenizer.encode("a<|im_end|>", add_special_tokens=False)


def test_a_tokenizer_that_encodes_by_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer: Any = copy.deepcopy(small_tokenizer())
    assert encode_text(tokenizer, "x") != [7]

    class Sevens(type(tokenizer)):
        def encode(self, text: Any, *args: Any, **options: Any) -> list[int]:
            return [7]

    monkeypatch.setattr(tokenizer, "encode", lambda text, add_special_tokens: [7])
    assert encode_text(tokenizer, "x") == [7]
    monkeypatch.undo()
    tokenizer.__class__ = Sevens
    assert encode_text(tokenizer, "x") == [7]
