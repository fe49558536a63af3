"""One conversation, kept as text for people and templates and as token ids for the engine.

The next prompt is what is held, verbatim, plus the tokens of what the chat template adds after it; the text of an answer is never tokenized again.
Where the template renders the history differently once more messages follow (a template that drops old thinking, say), the held ids are no prefix of
the conversation any more: the prompt is then rendered afresh and ``rewritten`` counts it, so that the trace shows a fork instead of hiding it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.sglang.payloads import Generation
from agl_slime.tokenizer import ChatTokenizer

Message = dict[str, Any]

# Stands for an answer when the template is asked what it writes after one.
_SENTINEL = "\u241fanswer\u241f"


class ChatContext:
    """A conversation that grows by messages (``add``) and by sampled answers (``add_answer``)."""

    def __init__(
        self,
        *,
        tokenizer: ChatTokenizer,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not messages:
            raise ConfigError("the prompt has no messages; build_prompt must return at least one")
        self._tokenizer = tokenizer
        self._tools = list(tools) if tools else None
        self._template_kwargs = dict(template_kwargs or {})
        self.messages: list[Message] = [dict(message) for message in messages]
        self.rewritten = 0
        self._held: list[int] = []  # prompt and answer of the last turn
        self._held_messages = 0  # how many messages `_held` covers
        self._open_tail = ""  # what the template writes after an answer and the engine did not sample

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Append messages of the user, of tools, of the environment."""
        self.messages.extend(dict(message) for message in messages)

    def add_answer(self, prompt_ids: Sequence[int], generation: Generation) -> Message:
        """Append a sampled answer to the prompt that it answered."""
        message: Message = {"role": "assistant", "content": generation.text}
        self.messages.append(message)
        self._held = [*prompt_ids, *generation.output_ids]
        self._held_messages = len(self.messages)
        self._open_tail = self._after_answer(generation)
        return message

    def prompt_ids(self) -> list[int]:
        """Token ids of the whole conversation so far, with the opening of the next answer."""
        text = self._render(self.messages, opening=True)
        if self._held:
            before = self._render(self.messages[: self._held_messages], opening=False)
            if text.startswith(before):
                return self._held + self._encode(self._open_tail + text[len(before) :])
            self.rewritten += 1
        return self._encode(text)

    # -- the template -------------------------------------------------------------------------------------------------------------------------

    def _after_answer(self, generation: Generation) -> str:
        """The template's text after an answer, less the stop token that the engine sampled as part of the answer."""
        closing = _closing_of(self._tokenizer, self._tools, self._template_kwargs)
        if generation.finish_reason == "stop" and generation.output_ids and not isinstance(generation.matched_stop, str):
            stop_text = self._tokenizer.decode([generation.output_ids[-1]], skip_special_tokens=False)
            if stop_text and closing.startswith(stop_text):
                return closing[len(stop_text) :]
        return closing

    def _render(self, messages: Sequence[Message], *, opening: bool) -> str:
        return _render(self._tokenizer, messages, tools=self._tools, opening=opening, kwargs=self._template_kwargs)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _render(tokenizer: ChatTokenizer, messages: Sequence[Message], *, tools: list[Any] | None, opening: bool, kwargs: Mapping[str, Any]) -> str:
    return tokenizer.apply_chat_template(list(messages), tools=tools, add_generation_prompt=opening, tokenize=False, **kwargs)


def _closing_of(tokenizer: ChatTokenizer, tools: list[Any] | None, kwargs: Mapping[str, Any]) -> str:
    """What the template writes after an assistant's content, ``<|im_end|>\\n`` with ChatML."""
    rendered = _render(
        tokenizer,
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SENTINEL}],
        tools=tools,
        opening=False,
        kwargs=kwargs,
    )
    _, found, closing = rendered.rpartition(_SENTINEL)
    if not found:
        raise ConfigError("the chat template does not write the content of assistant messages; a conversation cannot be continued with it")
    return closing
