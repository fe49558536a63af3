"""Loss masks for text-only traces: chat messages to token ids and a mask of what the model said.

Where an engine's ids are known they are used and nothing here is. This is for traces that hold text alone: their ids
are the template's rendering, tokenized again, which is an approximation of what was sampled and is to be marked as one.

    generator = get_loss_mask_generator(tokenizer)  # or a name: "qwen3", or one that was registered
    token_ids, loss_mask = generator.get_loss_mask(messages, tools=tools)
    (response_length,) = generator.get_response_lengths([loss_mask])

``auto`` asks the template: its own ``{% generation %}`` marks where it has them, else renderings of growing prefixes of
the conversation. The named ones give the ids and masks of slime's ``MultiTurnLossMaskGenerator``
(``slime/utils/mask_utils.py``) of the same name, on the templates that the name is meant for; the line end after an
answer's end token is trained along in them, ``auto`` leaves it out. In all of them a message with ``step_loss_mask``
other than 1 is context.
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


class MaskGenerator(ABC):
    """A loss mask generator; a subclass implements ``get_loss_mask``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer: Any = tokenizer  # a fast one of transformers, with a chat template

    @abstractmethod
    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        """Token ids of the conversation and, for each, 1 where the model said it and is to be trained on it, else 0."""

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Of each mask, how many tokens there are from the first trained one on; 0 when none is trained."""
        return [next((len(mask) - at for at, trained in enumerate(mask) if trained), 0) for mask in loss_masks]

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], *, tools: Tools = None, generation_prompt: bool = False) -> str:
        # the mark on a message is ours and no business of the template
        shown = [{key: value for key, value in message.items() if key != "step_loss_mask"} for message in messages]
        return render_chat(
            self.tokenizer, shown, tools=tools and [*map(dict, tools)], generation_prompt=generation_prompt
        )

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _encode_spans(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Ids of ``text``, with mask 1 on those that hold a character of one of ``spans`` (start inclusive, end
        exclusive; in order, apart)."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded.get("offset_mapping")
        if offsets is None:
            raise ConfigError("the tokenizer gives no offsets of its tokens; loss masks need a fast tokenizer")
        mask, at = [], 0
        for start, end in offsets:
            while at < len(spans) and spans[at][1] <= start:
                at += 1
            mask.append(int(end > start and at < len(spans) and spans[at][0] < end))
        return list(encoded["input_ids"]), mask


def is_trained(message: Message) -> bool:
    """Whether a message is what the model said and is not marked as context."""
    return message.get("role") == "assistant" and message.get("step_loss_mask", 1) == 1


# -- the registry ----------------------------------------------------------------------------------------------------

_generators: Registry[MaskGenerator] = Registry("loss mask type")
register_loss_mask_generator = _generators.register
"""A decorator that makes a class (or a function of the tokenizer) known as ``--loss-mask-type name``."""


def get_loss_mask_generator(tokenizer: Any, tokenizer_type: str = "auto") -> MaskGenerator:
    """The generator of that name for ``tokenizer``. Raises ``ConfigError`` for a name that is not registered."""
    return _generators[tokenizer_type](tokenizer)


# -- auto ------------------------------------------------------------------------------------------------------------

_GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REGISTER = "register a loss mask generator for this template"
_SENTINEL = "SENTINELanswerSENTINEL"


@register_loss_mask_generator("auto")
class TemplateMask(MaskGenerator):
    """The rendering of the whole conversation; trained is what stands in the template's ``{% generation %}`` marks, or
    between the opening of an answer and its end.

    An answer ends with the token that ends a turn (it is sampled); what the template writes after it, a line end
    mostly, is not trained. Where nothing but the mark of the next role ends a turn (GLM), that mark is the token.
    """

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        text = self._render(messages, tools=tools)
        spans = self._marked(messages, tools, text) or self._by_prefixes(messages, tools, text)
        return self._encode_spans(text, [span for span, message in spans if is_trained(message)])

    def _marked(
        self, messages: Sequence[Message], tools: Tools, text: str
    ) -> list[tuple[tuple[int, int], Message]] | None:
        """What the template itself marks as generated; ``None`` when it marks nothing or not one span per answer."""
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
        opening, end_mark, closing = self._answer_marks()
        spans, done = [], 0
        for at, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._prefix(messages[:at], tools)
            # the history up to here, rendered as it was when the answer was asked for; else, in a template that
            # rewrites it, the next opening
            start = (
                len(before)
                if before is not None and text.startswith(before) and len(before) >= done
                else text.find(opening, done)
            )
            if not opening or start < 0 or not text.startswith(opening, start):
                raise TraceError(f"message {at}, an answer, is not in what the chat template renders; {_REGISTER}")
            start += len(opening)
            after = self._prefix(messages[: at + 1], tools)
            if after is not None and text.startswith(after) and len(after) > start:
                end = len(after) - len(closing) + len(end_mark) if after.endswith(closing) else len(after)
            elif end_mark and (found := text.find(end_mark, start)) >= 0:
                end = found + len(end_mark)
            else:
                raise TraceError(f"message {at}, an answer, does not end in the rendered text; {_REGISTER}")
            if not end_mark:
                end += len(added_token_at(self.tokenizer, text, end))
            spans.append(((start, end), message))
            done = end
        return spans

    def _prefix(self, messages: Sequence[Message], tools: Tools) -> str | None:
        """The rendering of the first messages; ``None`` when the template refuses them alone (a system message without
        a question, say)."""
        try:
            return self._render(messages, tools=tools) if messages else ""
        except TraceError:
            return None

    def _answer_marks(self) -> tuple[str, str, str]:
        """What stands before each answer, the mark that ends it (sampled), and all that is written after it."""
        question = {"role": "user", "content": "?"}
        asked = self._render([question])
        answered = self._render([question, {"role": "assistant", "content": _SENTINEL}])
        prompt = self._render([question], generation_prompt=True)
        header, found, closing = answered.removeprefix(asked).partition(_SENTINEL)
        if not found or not answered.startswith(asked):
            raise TraceError(f"the chat template does not write answers after questions; {_REGISTER}")
        opening = header[: shared_length(header, prompt.removeprefix(asked))]
        return opening, closing.rstrip(), closing


# -- as slime names them ---------------------------------------------------------------------------------------------

_QUESTION: Message = {"role": "user", "content": "FOR CALCULATING LOSS MASK ONLY"}


class _Pieces(MaskGenerator):
    """Messages rendered piece by piece, which keeps the thinking that the template drops from a whole conversation;
    tools are written into the first piece only."""

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        opening = self._render([_QUESTION], generation_prompt=True).removeprefix(self._render([_QUESTION]))
        opening_length = len(self._encode(opening))
        token_ids: list[int] = []
        loss_mask: list[int] = []
        for text, message in self._pieces(messages, tools):
            ids = self._encode(text)
            context = min(opening_length, len(ids)) if is_trained(message) else len(ids)
            token_ids += ids
            loss_mask += [0] * context + [1] * (len(ids) - context)
        return token_ids, loss_mask

    @abstractmethod
    def _pieces(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, Message]]:
        """Each text, and a message that is in it."""


def _grouped(messages: Sequence[Message]) -> list[list[Message]]:
    """Each message by itself, and tool results in a row together, which templates may write as one turn."""
    groups: list[list[Message]] = []
    for message in messages:
        if groups and message.get("role") == groups[-1][0].get("role") == "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return groups


class QwenMask(_Pieces):
    """Each message, or run of tool results, by itself (Qwen2.5). slime's makes a turn of each result."""

    def _pieces(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, Message]]:
        # what the template writes before a conversation that has no system message
        one, two = self._render([_QUESTION]), self._render([_QUESTION, _QUESTION])
        block = two[len(one) :]
        default_system = one.removesuffix(block) if two.startswith(one) and one.endswith(block) else ""
        for at, group in enumerate(_grouped(messages)):
            text = self._render(group, tools=tools if at == 0 else None)
            yield text.removeprefix(default_system) if at and group[0].get("role") != "system" else text, group[0]


