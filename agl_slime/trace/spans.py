"""Reading the model calls of one attempt from Agent Lightning spans, whoever wrote them.

Three conventions are read, the first that occurs in an attempt wins, so that one call seen by two instrumentations is one turn:

1. ours: packed ids and log-probs (``agl_slime.trace.turn``);
2. token lists: ``prompt_token_ids`` / ``response_token_ids``, as Agent Lightning's own instrumentation of vLLM, LiteLLM and Weave writes them, with
log-probs where they are there. The
   ids are the engine's. (vLLM's log-probs are those before temperature unless it is told otherwise.)
3. text: ``gen_ai.prompt.N.*`` and ``gen_ai.completion.N.*``, or ``gen_ai.input.messages`` and ``gen_ai.output.messages``. Tokenised again through the
chat template, marked
   ``retokenized``, without log-probs.

Calls beneath a reward span (a judge) are no turns of the policy.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agl_slime.errors import TraceError
from agl_slime.trace import attributes as names
from agl_slime.trace.retokenize import Retokenizer
from agl_slime.trace.turn import Turn, decode_turns, finish_reason, is_packed, parse_json

if TYPE_CHECKING:
    from agl_slime._agl import Span
    from agl_slime.tokenizer import ChatTokenizer

Convention = Literal["packed", "lists", "text"]

# Where each convention keeps a thing, in the order of preference; the names are those of agentlightning/adapter/triplet.py.
_WEAVE_IN, _WEAVE_OUT = "agentlightning.operation.input", "agentlightning.operation.output"
_VLLM = "llm.hosted_vllm"
_PROMPT_IDS = (names.LIST_PROMPT_IDS, f"{_WEAVE_OUT}.prompt_token_ids", f"{_VLLM}.prompt_token_ids")
_RESPONSE_IDS = (
    names.LIST_RESPONSE_IDS,
    f"{_WEAVE_OUT}.response_token_ids.0",
    f"{_WEAVE_OUT}.choices.0.token_ids",
    f"{_WEAVE_OUT}.choices.0.provider_specific_fields.token_ids",
    f"{_VLLM}.response_token_ids",
)
_RESPONSE_ID = (names.RESPONSE_ID, f"{_WEAVE_OUT}.id", f"{_VLLM}.id")
_FINISH = ("gen_ai.completion.0.finish_reason", f"{_WEAVE_OUT}.choices.0.finish_reason")
_REWARD_PREFIX = "agentlightning.reward"


@dataclass(frozen=True)
class TurnsRead:
    """The turns of an attempt in order, the convention that they were written in, and how many other model calls there were that are not turns."""

    turns: tuple[Turn, ...]
    convention: Convention | None
    ignored_calls: int = 0


def spans_of_attempt(spans: Iterable[Span], attempt_id: str | None = None) -> list[Span]:
    """The spans of one attempt by sequence id, each once. Without ``attempt_id``, of the attempt that began last.

    A worker that was given up may still write spans to its dead attempt, so an attempt is as late as its earliest span. Raises ``TraceError`` when
    several attempts are there and their spans have no start times.
    """
    spans = list(spans)
    if attempt_id is None:
        attempt_id = _latest_attempt(spans)
    by_id = {span.span_id: span for span in reversed(spans) if span.attempt_id == attempt_id}  # an exporter may deliver a span twice
    return sorted(by_id.values(), key=lambda span: (span.sequence_id, span.start_time or 0.0))


def _latest_attempt(spans: Sequence[Span]) -> str | None:
    began: dict[str, float] = {}
    for span in spans:
        if span.start_time is not None:
            began[span.attempt_id] = min(span.start_time, began.get(span.attempt_id, span.start_time))
    attempts = {span.attempt_id for span in spans}
    if len(attempts) > 1 and attempts != set(began):
        raise TraceError(f"spans of {len(attempts)} attempts, not all with start times; name the attempt to read with attempt_id")
    return max(attempts, key=lambda attempt: began.get(attempt, 0.0), default=None)


def read_turns(spans: Sequence[Span], tokenizer: ChatTokenizer | None = None, *, is_policy_call: Callable[[Span], bool] | None = None) -> TurnsRead:
    """The turns among ``spans``, which are those of one attempt in order (``spans_of_attempt``).

    ``tokenizer`` is needed for text-only traces alone. ``is_policy_call`` leaves out calls to other models in the second and third convention, whose
    spans do not say whether the policy answered; without it every call counts. Raises ``TraceError`` when a span is damaged or a text-only trace
    comes without tokenizer.
    """
    calls = _calls(spans, is_policy_call)
    if any(is_packed(span.attributes) for span in spans):
        return TurnsRead(tuple(decode_turns(spans)), "packed", len(calls))
    with_ids = [call for call in calls if call.has_ids]
    if with_ids:
        return TurnsRead(tuple(_turn_from_lists(call) for call in with_ids), "lists", len(calls) - len(with_ids))
    with_text = [call for call in calls if call.has_text]
    if not with_text:
        return TurnsRead((), None, len(calls))
    if tokenizer is None:
        raise TraceError("the trace has text but no token ids; a tokenizer is needed to tokenise it again")
    retokenizer = Retokenizer(tokenizer)
    return TurnsRead(tuple(_turn_from_text(call, retokenizer) for call in with_text), "text", len(calls) - len(with_text))


# -- which spans are calls ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """One model call of the second or third convention, as far as its span tells."""

    span: Span
    prompt_ids: list[int]
    response_ids: list[int]
    messages: list[dict[str, Any]]
    answers: list[dict[str, Any]]
    request_id: str

    @property
    def has_ids(self) -> bool:
        return bool(self.prompt_ids and self.response_ids)

    @property
    def has_text(self) -> bool:
        return bool(self.messages and self.answers)


def _calls(spans: Sequence[Span], is_policy_call: Callable[[Span], bool] | None) -> list[_Call]:
    """Each call once: a proxy and the client's instrumentation write nested spans of the same call, with the same response id or with none."""
    by_id = {span.span_id: span for span in spans}
    taken: list[_Call] = []
    taken_ids: set[str] = set()
    taken_spans: dict[str, _Call] = {}
    taken_ancestors: dict[str, _Call] = {}  # span id -> the call that was found beneath it
    for span in spans:
        if is_packed(span.attributes) or (is_policy_call is not None and not is_policy_call(span)):
            continue
        call = _read_call(span)
        if not (call.has_ids or call.has_text) or (call.request_id and call.request_id in taken_ids):
            continue
        ancestors = list(_ancestors(span, by_id))
        if any(_is_reward(above) for above in ancestors):
            continue
        nested = [taken_spans[above.span_id] for above in ancestors if above.span_id in taken_spans]
        if span.span_id in taken_ancestors:
            nested.append(taken_ancestors[span.span_id])
        if any(not (call.request_id and other.request_id) for other in nested):
            continue
        taken.append(call)
        taken_spans[span.span_id] = call
        taken_ancestors.update((above.span_id, call) for above in ancestors)
        if call.request_id:
            taken_ids.add(call.request_id)
    return taken


