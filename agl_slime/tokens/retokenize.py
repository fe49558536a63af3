"""Token ids of text-only traces: the chat template's rendering, tokenized again. They approximate the engine's ids and
are marked so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_slime.errors import PromptError, TraceError
from agl_slime.tokens.tokenizer import ChatTokenizer, added_token_at, ends_with_added_token, render_chat

Message = Mapping[str, Any]


@dataclass
class Retokenizer:
    """An encoder of the turns of one text-only rollout.

    A prompt that begins with the text of an earlier turn (prompt and answer) begins with its ids, too: if the whole
    text were tokenized, BPE could merge across the turns' boundaries, and every turn would fork.
    """

    tokenizer: ChatTokenizer
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    _earlier: list[tuple[str, list[int]]] = field(default_factory=list)

    def turn(
        self,
        messages: Sequence[Message],
        answer: Message,
        *,
        finish_reason: str = "stop",
        tools: Sequence[Any] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Prompt ids and response ids of one call. The response has the end-of-sequence token if the template writes it
        and the call was not truncated. ``TraceError`` when the template refuses the messages."""
        prompt, response = self._render(messages, answer, finish_reason, tools)
        prefixes = (turn for turn in self._earlier if prompt.startswith(turn[0]))
        text, ids = max(prefixes, key=lambda turn: len(turn[0]), default=("", []))
        prompt_ids = ids + self._encode(prompt[len(text) :])
        response_ids = self._encode(response)
        self._earlier.append((prompt + response, prompt_ids + response_ids))
        return prompt_ids, response_ids

    def _render(
        self, messages: Sequence[Message], answer: Message, finish_reason: str, tools: Sequence[Any] | None
    ) -> tuple[str, str]:
        content = str(answer.get("content") or "")
        if not getattr(self.tokenizer, "chat_template", None):
            if len(messages) != 1:
                raise TraceError(f"the tokenizer has no chat template, the text trace has {len(messages)} messages")
            return str(messages[0].get("content") or ""), content  # the completions API
        prompt = render_chat(self.tokenizer, messages, tools=tools, generation_prompt=True, **self.template_kwargs)
        whole = render_chat(self.tokenizer, [*messages, answer], tools=tools, **self.template_kwargs)
        if not whole.startswith(prompt):  # a finished answer has another beginning than the generation prompt
            return prompt, content
        sampled = self._sampled_part(whole[len(prompt) :], content, finish_reason)
        return prompt, sampled + self._next_role([*messages, answer], whole, prompt + sampled, finish_reason, tools)

    def _sampled_part(self, rendered: str, content: str, finish_reason: str) -> str:
        """``rendered`` without the template's text after an answer."""
        if finish_reason == "length" and content and content in rendered:
            return rendered[: rendered.index(content) + len(content)]
        end = getattr(self.tokenizer, "eos_token", None)
        if end and end in rendered:
            return rendered[: rendered.index(end) + len(end)]
        return rendered.rstrip()

    def _next_role(
        self, messages: Sequence[Message], whole: str, sampled: str, finish_reason: str, tools: Sequence[Any] | None
    ) -> str:
        """The marker of the role after an answer if nothing else ends the answer: the model samples it (GLM)."""
        if finish_reason == "length" or sampled != whole.rstrip() or ends_with_added_token(self.tokenizer, sampled):
            return ""
        role = "tool" if messages[-1].get("tool_calls") else "user"
        try:
            following = [*messages, {"role": role, "content": "?"}]
            continued = render_chat(self.tokenizer, following, tools=tools, **self.template_kwargs)
        except PromptError:
            return ""
        return added_token_at(self.tokenizer, continued, len(sampled)) if continued.startswith(sampled) else ""

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []
