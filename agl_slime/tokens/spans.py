"""The turns of one attempt from Agent Lightning spans of any writer.

Three conventions are read. Only the best one of an attempt counts: a call that is recorded twice is one turn.

1. this package's: packed ids and log-probs (``agl_slime.tokens.turn``);
2. token lists: ``prompt_token_ids`` and ``response_token_ids`` of Agent Lightning's instrumentation, with log-probs
  if present. The ids are the engine's. (vLLM's log-probs are taken before temperature by default.)
3. text: ``gen_ai.prompt.N.*`` and ``gen_ai.completion.N.*``, or ``gen_ai.input.messages`` and
  ``gen_ai.output.messages``. Re-tokenized through the chat template, marked ``retokenized``, without log-probs.

Calls beneath a reward span (a judge's) are not turns of the policy.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agl_slime.errors import PromptError, TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.reward import REWARD_PREFIX
from agl_slime.tokens.span_codec import decode_turns, finish_reason, is_packed, parse_json
from agl_slime.tokens.tokenizer import ChatTokenizer, added_token_at, ends_with_added_token, render_chat
from agl_slime.tokens.turn import Turn

if TYPE_CHECKING:
    from agl_slime.support.agl import Span

Message = Mapping[str, Any]
ChatMessage = dict[str, Any]
Attributes = Mapping[str, Any]

_LITELLM = "llm.hosted_vllm"
_ANSWERED = re.compile(r"gen_ai\.completion\.\d+\.")
_ASKED = re.compile(r"gen_ai\.prompt\.\d+\.")
# OpenTelemetry's spans of agents and tools carry the messages of the calls beneath them too
_MODEL_OPERATIONS = frozenset({None, "chat", "text_completion", "generate_content"})


def spans_of_attempt(spans: Iterable[Span], attempt_id: str | None = None) -> list[Span]:
    """The spans of one attempt by sequence id, each once. By default the attempt that began last. A lost worker may
    still write spans to its dead attempt, so an attempt begins at its earliest span. Raises ``TraceError`` when there
    are several attempts and their spans have no start times."""
    spans = list(spans)
    if attempt_id is None:
        attempt_id = _latest_attempt(spans)
    of_attempt = [span for span in reversed(spans) if span.attempt_id == attempt_id]
    by_id = {span.span_id: span for span in of_attempt}  # an exporter may deliver a span twice
    return sorted(by_id.values(), key=lambda span: (span.sequence_id, span.start_time or 0.0))


def _latest_attempt(spans: Sequence[Span]) -> str | None:
    began: dict[str, float] = {}
    for span in spans:
        if span.start_time is not None:
            began[span.attempt_id] = min(span.start_time, began.get(span.attempt_id, span.start_time))
    attempts = {span.attempt_id for span in spans}
    if len(attempts) > 1 and attempts != set(began):
        raise TraceError(f"spans of {len(attempts)} attempts lack start times; name the attempt with attempt_id")
    return max(attempts, key=lambda attempt: began.get(attempt, 0.0), default=None)


def read_turns(
    spans: Sequence[Span],
    tokenizer: ChatTokenizer | None = None,
    *,
    is_policy_call: Callable[[Span], bool] | None = None,
) -> tuple[Turn, ...]:
    """The turns in ``spans``, the ordered spans of one attempt (``spans_of_attempt``).

    ``tokenizer`` is needed for text-only traces only. ``is_policy_call`` leaves out calls to other models in the
    second and third convention, whose spans do not say whether the policy answered; without it every call counts.
    Raises ``TraceError`` when a span is damaged or a text-only trace comes without tokenizer.
    """
    if any(is_packed(span.attributes) for span in spans):
        return tuple(decode_turns(spans))
    calls = model_calls(spans, is_policy_call)
    if any(call.has_ids for call in calls):
        return tuple(call.turn() for call in calls if call.has_ids)
    if not calls:
        return ()
    if tokenizer is None:
        raise TraceError("the trace has text but no token ids; a tokenizer is needed to re-tokenize it")
    retokenizer = Retokenizer(tokenizer)
    return tuple(turn for call in calls if (turn := call.retokenized_turn(retokenizer)) is not None)


@dataclass(frozen=True)
class ModelCall:
    """A span that may be a model call, with its token ids or empty lists."""

    span: Span
    prompt_ids: list[int]
    response_ids: list[int]
    request_id: str

    @classmethod
    def from_span(cls, span: Span) -> ModelCall:
        attributes = span.attributes
        prompt = (attributes.get(name) for name in (names.LIST_PROMPT_IDS, f"{_LITELLM}.prompt_token_ids"))
        response = (attributes.get(name) for name in (names.LIST_RESPONSE_IDS, f"{_LITELLM}.response_token_ids"))
        ids = (attributes.get(name) for name in (names.RESPONSE_ID, f"{_LITELLM}.id"))
        return cls(
            span,
            _first_integers(prompt),
            _first_integers((*response, _litellm_choice(attributes).get("token_ids"))),
            next((value for value in ids if isinstance(value, str) and value), ""),
        )

    @property
    def has_ids(self) -> bool:
        return bool(self.prompt_ids and self.response_ids)

    @property
    def has_text(self) -> bool:
        """Whether there are messages and an answer, readable or not."""
        attributes = self.span.attributes
        has_prompt = names.INPUT_MESSAGES in attributes or any(map(_ASKED.match, attributes))
        return has_prompt and (names.OUTPUT_MESSAGES in attributes or any(map(_ANSWERED.match, attributes)))

    def turn(self) -> Turn:
        """The turn with the span's ids. ``TraceError`` when its log-probs do not fit them."""
        log_probs = self._log_probs()
        if log_probs is not None and len(log_probs) != len(self.response_ids):
            n = len(self.response_ids)
            raise TraceError(f"span {self.span.span_id} carries {len(log_probs)} log-probs for {n} response ids")
        try:
            messages, answers = self._messages()
        except TraceError:  # images, for example; only the ids are trained, messages are for people
            messages, answers = [], []
        return self._build_turn(self.prompt_ids, self.response_ids, messages, answers, log_probs=log_probs)

    def retokenized_turn(self, retokenizer: Retokenizer) -> Turn | None:
        """The turn with the ids of its text; ``None`` without message or answer, ``TraceError`` for unreadable text."""
        messages, answers = self._messages()
        if not messages or not answers:
            return None
        tools = self.span.attributes.get("gen_ai.tool.definitions")
        ids = retokenizer.turn(
            messages,
            {"role": "assistant", **answers[0]},
            finish_reason=self._finish_reason(answers),
            tools=parse_json(tools, "gen_ai.tool.definitions") if isinstance(tools, str) else None,
        )
        return self._build_turn(*ids, messages, answers, token_source="retokenized")

    def _messages(self) -> tuple[list[ChatMessage], list[ChatMessage]]:
        """The messages sent to the model, and its answers, one per choice. ``TraceError`` for a damaged message or one
        with more than text and tool calls."""
        attributes = self.span.attributes
        if names.INPUT_MESSAGES in attributes:
            prompt = [*_in_json(attributes, names.SYSTEM_INSTRUCTIONS), *_in_json(attributes, names.INPUT_MESSAGES)]
        else:
            prompt = _unflatten(attributes, names.LEGACY_PROMPT)
        if names.OUTPUT_MESSAGES in attributes:
            return prompt, _in_json(attributes, names.OUTPUT_MESSAGES)
        return prompt, _unflatten(attributes, names.LEGACY_COMPLETION)

    def _build_turn(
        self, prompt_ids: Any, response_ids: Any, messages: list[ChatMessage], answers: list[ChatMessage], **rest: Any
    ) -> Turn:
        cached = self.span.attributes.get(names.USAGE_CACHED_TOKENS)
        began, ended = self.span.start_time, self.span.end_time
        return Turn(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            finish_reason=self._finish_reason(answers),
            cached_tokens=cached if isinstance(cached, int) and cached > 0 else 0,
            request_id=self.request_id,
            text=str(answers[0].get("content") or "") if answers else "",
            messages=tuple(messages) or None,
            latency_s=max(0.0, ended - began) if began is not None and ended is not None else 0.0,
            **rest,
        )

    def _finish_reason(self, answers: list[ChatMessage]) -> str:
        attributes = self.span.attributes
        if names.RESPONSE_FINISH_REASONS in attributes:
            return finish_reason(attributes)
        written = [answer.get("finish_reason") for answer in answers[:1]]
        return next(filter(None, [*written, _litellm_choice(attributes).get("finish_reason")]), "stop")

    def _log_probs(self) -> list[float] | None:
        written = self.span.attributes.get(names.LIST_LOG_PROBS)
        if isinstance(written, str):
            content = parse_json(written, names.LIST_LOG_PROBS)
        else:
            listed = _litellm_choice(self.span.attributes).get("logprobs")
            content = listed.get("content") if isinstance(listed, Mapping) else None
        try:
            return [entry["logprob"] for entry in content] if content else None
        except (TypeError, KeyError) as error:
            raise TraceError(f"the log-probs of span {self.span.span_id} are no list of 'logprob's") from error


