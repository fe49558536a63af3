"""The named loss masks: what slime's ``--loss-mask-type`` of the same name gives, on the templates that the name is
meant for.

They differ in what they render. ``qwen`` renders each message by itself; ``qwen3`` each message after a question,
consecutive tool results together; both therefore keep the thinking that the template drops from a whole conversation,
and tools are written into the first message only. ``qwen3_5`` renders the conversation as a whole. ``distill_qwen`` has
one question and one answer. In all of them the line end after an answer's end token is trained along, as in slime
(``auto`` leaves it out).
"""

from __future__ import annotations

from collections.abc import Sequence

from agl_slime.errors import TraceError
from agl_slime.tokens.masks import MaskGenerator, Message, Tools, is_trained, register_loss_mask_generator

_QUESTION: Message = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}


class _Pieces(MaskGenerator):
    """Messages rendered piece by piece."""

    def _tokens(self, text: str, message: Message, opening: str) -> tuple[list[int], list[int]]:
        ids = self._encode(text)
        if not is_trained(message):
            return ids, [0] * len(ids)
        context = min(len(self._encode(opening)), len(ids))
        return ids, [0] * context + [1] * (len(ids) - context)

    def _opening(self) -> str:
        asked = self._render([_QUESTION])
        return self._render([_QUESTION], opening=True).removeprefix(asked)

    def _default_system(self) -> str:
        """What the template writes before a conversation that has no system message."""
        one, two = self._render([_QUESTION]), self._render([_QUESTION, _QUESTION])
        block = two[len(one) :]
        return one.removesuffix(block) if two.startswith(one) and one.endswith(block) else ""


@register_loss_mask_generator("qwen")
class QwenMask(_Pieces):
    """Each message by itself (Qwen2.5); a tokenizer with DeepSeek's markers is taken for a distilled model, as slime
    does."""

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        if "<｜Assistant｜>" in getattr(self.tokenizer, "get_added_vocab", dict)():
            return DistillQwenMask(self.tokenizer).get_loss_mask(messages, tools)
        opening, default_system = self._opening(), self._default_system()
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for at, message in enumerate(messages):
            text = self._render([message], tools=tools if at == 0 else None)
            if at and message.get("role") != "system":
                text = text.removeprefix(default_system)
            ids, mask = self._tokens(text, message, opening)
            token_ids += ids
            loss_mask += mask
        return token_ids, loss_mask


@register_loss_mask_generator("qwen3")
class Qwen3Mask(_Pieces):
    """Each message, or run of tool results, after a question (Qwen3: its template wants one)."""

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        opening, question = self._opening(), self._render([_QUESTION])
        token_ids: list[int] = []
        loss_mask: list[int] = []
        at = 0
        while at < len(messages):
            end = at + 1
            while messages[at].get("role") == "tool" and end < len(messages) and messages[end].get("role") == "tool":
                end += 1
            group = messages[at:end]
            if at == 0:  # before the question, since a system message has to come first
                block = self._render([_QUESTION, _QUESTION]).removeprefix(question)
                text = self._render([*group, _QUESTION], tools=tools).removesuffix(block)
            else:
                text = self._render([_QUESTION, *group]).removeprefix(question)
            ids, mask = self._tokens(text, group[0], opening)
            token_ids += ids
            loss_mask += mask
            at = end
        return token_ids, loss_mask


@register_loss_mask_generator("qwen3_5")
class Qwen35Mask(MaskGenerator):
    """The conversation as a whole (Qwen3.5); an answer is what stands between its header, less an opened thinking
    block, and its end mark."""

    header = "<|im_start|>assistant\n"
    thinking = "<think>\n"
    end_mark = "<|im_end|>"

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        text = self._render(messages, tools=tools)
        spans, at = [], 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            start = text.find(self.header, at)
            end = text.find(self.end_mark, start + len(self.header)) if start >= 0 else -1
            if end < 0:
                raise TraceError(f"message {number}, an answer, is not between {self.header!r} and {self.end_mark!r}")
            at = end + len(self.end_mark)
            at += text.startswith("\n", at)
            if is_trained(message):
                start += len(self.header)
                spans.append((start + len(self.thinking) if text.startswith(self.thinking, start) else start, at))
        return self._encode_spans(text, spans)


@register_loss_mask_generator("distill_qwen")
class DistillQwenMask(MaskGenerator):
    """The first message as the prompt and the content of the last as the answer, without an end token
    (DeepSeek-R1-Distill-Qwen)."""

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        prompt = self._encode(self._render(messages[:1], tools=tools, opening=True))
        response = self._encode(str(messages[-1].get("content") or ""))
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt + response, [0] * len(prompt) + [trained] * len(response)
