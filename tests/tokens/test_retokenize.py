"""Text conversations as tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agl_slime.errors import TraceError
from agl_slime.tokens.retokenize import Retokenizer
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.tokenizer import set_template_kwargs
from agl_slime.tokens.turn import Turn
from tests.harness import vocabularies
from tests.harness.tokenizers import DROPS_THINKING, PLAIN, chat_tokenizer

UNMARKED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""No special token separates the messages: the end of an answer and the text after it can merge into one token."""


@pytest.mark.parametrize(("template", "end"), [(PLAIN, "<|im_end|>"), (UNMARKED, "")], ids=["ChatML", "unmarked"])
@pytest.mark.parametrize("vocabulary", ["anthropic", "deepseek"])
def test_a_conversation_that_only_grows_is_one_sequence(vocabulary: str, template: str, end: str):
    tokenizer = chat_tokenizer(vocabulary, template)
    retokenizer = Retokenizer(tokenizer)
    history: list[dict[str, Any]] = []
    turns = []
    for index in range(5):
        history.append({"role": "user", "content": f"Question {index}?"})
        answer = {"role": "assistant", "content": f"Answer {index}!\n"}
        prompt, response = retokenizer.turn([*history], answer)
        turns.append(Turn(prompt_ids=prompt, response_ids=response, token_source="retokenized"))
        history.append(answer)
    [segment] = merge_turns(turns, tokenizer)
    assert (
        tokenizer.decode(segment.token_ids.tolist()) == tokenizer.apply_chat_template(history, tokenize=False).rstrip()
    )
    sampled = [tokenizer.decode(segment.token_ids[at.start : at.end].tolist()) for at in segment.placements]
    texts = [f"Answer {i}!\n{end}" if end else f"Answer {i}!" for i in range(5)]
    assert [text.lstrip() for text in sampled] == texts


HI, HELLO = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "Hello"}


def test_text_that_the_template_adds_after_an_answer_is_not_sampled():
    tokenizer = chat_tokenizer("anthropic", PLAIN.replace("<|im_end|>\n", "<|im_end|>\n---\n"))
    _, response = Retokenizer(tokenizer).turn(HI, HELLO)
    assert tokenizer.decode(response) == "Hello<|im_end|>"


def test_template_that_opens_the_answer_leaves_the_answers_text():
    """The prompt ends with an empty thinking block that the finished answer does not have."""

    class NoThinking:
        def __init__(self) -> None:
            self._tokenizer = chat_tokenizer("anthropic", DROPS_THINKING)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._tokenizer, name)

        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            return self._tokenizer.apply_chat_template(conversation, enable_thinking=False, **options)

    tokenizer: Any = NoThinking()
    prompt, response = Retokenizer(tokenizer).turn(HI, HELLO)
    assert tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(response) == "Hello"


def test_without_a_template_text_is_unchanged_and_a_conversation_refused():
    tokenizer = chat_tokenizer("anthropic", None)
    prompt, response = Retokenizer(tokenizer).turn(HI, HELLO)
    assert (tokenizer.decode(prompt), tokenizer.decode(response)) == ("Hi", "Hello")
    with pytest.raises(TraceError, match=r"no chat template.* 2 messages"):
        Retokenizer(tokenizer).turn([{"role": "system", "content": "a"}, *HI], HELLO)
    tokenizer = chat_tokenizer("anthropic", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TraceError, match=r"cannot render these messages: .*roles must alternate"):
        Retokenizer(tokenizer).turn(HI, HELLO)


def test_the_next_roles_mark_is_the_answers_where_nothing_else_ends_it() -> None:
    """GLM samples it. The next prompt begins with it, so the conversation stays one sequence."""
    tokenizer = vocabularies.chat_tokenizer("anthropic", "role_markers")
    retokenizer = Retokenizer(tokenizer)
    question: dict[str, Any] = {"role": "user", "content": "?"}
    call = {"role": "assistant", "content": "I look.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    prompt, response = retokenizer.turn([question], call)
    assert tokenizer.decode(response) == "I look.<|observation|>"
    result = {"role": "tool", "content": "one"}
    second, response = retokenizer.turn([question, call, result], {"role": "assistant", "content": "One."})
    assert second[: len(prompt)] == prompt
    assert tokenizer.decode(second).count("<|observation|>") == 1
    assert tokenizer.decode(response) == "One.<|user|>"
    cut = retokenizer.turn([question, call, result], {"role": "assistant", "content": "One"}, finish_reason="length")
    assert tokenizer.decode(cut[1]) == "One"


def test_a_runs_template_arguments_are_in_texts_that_are_tokenized_again() -> None:
    tokenizer = copy.copy(chat_tokenizer("anthropic", "{{ '<|im_start|>' ~ (a | default('none')) }}" + PLAIN))
    set_template_kwargs(tokenizer, {"a": "given"})
    prompt, _ = Retokenizer(tokenizer).turn(HI, HELLO)
    assert tokenizer.decode(prompt).startswith("<|im_start|>given")