def _ancestors(span: Span, by_id: Mapping[str, Span]) -> Iterator[Span]:
    seen = {span.span_id}
    while (above := by_id.get(span.parent_id or "")) is not None and above.span_id not in seen:
        seen.add(above.span_id)
        yield above
        span = above


def _is_reward(span: Span) -> bool:
    named = span.attributes.get("agentlightning.operation.name") == _REWARD_PREFIX
    return named or any(key.startswith(_REWARD_PREFIX) for key in span.attributes)


def _read_call(span: Span) -> _Call:
    attributes = span.attributes
    return _Call(
        span=span,
        prompt_ids=_ids(attributes, _PROMPT_IDS),
        response_ids=_ids(attributes, _RESPONSE_IDS) or _integers(_vllm_choice(attributes).get("token_ids")),
        messages=_prompt_messages(attributes),
        answers=_answer_messages(attributes),
        request_id=next((value for name in _RESPONSE_ID if isinstance(value := attributes.get(name), str) and value), ""),
    )


# -- token lists -------------------------------------------------------------------------------------------------------------------------


def _turn_from_lists(call: _Call) -> Turn:
    log_probs = _list_log_probs(call)
    if log_probs is not None and len(log_probs) != len(call.response_ids):
        raise TraceError(f"span {call.span.span_id} carries {len(log_probs)} log-probs for {len(call.response_ids)} response_token_ids")
    return Turn(
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        log_probs=log_probs,
        finish_reason=_call_finish_reason(call),
        cached_tokens=_count(call.span.attributes.get(names.USAGE_CACHED_TOKENS)),
        request_id=call.request_id,
        text=str(call.answers[0].get("content") or "") if call.answers else "",
        messages=call.messages or None,
        latency_s=_latency(call.span),
    )