@register_loss_mask_generator("qwen3")
class Qwen3Mask(_Pieces):
    """Each message, or run of tool results, after a question (Qwen3: its template wants one)."""

    def _pieces(self, messages: Sequence[Message], tools: Tools) -> Iterator[tuple[str, Message]]:
        question = self._render([_QUESTION])
        groups = _grouped(messages)
        # the first one before the question, since a system message has to come first
        block = self._render([_QUESTION, _QUESTION]).removeprefix(question)
        for group in groups[:1]:
            yield self._render([*group, _QUESTION], tools=tools).removesuffix(block), group[0]
        for group in groups[1:]:
            yield self._render([_QUESTION, *group]).removeprefix(question), group[0]


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
        prompt = self._encode(self._render(messages[:1], tools=tools, generation_prompt=True))
        response = self._encode(str(messages[-1].get("content") or ""))
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return prompt + response, [0] * len(prompt) + [trained] * len(response)


@register_loss_mask_generator("qwen")
def _qwen(tokenizer: Any) -> MaskGenerator:
    """A tokenizer with DeepSeek's markers is taken for a distilled model's, as slime does."""
    distilled = "<｜Assistant｜>" in getattr(tokenizer, "get_added_vocab", dict)()
    return DistillQwenMask(tokenizer) if distilled else QwenMask(tokenizer)
