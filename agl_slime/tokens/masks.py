"""Loss masks for text-only traces: chat messages to token ids and a mask of what the model said.

Where an engine's ids are known they are used and nothing here is. This is for traces that hold text alone: their ids
are the template's rendering, tokenized again, which is an approximation of what was sampled and is to be marked as one.

    generator = get_loss_mask_generator(tokenizer)  # or a name: "qwen3", or one that was registered
    token_ids, loss_mask = generator.get_loss_mask(messages, tools=tools)
    (response_length,) = generator.get_response_lengths([loss_mask])

``auto`` asks the template: its own ``{% generation %}`` marks where it has them, else renderings of growing prefixes of
the conversation. The named ones give the ids and masks of slime's ``MultiTurnLossMaskGenerator``
(``slime/utils/mask_utils.py``) of the same name. In all of them a message with ``step_loss_mask`` other than 1 is
context.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agl_slime.errors import ConfigError, TraceError
from agl_slime.support.registry import Registry
from agl_slime.tokens.codec import shared_length

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None


class MaskGenerator:
    """A loss mask generator; a subclass implements ``get_loss_mask``."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer: Any = tokenizer  # a fast one of transformers, with a chat template

    def get_loss_mask(self, messages: Sequence[Message], tools: Tools = None) -> tuple[list[int], list[int]]:
        """Token ids of the conversation and, for each, 1 where the model said it and is to be trained on it, else 0."""
        raise NotImplementedError(f"{type(self).__name__} must implement get_loss_mask(messages, tools)")

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Of each mask, how many tokens there are from the first trained one on; 0 when none is trained."""
        return [next((len(mask) - at for at, trained in enumerate(mask) if trained), 0) for mask in loss_masks]

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _render(self, messages: Sequence[Message], *, tools: Tools = None, opening: bool = False) -> str:
        options: dict[str, Any] = {"tools": [dict(tool) for tool in tools]} if tools else {}
        # the mark on a message is ours and no business of the template
        shown = [{key: value for key, value in message.items() if key != "step_loss_mask"} for message in messages]
        try:
            return self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=opening, **options)
        except Exception as error:  # jinja's errors, TypeError for a shape it does not expect: anything
            raise TraceError(f"the chat template cannot render the messages: {error}") from error

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
    from agl_slime.tokens import mask_generators  # registers the named ones

    assert mask_generators
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
    mostly, is not trained.
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
        prompt = self._render([question], opening=True)
        header, found, closing = answered.removeprefix(asked).partition(_SENTINEL)
        if not found or not answered.startswith(asked):
            raise TraceError(f"the chat template does not write answers after questions; {_REGISTER}")
        opening = header[: shared_length(header, prompt.removeprefix(asked))]
        return opening, closing.rstrip(), closing