def _list_log_probs(call: _Call) -> list[float] | None:
    written = call.span.attributes.get(names.LIST_LOG_PROBS)
    if isinstance(written, str):
        content = parse_json(written, names.LIST_LOG_PROBS)
    else:
        listed = _vllm_choice(call.span.attributes).get("logprobs")
        content = listed.get("content") if isinstance(listed, Mapping) else None
    if not content:
        return None
    try:
        return [entry["logprob"] for entry in content]
    except (TypeError, KeyError) as error:
        raise TraceError(f"the log-probs of span {call.span.span_id} are not a list of objects with 'logprob'") from error


def _ids(attributes: Mapping[str, Any], places: Iterable[str]) -> list[int]:
    return next((ids for place in places if (ids := _integers(_literal(attributes.get(place))))), [])


def _integers(value: Any) -> list[int]:
    """``value`` as a list of ids; vLLM lists the ids of each choice, of which the first counts. Empty when it is something else."""
    if isinstance(value, (list, tuple)) and value:
        if isinstance(value[0], (list, tuple)):
            return _integers(value[0])
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return list(value)
    return []


def _literal(value: Any) -> Any:
    """LiteLLM writes lists as the text of a Python or JSON value."""
    if isinstance(value, str) and value[:1] in "[{":
        try:
            return json.loads(value)
        except ValueError:
            try:
                return ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return value
    return value


def _vllm_choice(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = _literal(attributes.get(f"{_VLLM}.choices"))
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}


# -- text --------------------------------------------------------------------------------------------------------------------------------


def _turn_from_text(call: _Call, retokenizer: Retokenizer) -> Turn:
    reason = _call_finish_reason(call)
    answer = {"role": "assistant", **call.answers[0]}
    prompt_ids, response_ids = retokenizer.turn(call.messages, answer, finish_reason=reason, tools=_tools(call.span.attributes))
    return Turn(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        log_probs=None,
        finish_reason=reason,
        cached_tokens=_count(call.span.attributes.get(names.USAGE_CACHED_TOKENS)),
        request_id=call.request_id,
        text=str(answer.get("content") or ""),
        messages=call.messages,
        latency_s=_latency(call.span),
        token_source="retokenized",
    )


