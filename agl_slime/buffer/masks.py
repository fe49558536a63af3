"""Loss masks for text-only traces: chat messages to token ids and a mask of the model's tokens.

Traces with an engine's ids do not need them. The ids of a text-only trace are the template's rendering, tokenized
again: an approximation of the sampled ids, to be marked as one.

    generator = get_loss_mask_generator(tokenizer)  # or a name: "qwen3", or one that was registered
    token_ids, loss_mask = generator.get_loss_mask(messages, tools=tools)
    (response_length,) = generator.get_response_lengths([loss_mask])

``auto`` takes the template's ``{% generation %}`` marks, or compares renderings of growing prefixes of the
conversation. The other generators give the ids and masks of slime's ``MultiTurnLossMaskGenerator``
(``slime/utils/mask_utils.py``) of the same name, for the templates of that name; they train the line end after an
answer's end token, ``auto`` does not. In all of them a message with ``step_loss_mask`` other than 1 is context.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agl_slime.errors import ConfigError, TraceError
from agl_slime.support.registry import Registry
from agl_slime.tokens.codec import shared_length
from agl_slime.tokens.tokenizer import added_token_at, render_chat

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class MultiTurnLossMaskGenerator:
    """A loss mask generator, under slime's name: the registered one of ``tokenizer_type``, or a subclass with a
    ``get_loss_mask`` of its own."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer: Any = tokenizer  # a fast tokenizer of transformers with a chat template
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        """Token ids of the conversation, and for each 1 if it is trained (a token of the model), else 0."""
        return get_loss_mask_generator(self.tokenizer, self.tokenizer_type).get_loss_mask(messages, tools)

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Per mask, the number of tokens from the first trained one on; 0 without any."""
        return [next((len(mask) - index for index, trained in enumerate(mask) if trained), 0) for mask in loss_masks]

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], *, tools: Tools = None, generation_prompt: bool = False) -> str:
        plain = [{key: value for key, value in message.items() if key != "step_loss_mask"} for message in messages]
        return render_chat(
            self.tokenizer, plain, tools=tools and [*map(dict, tools)], generation_prompt=generation_prompt
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Ids of ``text``, with mask 1 on tokens that overlap one of ``spans`` (start inclusive, end exclusive; in
        order, disjoint)."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded.get("offset_mapping")
        if offsets is None:
            raise ConfigError("the tokenizer gives no offsets of its tokens; loss masks need a fast tokenizer")
        mask, index = [], 0
        for start, end in offsets:
            while index < len(spans) and spans[index][1] <= start:
                index += 1
            mask.append(int(end > start and index < len(spans) and spans[index][0] < end))
        return list(encoded["input_ids"]), mask


def is_trained(message: Message) -> bool:
    """Whether a message is an answer of the model and not marked as context."""
    return message.get("role") == "assistant" and message.get("step_loss_mask", 1) == 1


# -- the registry ----------------------------------------------------------------------------------------------------

_generators: Registry[MultiTurnLossMaskGenerator] = Registry("loss mask type")
register_loss_mask_generator = _generators.register
"""A decorator that registers a class (or a function of the tokenizer) as ``--loss-mask-type name``."""


def get_loss_mask_generator(tokenizer: Any, tokenizer_type: str = "auto") -> MultiTurnLossMaskGenerator:
    """The generator of that name for ``tokenizer``. Raises ``ConfigError`` for a name that is not registered."""
    return _generators[tokenizer_type](tokenizer)


# -- auto ------------------------------------------------------------------------------------------------------------

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REGISTER = "register a loss mask generator for this template"
_SENTINEL = "SENTINELanswerSENTINEL"


@register_loss_mask_generator("auto")
class TemplateMask(MultiTurnLossMaskGenerator):
    """The rendering of the whole conversation. Trained text is in the template's ``{% generation %}`` marks, or between
    an answer's header and its end.

    An answer ends with the token that ends a turn, which is sampled; text of the template after it, usually a line end,
    is not trained. If only the next role's marker ends a turn (GLM), that marker is the token.
    """

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        text = self._render(messages, tools=tools)
        spans = self._marked(messages, tools, text) or self._by_prefixes(messages, tools, text)
        return self._encode_spans(text, [span for span, message in spans if is_trained(message)])

    def _marked(
        self, messages: Sequence[Message], tools: Tools, text: str
    ) -> list[tuple[tuple[int, int], Message]] | None:
        """The spans that the template marks as generated; ``None`` unless it marks one span per answer."""
        source = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(source, str) or not _GENERATION_MARK.search(source):
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        special = getattr(self.tokenizer, "special_tokens_map", {})
        options = {"add_generation_prompt": False, "return_assistant_tokens_mask": True, **special}
        tool_list: list[Any] | None = [dict(tool) for tool in tools] if tools else None
        rendered, marked = render_jinja_template(
            [[dict(message) for message in messages]], tools=tool_list, chat_template=source, **options
        )
        answers = [message for message in messages if message.get("role") == "assistant"]
        spans = [(int(start), int(end)) for start, end in marked[0]]
        if rendered[0] != text or len(spans) != len(answers):
            return None
        return list(zip(spans, answers, strict=True))

    def _by_prefixes(
        self, messages: Sequence[Message], tools: Tools, text: str
    ) -> list[tuple[tuple[int, int], Message]]:
        header, end_mark, closing = self._answer_marks()
        spans, done = [], 0
        for index, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            history = self._prefix(messages[:index], tools)
            # after the history's rendering; a template that rewrites it: at the next header
            start = (
                len(history)
                if history is not None and text.startswith(history) and len(history) >= done
                else text.find(header, done)
            )
            if not header or start < 0 or not text.startswith(header, start):
                raise TraceError(f"message {index}, an answer, is not in the chat template's rendering; {_REGISTER}")
            start += len(header)
            answered = self._prefix(messages[: index + 1], tools)
            if answered is not None and text.startswith(answered) and len(answered) > start:
                end = len(answered) - len(closing) + len(end_mark) if answered.endswith(closing) else len(answered)
            elif end_mark and (mark_at := text.find(end_mark, start)) >= 0:
                end = mark_at + len(end_mark)
            else:
                raise TraceError(f"message {index}, an answer, does not end in the rendered text; {_REGISTER}")
            if not end_mark:
                end += len(added_token_at(self.tokenizer, text, end))
            spans.append(((start, end), message))
            done = end
        return spans

    def _prefix(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """The rendering of the first messages; ``None`` if the template refuses them alone (a system message without a
        question)."""
        try:
            return self._render(messages, tools=tools) if messages else ""
        except TraceError:
            return None

    def _answer_marks(self) -> tuple[str, str, str]:
        """The header before each answer, the mark that ends it (sampled), and all the text after it."""
        question = {"role": "user", "content": "?"}
        unanswered = self._render([question])
        answered = self._render([question, {"role": "assistant", "content": _SENTINEL}])
        prompt = self._render([question], generation_prompt=True)
        header, sentinel, closing = answered.removeprefix(unanswered).partition(_SENTINEL)
        if not sentinel or not answered.startswith(unanswered):
            raise TraceError(f"the chat template does not write answers after questions; {_REGISTER}")
        return header[: shared_length(header, prompt.removeprefix(unanswered))], closing.rstrip(), closing


# -- slime's ---------------------------------------------------------------------------------------------------------

_QUESTION: Message = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}


class _Pieces(MultiTurnLossMaskGenerator, ABC):
    """Messages rendered piece by piece, which keeps the thinking that the template drops from a whole conversation; the
    first piece has the tools."""

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        prompt = self._render([_QUESTION], generation_prompt=True).removeprefix(self._render([_QUESTION]))
        prompt_length = len(self._encode(prompt))
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for text, message in self._pieces(messages, tools):
            ids = self._encode(text)
            context = min(prompt_length, len(ids)) if is_trained(message) else len(ids)
            token_ids += ids
            loss_mask += [0] * context + [1] * (len(ids) - context)
        return token_ids, loss_mask

    @abstractmethod
    def _pieces(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, Message]]:
        """The text of each group of messages, and the group's first message."""


