"""Anthropic's messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import Call, CallResult, Choice, json_constraint, number, strings
from agl_slime.gateway.declared import Tools, anthropic_tool, definitions, kind_of
from agl_slime.gateway.errors import THREADS_UNSUPPORTED
from agl_slime.gateway.files import text_of_uri
from agl_slime.gateway.messages import Message, read_messages, system_text, text_of
from agl_slime.gateway.protocol import NO_HISTORIES, Decode, Histories, Protocol, Stream, sse

_IMPOSED = ("temperature", "top_p", "top_k")
_HONOURED = "messages system model tools tool_choice max_tokens stop_sequences stream output_config output_format"
_HONOURED += " chat_template_kwargs thinking reasoning_effort reasoning"
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ERROR_TYPES |= {413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}
_EXPLAINED_CODES = (THREADS_UNSUPPORTED, "tool_reference_unresolved")


class AnthropicMessages(Protocol):
    honoured = frozenset((*_HONOURED.split(), *_IMPOSED))
    prefix = "msg_"
    list_field = "messages"
    orphan_error = (
        "unexpected `tool_use_id` found in `tool_result` blocks: {}. Each `tool_result` block must have a "
        "corresponding `tool_use` block before it"
    )

    def read(self, body: Mapping[str, Any], histories: Histories = NO_HISTORIES) -> Call:
        if body.get("thread"):
            raise _threads_error()
        self.check_fields(body)
        if body.get("max_tokens") is None and not self.counts_only:
            raise GatewayRequestError("max_tokens: Field required", param="max_tokens")
        system = system_text(body.get("system") or "", "system", join="\n")
        items = body.get("messages")
        if not isinstance(items, list) or not items:
            raise GatewayRequestError("messages: at least one message is required", param="messages")
        tools = _tools(body.get("tools"))
        return Call(
            messages=[*([{"role": "system", "content": system}] if system else ()), *_messages(items, tools.loaded)],
            tools=tools.listed,
            loaded=tools.loaded,
            server_tools=tools.server_tools,
            tool_choice=_tool_choice(body.get("tool_choice"), bool(tools.listed or tools.loaded)),
            max_tokens=number(body, "max_tokens", least=1),
            stop=strings(body, "stop_sequences"),
            **self.call_fields(body),
            constraint=_constraint(body),
        )

    def check_headers(self, headers: Mapping[str, str]) -> None:
        if "message-threads" in headers.get("anthropic-beta", ""):  # LiteLLM's proxy drops ``thread``
            raise _threads_error()

    def read_more(self, items: list[Any], histories: Histories) -> list[Message]:
        return _messages(items, None)

    def answer(self, body: Mapping[str, Any], result: CallResult, decode: Decode) -> dict[str, Any]:
        choice = result.choices[0]
        return {**_head(result), "content": [*_blocks(choice)], **_stop(choice), "usage": _usage(result)}

    def stream(self, body: Mapping[str, Any], head: CallResult, decode: Decode) -> Stream:
        return _MessageStream(body, head, decode)

    def error(self, refusal: GatewayRequestError) -> dict[str, Any]:
        return _error(refusal)


class CountTokens(AnthropicMessages):
    """The number of tokens of a request's prompt."""

    counts_only = True


class _MessageStream(Stream):
    _open: str | None = None
    _index = -1

    def begin(self) -> Iterator[bytes]:
        head = {**_head(self.head), "content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message={**head, "usage": _usage(self.head)})

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[bytes]:
        if reasoning:
            yield from self._in("thinking", {"thinking": "", "signature": ""})
            yield self._delta("thinking_delta", thinking=reasoning)
        if content:
            yield from self._in("text", {"text": ""})
            yield self._delta("text_delta", text=content)

    def end(self, result: CallResult) -> Iterator[bytes]:
        choice = result.choices[0]
        for call in choice.calls:
            yield from self._shut()
            yield from self._in("tool_use", {"id": call.id, "name": call.name, "input": {}})
            text = json.dumps(dict(call.arguments), ensure_ascii=False)
            yield self._delta("input_json_delta", partial_json=text)
        yield from self._shut()
        yield _event("message_delta", delta=_stop(choice), usage=_usage(result))
        yield _event("message_stop")

    def keep_alive(self) -> bytes:
        return _event("ping")

    def error(self, refusal: GatewayRequestError) -> bytes:
        return sse(_error(refusal), "error")

    def _in(self, kind: str, empty: dict[str, Any]) -> Iterator[bytes]:
        if self._open != kind:
            yield from self._shut()
            self._open, self._index = kind, self._index + 1
            yield _event("content_block_start", index=self._index, content_block={"type": kind, **empty})

    def _shut(self) -> Iterator[bytes]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._index)
            self._open = None

    def _delta(self, kind: str, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **delta})


