"""One model call in the span of another instrumentation: token lists, log-probs, text.

The names are those that Agent Lightning's instrumentation of vLLM, LiteLLM and Weave writes and its adapters read
(``agentlightning/adapter/triplet.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agl_slime.errors import TraceError
from agl_slime.trace import attributes as names
from agl_slime.trace.chat_messages import (
    WEAVE_INPUT,
    WEAVE_OUTPUT,
    ChatMessage,
    answer_messages,
    has_conversation,
    literal,
    request_messages,
    tool_definitions,
)
from agl_slime.trace.retokenize import Retokenizer
from agl_slime.trace.span_codec import finish_reason, parse_json
from agl_slime.trace.turn import Turn

if TYPE_CHECKING:
    from agl_slime.support.agl import Span

# Where each instrumentation keeps a thing, in the order of preference.
_VLLM = "llm.hosted_vllm"
_PROMPT_IDS = (names.LIST_PROMPT_IDS, f"{WEAVE_OUTPUT}.prompt_token_ids", f"{_VLLM}.prompt_token_ids")
_RESPONSE_IDS = (
    names.LIST_RESPONSE_IDS,
    f"{WEAVE_OUTPUT}.response_token_ids.0",
    f"{WEAVE_OUTPUT}.choices.0.token_ids",
    f"{WEAVE_OUTPUT}.choices.0.provider_specific_fields.token_ids",
    f"{_VLLM}.response_token_ids",
)
# What a model was asked is under a name that begins with one of these.
_ASKED = (*_PROMPT_IDS, names.INPUT_MESSAGES, names.LEGACY_PROMPT, f"{WEAVE_INPUT}.messages")
_REQUEST_ID = (names.RESPONSE_ID, f"{WEAVE_OUTPUT}.id", f"{_VLLM}.id")
_FINISH = ("gen_ai.completion.0.finish_reason", f"{WEAVE_OUTPUT}.choices.0.finish_reason")


@dataclass(frozen=True)
class ModelCall:
    """A span that may be a model call, with the token ids that it carries (empty when it has none)."""

    span: Span
    prompt_ids: list[int]
    response_ids: list[int]
    request_id: str

    @classmethod
    def of(cls, span: Span) -> ModelCall:
        attributes = span.attributes
        return cls(
            span=span,
            prompt_ids=_ids(attributes, _PROMPT_IDS),
            response_ids=_ids(attributes, _RESPONSE_IDS) or _integers(_vllm_choice(attributes).get("token_ids")),
            request_id=next(
                (value for name in _REQUEST_ID if isinstance(value := attributes.get(name), str) and value), ""
            ),
        )

    @property
    def has_ids(self) -> bool:
        return bool(self.prompt_ids and self.response_ids)

    @property
    def has_text(self) -> bool:
        return has_conversation(self.span.attributes)

    def turn(self) -> Turn:
        """The turn with the ids that the span carries. ``TraceError`` when its log-probs do not fit them."""
        log_probs = self._log_probs()
        if log_probs is not None and len(log_probs) != len(self.response_ids):
            raise TraceError(
                f"span {self.span.span_id} carries {len(log_probs)} log-probs for {len(self.response_ids)} response_token_ids"
            )
        try:
            messages, answers = request_messages(self.span.attributes), answer_messages(self.span.attributes)
        except TraceError:  # images and the like; messages are for reading here, the ids are what is trained
            messages, answers = [], []
        return Turn(
            prompt_ids=self.prompt_ids,
            response_ids=self.response_ids,
            log_probs=log_probs,
            **self._described(messages, answers),
        )

    def retokenized_turn(self, retokenizer: Retokenizer) -> Turn | None:
        """The turn with the ids of its text; ``None`` when there is no message or no answer. ``TraceError`` when the
        text cannot be read or rendered."""
        messages, answers = request_messages(self.span.attributes), answer_messages(self.span.attributes)
        if not messages or not answers:
            return None
        described = self._described(messages, answers)
        prompt_ids, response_ids = retokenizer.turn(
            messages,
            {"role": "assistant", **answers[0]},
            finish_reason=described["finish_reason"],
            tools=tool_definitions(self.span.attributes),
        )
        return Turn(
            prompt_ids=prompt_ids, response_ids=response_ids, log_probs=None, token_source="retokenized", **described
        )

    def _described(self, messages: list[ChatMessage], answers: list[ChatMessage]) -> dict[str, Any]:
        cached = self.span.attributes.get(names.USAGE_CACHED_TOKENS)
        began, ended = self.span.start_time, self.span.end_time
        return {
            "finish_reason": self._finish_reason(answers),
            "cached_tokens": cached if isinstance(cached, int) and cached > 0 else 0,
            "request_id": self.request_id,
            "text": str(answers[0].get("content") or "") if answers else "",
            "messages": messages or None,
            "latency_s": max(0.0, ended - began) if began is not None and ended is not None else 0.0,
        }

    def _finish_reason(self, answers: list[ChatMessage]) -> str:
        attributes = self.span.attributes
        if names.RESPONSE_FINISH_REASONS in attributes:
            return finish_reason(attributes)
        written = [attributes.get(name) for name in _FINISH] + [answer.get("finish_reason") for answer in answers[:1]]
        written.append(_vllm_choice(attributes).get("finish_reason"))
        return next((str(reason) for reason in written if reason), "stop")

    def _log_probs(self) -> list[float] | None:
        written = self.span.attributes.get(names.LIST_LOG_PROBS)
        if isinstance(written, str):
            content = parse_json(written, names.LIST_LOG_PROBS)
        else:
            listed = _vllm_choice(self.span.attributes).get("logprobs")
            content = listed.get("content") if isinstance(listed, Mapping) else None
        if not content:
            return None
        try:
            return [entry["logprob"] for entry in content]
        except (TypeError, KeyError) as error:
            raise TraceError(
                f"the log-probs of span {self.span.span_id} are not a list of objects with 'logprob'"
            ) from error


def may_be_call(attributes: Mapping[str, Any]) -> bool:
    """Whether there is anything that a model was asked; ``False`` at little cost for rewards, tools and the like."""
    return any(name.startswith(_ASKED) for name in attributes)


def _ids(attributes: Mapping[str, Any], places: Iterable[str]) -> list[int]:
    return next((ids for place in places if (ids := _integers(literal(attributes.get(place))))), [])


def _integers(value: Any) -> list[int]:
    """``value`` as a list of ids; vLLM lists the ids of each choice, of which the first counts. Empty when it is
    something else."""
    if isinstance(value, (list, tuple)) and value:
        if isinstance(value[0], (list, tuple)):
            return _integers(value[0])
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return list(value)
    return []


def _vllm_choice(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = literal(attributes.get(f"{_VLLM}.choices"))
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