def model_calls(spans: Sequence[Span], is_policy_call: Callable[[Span], bool] | None = None) -> list[ModelCall]:
    """The calls of other recorders, each once, calls with token ids first; without calls beneath a reward span (a
    judge). A proxy and the client's instrumentation write nested spans of one call, with one response id or none."""
    by_id = {span.span_id: span for span in spans}
    candidates = (span for span in spans if _may_be_call(span) and (is_policy_call is None or is_policy_call(span)))
    recorded = [call for call in map(ModelCall.from_span, candidates) if call.has_ids or call.has_text]
    calls: list[ModelCall] = []
    request_ids: set[str] = set()
    near: dict[str, list[ModelCall]] = {}  # by the call's span and by each of its ancestors
    for call in sorted(recorded, key=lambda call: not call.has_ids):
        span_id, above = call.span.span_id, [span.span_id for span in _ancestors(call.span, by_id)]
        if call.request_id in request_ids or any(_is_reward(by_id[ancestor]) for ancestor in above):
            continue
        outer = (outer for ancestor in above for outer in near.get(ancestor, ()) if outer.span.span_id == ancestor)
        if any(not (call.request_id and nested.request_id) for nested in (*near.get(span_id, ()), *outer)):
            continue
        calls.append(call)
        for related_id in (span_id, *above):
            near.setdefault(related_id, []).append(call)
        if call.request_id:
            request_ids.add(call.request_id)
    return calls