def _error(refusal: GatewayRequestError) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    message = f"prompt is too long: {refusal}" if refusal.code == "context_length_exceeded" else str(refusal)
    error: dict[str, Any] = {"type": kind, "message": message}
    if refusal.code in _EXPLAINED_CODES:
        unsupported = {"unsupported": [refusal.param]} if refusal.code == THREADS_UNSUPPORTED else {}
        error["details"] = {"error_code": refusal.code, **unsupported}
    return {"type": "error", "error": error}


def _threads_error() -> GatewayRequestError:
    """The error after which tool runners send whole conversations."""
    message = "threads are not kept here: send the whole conversation without thread and its anthropic-beta header"
    return GatewayRequestError(message, code=THREADS_UNSUPPORTED, param="thread")


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _head(result: CallResult) -> dict[str, Any]:
    return {"id": result.id, "type": "message", "role": "assistant", "model": result.model}


def _blocks(choice: Choice) -> Iterator[dict[str, Any]]:
    if choice.reasoning:
        yield {"type": "thinking", "thinking": choice.reasoning, "signature": ""}
    if choice.content:
        yield {"type": "text", "text": choice.content}
    for call in choice.calls:
        yield {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}


def _stop(choice: Choice) -> dict[str, Any]:
    matched = choice.generation.matched_stop if choice.generation is not None else None
    if choice.finish == "stop" and isinstance(matched, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return {"stop_reason": _STOP_REASONS[choice.finish], "stop_sequence": None}


def _usage(result: CallResult) -> dict[str, Any]:
    fresh = result.prompt_tokens - result.cached_tokens
    cached = {"cache_read_input_tokens": result.cached_tokens, "cache_creation_input_tokens": 0}
    return {"input_tokens": fresh, "output_tokens": result.output_tokens, **cached}


# -- reading ----------------------------------------------------------------------------------------------------------


Loaded = tuple[dict[str, Any], ...] | None
"""Tools that a reference may name; with ``None`` a reference is an error."""


def _messages(items: list[Any], loaded: Loaded) -> list[Message]:
    read = (message for index, item in enumerate(items) for message in _read(item, f"messages.{index}", loaded))
    return read_messages([*read])


def _read(message: Any, param: str, loaded: Loaded) -> list[Message]:
    """An Anthropic message as OpenAI messages: tool results are separate messages before the user's text; results of
    server tools stand between the parts of the answer."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise GatewayRequestError(f"{param}.role: must be user or assistant, got {role!r}", param=param)
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise GatewayRequestError(f"{param}.content: must be a string or a list of blocks", param=param)
    join = "" if role == "assistant" else "\n"
    messages: list[Message] = []
    read: Message = {"role": role, "content": []}

    def end() -> None:
        if read["content"] or len(read) > 2 or not messages:
            messages.append({**read, "content": text_of(read["content"], f"{param}.content", join=join)})

    for index, block in enumerate(content):
        kind, place = block.get("type") if isinstance(block, Mapping) else None, f"{param}.content.{index}"
        if kind == "tool_result":
            result = block.get("content")
            result = [_text(part, place, loaded) for part in result] if isinstance(result, list) else result
            messages.append(_result(block, text_of(result, place, join="\n")))
        elif kind in ("tool_use", "server_tool_use", "mcp_tool_use"):
            function = {"name": block.get("name"), "arguments": block.get("input")}
            read.setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
        elif isinstance(kind, str) and kind.endswith("_tool_result") and role == "assistant":
            if read["content"] or len(read) > 2:
                end()
                read = {"role": role, "content": []}
            messages.append(_result(block, _server_result(block.get("content"))))
        elif kind == "thinking":
            read["reasoning_content"] = read.get("reasoning_content", "") + str(block.get("thinking") or "")
        elif kind != "redacted_thinking":
            read["content"].append(_text(block, place, loaded))
    end()
    return messages


def _result(block: Mapping[str, Any], text: str) -> Message:
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text}


def _text(block: Any, param: str, loaded: Loaded) -> Any:
    """A search result, document or tool reference as a text block; other blocks unchanged."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind == "search_result":
        head = (block.get("title"), block.get("source"))
        return _as_text(*head, text_of(block.get("content"), f"{param}.content", join="\n"))
    if kind == "document":
        source = block.get("source")
        form = source.get("type") if isinstance(source, Mapping) else None
        if not isinstance(source, Mapping) or form not in ("text", "content", "base64"):
            message = f"{param}.source: a document of type {form!r:.40} is not read; types text and content are"
            raise GatewayRequestError(message, param=param)
        if form == "base64":
            text = text_of_uri(f"data:{source.get('media_type')};base64,{source.get('data')}", f"{param}.source")
        else:
            text = text_of(source.get("data" if form == "text" else "content"), f"{param}.source", join="\n")
        return _as_text(block.get("title"), block.get("context"), text)
    if kind == "tool_reference":
        name = block.get("tool_name")
        tools = [tool for tool in loaded or () if tool["function"]["name"] == name]
        if not tools:
            message = f"{param}: Tool reference {name!r:.80} not found in available tools"
            raise GatewayRequestError(message, code="tool_reference_unresolved", param=param)
        return _as_text(definitions(tools))
    return block


def _as_text(*lines: Any) -> dict[str, Any]:
    return {"type": "text", "text": "\n".join(line for line in lines if isinstance(line, str) and line)}


def _server_result(value: Any) -> str:
    """The result of a server tool as JSON, without fields that only the server can read."""

    def readable(item: Any) -> Any:
        if isinstance(item, Mapping):
            fields = {key: readable(part) for key, part in item.items() if not str(key).startswith("encrypted_")}
            return {key: part for key, part in fields.items() if part is not None}
        return [*map(readable, item)] if isinstance(item, list) else item

    return value if isinstance(value, str) else json.dumps(readable(value), ensure_ascii=False)


def _tools(tools: Any) -> Tools:
    """The tools of a request. Deferred ones are shown when the client finds them, at once if a server would search."""
    listed: list[dict[str, Any]] = []
    deferred: list[dict[str, Any]] = []
    server_tools: list[str] = []
    for index, tool in enumerate(tools or []):
        if not isinstance(tool, Mapping):
            raise GatewayRequestError(f"tools.{index}: must be an object with a name", param="tools")
        read = anthropic_tool(tool, f"tools.{index}")
        if read is None:
            server_tools.append(kind_of(tool))
        else:
            (deferred if tool.get("defer_loading") else listed).append(read)
    if any(kind.startswith("tool_search") for kind in server_tools):
        listed, deferred = [*listed, *deferred], []
    return Tools(listed=tuple(listed), loaded=tuple(deferred), server_tools=tuple(server_tools))


def _tool_choice(value: Any, tools: bool) -> str:
    value = {"type": "auto"} if value is None else value
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind in ("auto", "none", "any"):
        return "none" if kind == "none" or not tools else "required" if kind == "any" else "auto"
    if isinstance(value, Mapping) and kind == "tool" and isinstance(value.get("name"), str):
        return value["name"]
    raise GatewayRequestError(f"tool_choice: must be auto, any, none or a tool, got {value!r:.80}", param="tool_choice")


def _constraint(body: Mapping[str, Any]) -> dict[str, Any]:
    config = body.get("output_config") or {}
    output_format = body.get("output_format") or config.get("format")
    if not output_format:
        return {}
    if isinstance(output_format, Mapping) and isinstance(output_format.get("schema"), Mapping):
        return json_constraint(output_format["schema"])
    raise GatewayRequestError("output_config.format: must be a json_schema with its schema", param="output_config")
