"""A digest of written text compares as the text itself does without white space and empty blocks."""

from __future__ import annotations

import re

from hypothesis import example, given
from hypothesis import strategies as st

from agl_slime.tokens.conversation import TextDigest

_PIECES = [
    "<",
    ">",
    "</",
    "a",
    "<b>",
    "</b>",
    "<think>\n\n</think>",
    "<a></a>",
    "<a><a></a>",
    " ",
    "é",
    "\ud800",
    "x y",
]
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=8).map("".join)


def once(text: str) -> str:
    return re.sub(r"<(\w+)></\1>", "", "".join(text.split()))


@given(_TEXTS, _TEXTS, st.integers(1, 9))
@example("<", "<<think>\n\n</think>", 1)
def test_a_digest_of_pieces_is_that_of_the_whole_wherever_it_is_cut(text: str, second: str, size: int) -> None:
    written = TextDigest(text[:size])
    for start in range(size, len(text), size):
        written.add(text[start : start + size])
    assert written.matches(text)
    assert written.copy().matches(text + "<a", "<a")
    assert written.matches(second) == (once(second) == once(text))


def test_whitespace_and_empty_blocks_compare_equal_and_letters_do_not() -> None:
    written = TextDigest("<|user|>\nhi <|assistant|>\n")
    written.add("<thi")
    written.add("nk>\n", "\n")
    written.add("</think>", "four\n")
    assert written.matches("<|user|>hi<|assistant|>four five", " five")
    assert not written.matches("<|user|>hi<|assistant|>Four five", " five")
    assert not written.matches("<|user|>hi<|assistant|><think>x</think>four five", " five")