def _prompt_messages(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    if isinstance(attributes.get(names.INPUT_MESSAGES), str):
        system = _otel_messages(attributes, names.SYSTEM_INSTRUCTIONS)
        return system + _otel_messages(attributes, names.INPUT_MESSAGES)
    return _flat_messages(attributes, names.LEGACY_PROMPT) or _flat_messages(attributes, f"{_WEAVE_IN}.messages")


def _answer_messages(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    if isinstance(attributes.get(names.OUTPUT_MESSAGES), str):
        return _otel_messages(attributes, names.OUTPUT_MESSAGES)
    choices = _flat_messages(attributes, names.LEGACY_COMPLETION)
    if choices:
        return choices
    return [choice["message"] for choice in _unflatten(attributes, f"{_WEAVE_OUT}.choices") if isinstance(choice.get("message"), dict)]


def _otel_messages(attributes: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """OpenTelemetry's messages (``role`` and ``parts``) or plain chat messages, written as JSON; the system instructions are a list of parts."""
    if not isinstance(attributes.get(name), str):
        return []
    written = parse_json(str(attributes[name]), name)
    if not isinstance(written, list) or not all(isinstance(message, dict) for message in written):
        raise TraceError(f"{name} must be a JSON list of messages")
    if name == names.SYSTEM_INSTRUCTIONS:
        written = [{"role": "system", "parts": written}]
    return [_from_parts(message) if "parts" in message else _plain(message) for message in written]


def _from_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": str(message.get("role", "user")), "content": ""}
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "text":
            plain["content"] += str(part.get("content", ""))
        elif kind == "reasoning":
            plain["reasoning_content"] = plain.get("reasoning_content", "") + str(part.get("content", ""))
        elif kind == "tool_call":
            call = {"name": str(part.get("name", "")), "arguments": _literal(part.get("arguments"))}
            plain.setdefault("tool_calls", []).append({"id": str(part.get("id", "")), "type": "function", "function": call})
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result", ""))
            plain["content"] += result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            plain["tool_call_id"] = str(part.get("id", ""))
        else:
            raise TraceError(f"a message of the trace has a part of type {kind!r}; only text and tool calls can be tokenised again")
    if "finish_reason" in message:
        plain["finish_reason"] = message["finish_reason"]
    return plain


def _flat_messages(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    return [_plain(message) for message in _unflatten(attributes, prefix)]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message as templates expect it: text content, tool calls with their arguments as an object."""
    plain = dict(message)
    plain["content"] = _text(plain.get("content"))
    calls = plain.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = _literal(function.get("arguments"))
    return {"id": str(call.get("id", "")), "type": "function", "function": {"name": str(function.get("name", "")), "arguments": arguments}}


def _text(content: Any) -> str:
    parts = _literal(content) if isinstance(content, str) and content.startswith("[{") else content
    if isinstance(parts, list) and all(isinstance(part, Mapping) and "type" in part for part in parts):
        other = next((part["type"] for part in parts if part["type"] != "text"), None)
        if other is not None:
            raise TraceError(f"a message of the trace has a part of type {other!r}; only text can be tokenised again")
        return "".join(str(part.get("text", "")) for part in parts)
    return "" if content is None else str(content)


def _tools(attributes: Mapping[str, Any]) -> list[Any] | None:
    definitions = attributes.get("gen_ai.tool.definitions")
    if isinstance(definitions, str):
        return parse_json(definitions, "gen_ai.tool.definitions")
    functions = _unflatten(attributes, "gen_ai.request.functions")
    if not functions:
        return None
    return [{"type": "function", "function": {**function, "parameters": _literal(function.get("parameters", {}))}} for function in functions]


def _unflatten(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """``prefix.0.a.b: v`` … as a list of nested objects, by number."""
    items: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if not key.startswith(prefix + "."):
            continue
        number, *path = key[len(prefix) + 1 :].split(".")
        if not number.isdigit() or not path:
            continue
        node = items.setdefault(int(number), {})
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise TraceError(f"attribute {key} stands both for a value and for something that has parts")
        node[path[-1]] = value
    return [_numbered_to_lists(items[number]) for number in sorted(items)]


def _numbered_to_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    converted = {key: _numbered_to_lists(value) for key, value in node.items()}
    if converted and all(key.isdigit() for key in converted):
        return [converted[key] for key in sorted(converted, key=int)]
    return converted


# -- both --------------------------------------------------------------------------------------------------------------------------------


def _call_finish_reason(call: _Call) -> str:
    attributes = call.span.attributes
    if names.RESPONSE_FINISH_REASONS in attributes:
        return finish_reason(attributes)
    written = [attributes.get(name) for name in _FINISH] + [answer.get("finish_reason") for answer in call.answers[:1]]
    written.append(_vllm_choice(attributes).get("finish_reason"))
    return next((str(reason) for reason in written if reason), "stop")


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _latency(span: Span) -> float:
    return max(0.0, span.end_time - span.start_time) if span.start_time is not None and span.end_time is not None else 0.0