def _grouped(messages: Sequence[Message]) -> list[list[Message]]:
    """Single messages, and groups of consecutive tool results, which templates may write as one turn."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and message.get("role") == groups[-1][0].get("role") == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


class QwenMask(_Pieces):
    """A mask by groups of messages, each rendered alone (Qwen2.5). slime's generator makes each tool result a turn."""

    def _pieces(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, Message]]:
        # the template's default system message
        single, double = self._render([_QUESTION]), self._render([_QUESTION, _QUESTION])
        block = double[len(single) :]
        default_system = single.removesuffix(block) if double.startswith(single) and single.endswith(block) else ""
        for index, group in enumerate(_grouped(messages)):
            text = self._render(group, tools=tools if index == 0 else None)
            yield text.removeprefix(default_system) if index and group[0].get("role") != "system" else text, group[0]


@register_loss_mask_generator("qwen3")
class Qwen3Mask(_Pieces):
    """A mask by groups of messages, each rendered after a question, which the template requires (Qwen3)."""

    def _pieces(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, Message]]:
        question = self._render([_QUESTION])
        groups = _grouped(messages)
        # the first group before the question: a system message must be first
        block = self._render([_QUESTION, _QUESTION]).removeprefix(question)
        for group in groups[:1]:
            yield self._render([*group, _QUESTION], tools=tools).removesuffix(block), group[0]
        for group in groups[1:]:
            yield self._render([_QUESTION, *group]).removeprefix(question), group[0]


@register_loss_mask_generator("qwen3_5")
class Qwen35Mask(MultiTurnLossMaskGenerator):
    """The conversation as a whole (Qwen3.5); an answer is the text between its header, with an opened thinking block,
    and its end mark."""

    header = "<|im_start|>assistant\n"
    thinking = "<think>\n"
    end_mark = "<|im_end|>"

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        text = self._render(messages, tools=tools)
        spans, position = [], 0
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            start = text.find(self.header, position)
            end = text.find(self.end_mark, start + len(self.header)) if start >= 0 else -1
            if end < 0:
                raise TraceError(f"message {number}, an answer, is not between {self.header!r} and {self.end_mark!r}")
            position = end + len(self.end_mark)
            position += text.startswith("\n", position)
            if is_trained(message):
                start += len(self.header)
                spans.append((start + len(self.thinking) if text.startswith(self.thinking, start) else start, position))
        return self._encode_spans(text, spans)


@register_loss_mask_generator("distill_qwen")
class DistillQwenMask(MultiTurnLossMaskGenerator):
    """The first message as the prompt and the content of the last as the answer, without an end token
    (DeepSeek-R1-Distill-Qwen)."""

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        prompt = self._encode(self._render(messages[:1], tools=tools, generation_prompt=True))
        response = self._encode(str(messages[-1].get("content") or ""))
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt + response, [0] * len(prompt) + [trained] * len(response)


@register_loss_mask_generator("qwen")
def _qwen(tokenizer: Any) -> MultiTurnLossMaskGenerator:
    """Qwen2.5's mask, or a distilled model's for a tokenizer with DeepSeek's markers, as in slime."""
    distilled = "<｜Assistant｜>" in getattr(tokenizer, "get_added_vocab", dict)()
    return DistillQwenMask(tokenizer) if distilled else QwenMask(tokenizer)