def _may_be_call(span: Span) -> bool:
    attributes = span.attributes
    if is_packed(attributes) or attributes.get(names.OPERATION_NAME) not in _MODEL_OPERATIONS:
        return False
    prefixes = (names.LIST_PROMPT_IDS, _LITELLM, names.INPUT_MESSAGES, names.LEGACY_PROMPT)
    return any(name.startswith(prefixes) for name in attributes)


def _ancestors(span: Span, by_id: Mapping[str, Span]) -> Iterator[Span]:
    visited = {span.span_id}
    while (above := by_id.get(span.parent_id or "")) is not None and above.span_id not in visited:
        visited.add(above.span_id)
        yield above
        span = above


def _is_reward(span: Span) -> bool:
    annotated = span.attributes.get("agentlightning.operation.name") == REWARD_PREFIX
    return annotated or any(key.startswith(REWARD_PREFIX) for key in span.attributes)


# -- values ----------------------------------------------------------------------------------------------------------


def _literal(value: Any) -> Any:
    """LiteLLM writes lists as the text of a Python or JSON value."""
    if isinstance(value, str) and value[:1] in "[{":
        for read in (json.loads, ast.literal_eval):
            try:
                return read(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
    return value


def _first_integers(places: Iterable[Any]) -> list[int]:
    return next((ids for place in places if (ids := _integers(_literal(place)))), [])


def _integers(value: Any) -> list[int]:
    """``value`` as a list of ids; vLLM has a list per choice, of which the first counts. Empty for other values."""
    if isinstance(value, (list, tuple)) and value:
        if isinstance(value[0], (list, tuple)):
            return _integers(value[0])
        if all(type(item) is int for item in value):
            return list(value)
    return []


def _litellm_choice(attributes: Attributes) -> Mapping[str, Any]:
    choices = _literal(attributes.get(f"{_LITELLM}.choices"))
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}


# -- messages, as chat templates expect them -------------------------------------------------------------------------


def _in_json(attributes: Attributes, name: str) -> list[ChatMessage]:
    """OpenTelemetry's messages (``role`` and ``parts``) or plain chat messages; system instructions are parts alone."""
    if not isinstance(attributes.get(name), str):
        return []
    written = parse_json(str(attributes[name]), name)
    if not isinstance(written, list) or not all(isinstance(message, dict) for message in written):
        raise TraceError(f"{name} must be a JSON list of messages")
    if name == names.SYSTEM_INSTRUCTIONS:
        written = [{"role": "system", "parts": written}]
    return [_from_parts(message) if "parts" in message else _plain(message) for message in written]


def _from_parts(message: Mapping[str, Any]) -> ChatMessage:
    plain: ChatMessage = {**message, "role": str(message.get("role", "user")), "content": ""}
    for part in plain.pop("parts"):
        kind, content = part.get("type"), str(part.get("content", ""))
        if kind == "text":
            plain["content"] += content
        elif kind == "reasoning":
            plain["reasoning_content"] = plain.get("reasoning_content", "") + content
        elif kind == "tool_call":
            plain.setdefault("tool_calls", []).append(_tool_call(part))
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result", ""))
            plain["content"] += result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            plain["tool_call_id"] = str(part.get("id", ""))
        else:
            raise TraceError(f"a message has a part of type {kind!r}; only text and tool calls can be re-tokenized")
    return plain


def _plain(message: Mapping[str, Any]) -> ChatMessage:
    """A chat message with text content, and the arguments of its tool calls as objects."""
    plain = {**message, "content": _text(message.get("content"))}
    calls = plain.pop("tool_calls", None)
    return {**plain, "tool_calls": [_tool_call(call) for call in calls]} if calls else plain


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    named = {"name": str(function.get("name", "")), "arguments": _literal(function.get("arguments"))}
    return {"id": str(call.get("id", "")), "type": "function", "function": named}


def _text(content: Any) -> str:
    content_parts = _literal(content) if isinstance(content, str) and content.startswith("[{") else content
    if isinstance(content_parts, list) and all(isinstance(part, Mapping) and "type" in part for part in content_parts):
        unsupported = next((part["type"] for part in content_parts if part["type"] != "text"), None)
        if unsupported is not None:
            raise TraceError(f"a message has a part of type {unsupported!r}; only text can be re-tokenized")
        return "".join(str(part.get("text", "")) for part in content_parts)
    return "" if content is None else str(content)


def _unflatten(attributes: Attributes, prefix: str) -> list[ChatMessage]:
    """``prefix.0.a.b: v`` … as a list of messages, by number."""
    from agl_slime.support.agl import group_genai_dict  # imports for seconds

    grouped = group_genai_dict(dict(attributes), prefix)
    return [_plain(message) for message in grouped if isinstance(message, dict)]


@dataclass
class Retokenizer:
    """An encoder of the turns of one text-only rollout. A prompt that begins with the text of an earlier turn (prompt
    and answer) begins with its ids, too: if the whole text were tokenized, BPE could merge across the turns'
    boundaries, and every turn would fork."""

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
