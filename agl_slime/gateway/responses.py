"""OpenAI's responses: the protocol as a translation. ``previous_response_id`` is good within an attempt."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import MOST_LOG_PROBS, Answered, Call, Choice, function_tool, json_constraint, number
from agl_slime.gateway.chat import logprobs
from agl_slime.gateway.messages import Message, read_messages, text_of
from agl_slime.gateway.protocol import NOTHING_KEPT, Decode, Kept, Protocol, Stream, sse
from agl_slime.tokens.answer import ToolCall

_IMPOSED = ("temperature", "top_p")
_IGNORED = "metadata user store service_tier safety_identifier prompt_cache_key prompt_cache_options reasoning"
_IGNORED += " prompt_cache_retention parallel_tool_calls stream_options truncation max_tool_calls context_management"
_IGNORED += " moderation client_metadata"
_HONOURED = "input instructions model tools tool_choice max_output_tokens previous_response_id text stream top_logprobs"
_HONOURED += " include"
_CUSTOM = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_JOIN = "__"  # between a namespace and the name of its tool, where the model sees one name


class Responses(Protocol):
    honoured, ignored = frozenset((*_HONOURED.split(), *_IMPOSED)), frozenset(_IGNORED.split())
    prefix = "resp_"
    grows = "input"

    def read(self, body: Mapping[str, Any], kept: Kept = NOTHING_KEPT) -> Call:
        self.check_fields(body)
        messages: list[Message] = []
        if instructions := body.get("instructions"):
            messages.append({"role": "system", "content": text_of(instructions, "instructions")})
        own = len(messages)
        if previous := body.get("previous_response_id"):
            if not isinstance(previous, str) or previous not in kept:
                told = f"previous_response_id {previous!r:.80} is no answer of this rollout"
                raise GatewayRequestError(told, param="previous_response_id")
            messages += kept[previous]
        given = body.get("input") or []
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not (given or messages):
            raise GatewayRequestError("input must be a text or a list of at least one item", param="input")
        tools = tuple(function_tool(name, *told) for name, _, _, *told in _tools(body))
        return Call(
            messages=[*messages, *self.more(given, kept)] if given else messages,
            kept=own if body.get("store") is not False else None,
            model=str(body.get("model") or ""),
            tools=tools,
            tool_choice=_tool_choice(body.get("tool_choice"), bool(tools)),
            max_tokens=number(body, "max_output_tokens", least=1),
            asked=self.asked(body),
            constraint=_constraint(body),
            top_log_probs=number(body, "top_logprobs", most=MOST_LOG_PROBS) or 0,
            stream=bool(body.get("stream")),
        )

    def more(self, items: list[Any], kept: Kept) -> list[Message]:
        return read_messages(_messages(items, kept))

    def answer(self, body: Mapping[str, Any], answered: Answered, decode: Decode) -> dict[str, Any]:
        choice = answered.choices[0]
        items = list(_items(answered.id, choice, body, decode))
        length = choice.finish == "length"
        return {
            **_head(answered, body, "incomplete" if length else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "output": items,
            "usage": _usage(answered),
        }

    def stream(self, body: Mapping[str, Any], head: Answered, decode: Decode) -> Stream:
        return _ResponseStream(body, head, decode)


class _ResponseStream(Stream):
    _number = -1
    _item: dict[str, Any] | None = None
    _place = -1
    _told = ""

    def begin(self) -> Iterator[bytes]:
        response = {**_head(self.head, self.body, "in_progress"), "output": [], "usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def more(self, index: int, reasoning: str, content: str) -> Iterator[bytes]:
        for kind, text in (("reasoning", reasoning), ("message", content)):
            if not text:
                continue
            if self._item is None or self._item["type"] != kind:
                yield from self._shut()
                yield from self._begin(kind)
            self._told += text
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            more = {} if kind == "reasoning" else {"logprobs": []}
            yield self._event(f"response.{name}.delta", **self._at(), content_index=0, delta=text, **more)

    def end(self, answered: Answered) -> Iterator[bytes]:
        final = Responses().answer(self.body, answered, self.decode)
        told = {item["id"]: item for item in final["output"]}
        yield from self._shut(told)
        for item in final["output"]:
            if item["type"] not in ("function_call", "custom_tool_call"):
                continue
            name, key = ("function_call_arguments", "arguments") if item["type"] == "function_call" else (None, "input")
            self._place += 1
            empty = {**item, key: "", **({"status": "in_progress"} if name else {})}
            yield self._event("response.output_item.added", output_index=self._place, item=empty)
            self._item = item
            prefix = f"response.{name or 'custom_tool_call_input'}"
            yield self._event(f"{prefix}.delta", **self._at(), delta=item[key])
            done = {key: item[key], **({"name": item["name"]} if name else {})}
            yield self._event(f"{prefix}.done", **self._at(), **done)
            yield self._event("response.output_item.done", output_index=self._place, item=item)
        # also of an answer that a limit has cut, whose status says so: SGLang's event, and SDKs raise on OpenAI's
        yield self._event("response.completed", response=final)

    def error(self, refusal: GatewayRequestError) -> bytes:
        return self._event("error", code=refusal.code, message=str(refusal), param=refusal.param)

    def _begin(self, kind: str) -> Iterator[bytes]:
        self._place, self._told = self._place + 1, ""
        self._item = _reasoning(self.head.id, "") if kind == "reasoning" else _message(self.head.id, "", "in_progress")
        self._item["content"] = []
        yield self._event("response.output_item.added", output_index=self._place, item=self._item)
        part = _text("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        yield self._event("response.content_part.added", **self._at(), content_index=0, part=part)

    def _shut(self, told: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        if self._item is None:
            return
        kind, made = self._item["type"], self._item["id"]
        item = (told or {}).get(made)
        if item is None:
            item = _reasoning(self.head.id, self._told) if kind == "reasoning" else _message(self.head.id, self._told)
        part = item["content"][0]
        if kind == "reasoning":
            yield self._event("response.reasoning_text.done", **self._at(), content_index=0, text=part["text"])
        else:
            logprobs = {"logprobs": part["logprobs"]}
            yield self._event("response.output_text.done", **self._at(), content_index=0, text=part["text"], **logprobs)
        yield self._event("response.content_part.done", **self._at(), content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=self._place, item=item)
        self._item = None

    def _at(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._place}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)


def _head(answered: Answered, body: Mapping[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": answered.id,
        "object": "response",
        "created_at": answered.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": answered.model,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "metadata": body.get("metadata") or {},
    }


def _items(made: str, choice: Choice, body: Mapping[str, Any], decode: Decode) -> Iterator[dict[str, Any]]:
    if choice.reasoning:
        yield _reasoning(made, choice.reasoning)
    if choice.content or not (choice.calls or choice.reasoning):
        wanted = "message.output_text.logprobs" in (body.get("include") or ())
        told = logprobs(choice, decode)["content"] if wanted else []
        yield _message(made, choice.content, "incomplete" if choice.finish == "length" else "completed", told)
    kinds = {name: (kind, namespace) for name, kind, namespace, *_ in _tools(body)}
    for at, call in enumerate(choice.calls):
        yield _call(f"fc_{made}_{at}", call, *kinds.get(call.name, ("function", "")))


def _call(made: str, call: ToolCall, kind: str, namespace: str) -> dict[str, Any]:
    name = call.name.removeprefix(namespace + _JOIN) if namespace else call.name
    head = {"id": made, "call_id": call.id, "name": name, "status": "completed"}
    if kind == "custom":
        head.pop("status")
        return {**head, "type": "custom_tool_call", "input": str(call.arguments.get("input", ""))}
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {**head, "type": "function_call", "arguments": arguments, **({"namespace": namespace} if namespace else {})}


def _reasoning(made: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{made}", "type": "reasoning", "summary": [], "content": content}


def _message(made: str, text: str, status: str = "completed", logprobs: Any = ()) -> dict[str, Any]:
    content = [{**_text(text), "logprobs": list(logprobs)}]
    return {"id": f"msg_{made}", "type": "message", "role": "assistant", "status": status, "content": content}


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(answered: Answered) -> dict[str, Any]:
    return {
        "input_tokens": answered.prompt_tokens,
        "input_tokens_details": {"cached_tokens": answered.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answered.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": answered.prompt_tokens + answered.output_tokens,
    }


# -- reading ----------------------------------------------------------------------------------------------------------


def _messages(items: list[Any], kept: Kept) -> list[Message]:
    """Items as chat messages: what the model gave in one answer (reasoning, a text, calls) is one of those."""
    messages: list[Message] = []
    answer: Message | None = None
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "item_reference":
            item = _referred(item.get("id"), kept, where)
            kind = item["type"]
        ours = kind in ("reasoning", "function_call", "custom_tool_call")
        if ours or (kind == "message" and item.get("role") == "assistant"):
            if answer is None or (kind in ("message", "reasoning") and answer.get("tool_calls")):
                answer = {"role": "assistant", "content": ""}
                messages.append(answer)
            _add(answer, item, str(kind), where)
            continue
        answer = None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind in ("function_call_output", "custom_tool_call_output"):
            text = text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": text})
        else:
            raise GatewayRequestError(f"{where} is of type {kind!r}, which is not served here", param=where)
    return messages


def _referred(made: Any, kept: Kept, where: str) -> dict[str, Any]:
    """The item of an earlier answer that has this id, as ``_items`` gives them."""
    kind, _, rest = made.partition("_") if isinstance(made, str) else ("", "", "")
    answer, _, number = rest.rpartition("_") if kind == "fc" else (rest, "", "")
    if answer in kept:
        served = kept[answer][-1]
        if kind == "msg":
            return _message(answer, served["content"])
        if kind == "rs":
            return _reasoning(answer, served.get("reasoning_content", ""))
        if number.isdecimal() and int(number) < len(calls := served.get("tool_calls", ())):
            return {"type": "function_call", "call_id": calls[int(number)]["id"], **calls[int(number)]["function"]}
    raise GatewayRequestError(f"{where} refers to {made!r:.80}, which is no item of this rollout", param=where)


def _add(answer: Message, item: Mapping[str, Any], kind: str, where: str) -> None:
    if kind == "message":
        answer["content"] += text_of(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list):
            raise GatewayRequestError(f"{where}.content must be a list of parts, got {parts!r:.80}", param=where)
        texts = (str(part.get("text") or "") for part in parts if isinstance(part, Mapping))
        answer["reasoning_content"] = answer.get("reasoning_content", "") + "".join(texts)
    else:
        namespace = item.get("namespace")
        name = f"{namespace}{_JOIN}{item.get('name')}" if namespace else item.get("name")
        arguments = {"input": item.get("input")} if kind == "custom_tool_call" else item.get("arguments")
        call = {"id": item.get("call_id"), "function": {"name": name, "arguments": arguments}}
        answer.setdefault("tool_calls", []).append(call)


def _tools(body: Mapping[str, Any]) -> Iterator[tuple[str, str, str, Any, Any]]:
    """Name, kind, namespace, description and parameters of each tool that the client runs. Those that OpenAI's servers
    run are left out."""
    for at, tool in enumerate(body.get("tools") or []):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if not isinstance(tool, Mapping) or not isinstance(kind, str):
            raise GatewayRequestError(f"tools[{at}] must be an object with a type", param="tools")
        inner = tool.get("tools") or [] if kind == "namespace" else [tool]
        if not isinstance(inner, list) or not all(isinstance(one, Mapping) for one in inner):
            raise GatewayRequestError(f"tools[{at}].tools must be a list of objects", param="tools")
        namespace = str(tool.get("name") or "") if kind == "namespace" else ""
        for one in inner:
            name = one.get("name")
            if one.get("type") not in ("function", "custom") or not isinstance(name, str):
                continue
            schema = _CUSTOM if one["type"] == "custom" else one.get("parameters")
            full = f"{namespace}{_JOIN}{name}" if namespace else name
            yield full, one["type"], namespace, one.get("description"), schema


def _tool_choice(value: Any, tools: bool) -> str:
    if value in (None, "auto", "none", "required"):
        return (value or "auto") if tools else "none"
    if (
        isinstance(value, Mapping)
        and value.get("type") in ("function", "custom")
        and isinstance(value.get("name"), str)
    ):
        return value["name"]
    told = "auto, none, required or a function with its name"
    raise GatewayRequestError(f"tool_choice must be {told}, got {value!r:.80}", param="tool_choice")


def _constraint(body: Mapping[str, Any]) -> dict[str, Any]:
    wanted = (body.get("text") or {}).get("format") or {}
    kind = wanted.get("type", "text") if isinstance(wanted, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return json_constraint({"type": "object"})
    if kind == "json_schema" and isinstance(wanted.get("schema"), Mapping):
        return json_constraint(wanted["schema"])
    raise GatewayRequestError("text.format must be text, json_object, or json_schema with its schema", param="text")
