"""Text-only traces as tokens: the chat template's rendering, tokenised again. What comes out is an approximation of
what the engine saw and is marked as such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_slime.errors import PromptError, TraceError
from agl_slime.tokens.tokenizer import ChatTokenizer, added_token_at, ends_with_added_token, render_chat

Message = Mapping[str, Any]


@dataclass
class Retokenizer:
    """Turns of one text-only rollout to token ids.

    A prompt that begins with the text of an earlier turn (prompt and answer) begins with its ids too, so a conversation
    that only grows stays one sequence: tokenised as a whole, pieces at token boundaries could merge anew
    and every turn would fork.
    """

    tokenizer: ChatTokenizer
    _held: list[tuple[str, list[int]]] = field(default_factory=list)

    def turn(
        self,
        messages: Sequence[Message],
        answer: Message,
        *,
        finish_reason: str = "stop",
        tools: Sequence[Any] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Prompt ids and response ids of one call. The end-of-sequence token is the response's where the template
        writes it and the call was not cut off. ``TraceError`` when the template refuses the messages."""
        prompt, response = self._render(messages, answer, finish_reason, tools)
        held_text, held_ids = max(
            (held for held in self._held if prompt.startswith(held[0])), key=lambda held: len(held[0]), default=("", [])
        )
        prompt_ids = held_ids + self._encode(prompt[len(held_text) :])
        response_ids = self._encode(response)
        self._held.append((prompt + response, prompt_ids + response_ids))
        return prompt_ids, response_ids

    def _render(
        self, messages: Sequence[Message], answer: Message, finish_reason: str, tools: Sequence[Any] | None
    ) -> tuple[str, str]:
        content = str(answer.get("content") or "")
        if not getattr(self.tokenizer, "chat_template", None):
            if len(messages) != 1:
                raise TraceError(f"the tokenizer has no chat template, the text trace has {len(messages)} messages")
            return str(messages[0].get("content") or ""), content  # the completions API: one text in, one text out
        prompt = render_chat(self.tokenizer, messages, tools=tools, generation_prompt=True)
        whole = render_chat(self.tokenizer, [*messages, answer], tools=tools)
        if not whole.startswith(prompt):  # the template renders a finished answer in another way than an open one
            return prompt, content
        sampled = self._sampled_part(whole[len(prompt) :], content, finish_reason)
        return prompt, sampled + self._next_role([*messages, answer], whole, prompt + sampled, finish_reason, tools)

    def _sampled_part(self, rendered: str, content: str, finish_reason: str) -> str:
        """``rendered`` without what only the template writes after an answer."""
        if finish_reason == "length" and content and content in rendered:
            return rendered[: rendered.index(content) + len(content)]
        end = getattr(self.tokenizer, "eos_token", None)
        if end and end in rendered:
            return rendered[: rendered.index(end) + len(end)]
        return rendered.rstrip()

    def _next_role(
        self, messages: Sequence[Message], whole: str, told: str, finish_reason: str, tools: Sequence[Any] | None
    ) -> str:
        """The mark of the role that follows an answer, where nothing else ends it (GLM) and the model samples that."""
        if finish_reason == "length" or told != whole.rstrip() or ends_with_added_token(self.tokenizer, told):
            return ""
        role = "tool" if messages[-1].get("tool_calls") else "user"
        try:
            more = render_chat(self.tokenizer, [*messages, {"role": role, "content": "?"}], tools=tools)
        except PromptError:
            return ""
        return added_token_at(self.tokenizer, more, len(told)) if more.startswith(told) else ""

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []
