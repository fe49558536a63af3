"""OpenAI's responses: the protocol as a translation. ``previous_response_id`` is good within an attempt."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import MOST_LOG_PROBS, Answered, Call, Choice, json_constraint, number
from agl_slime.gateway.chat import logprobs
from agl_slime.gateway.declared import OPENAIS, Tools, custom_input, read_allowed
from agl_slime.gateway.items import (
    DECLARING,
    JOIN,
    all_declared,
    compaction_item,
    compacts,
    is_summary,
    read_items,
    read_tools,
    sent_back,
)
from agl_slime.gateway.messages import Message, read_messages, text_of
from agl_slime.gateway.protocol import IGNORED, NOTHING_KEPT, Decode, Kept, Protocol, Stream, parsed_body, sse
from agl_slime.tokens.answer import ToolCall

_IMPOSED = ("temperature", "top_p")
_HONOURED = "input instructions model tools tool_choice max_output_tokens previous_response_id text stream top_logprobs"
_HONOURED += " include conversation chat_template_kwargs"


class Responses(Protocol):
    honoured, ignored = frozenset((*_HONOURED.split(), *_IMPOSED)), IGNORED | {"stream_options"}
    prefix = "resp_"
    grows = "input"
    orphan = "No tool call found for function call output with call_id {}."

    def read(self, body: Mapping[str, Any], kept: Kept = NOTHING_KEPT) -> Call:
        self.check_fields(body)
        messages: list[Message] = []
        if instructions := body.get("instructions"):
            messages.append({"role": "system", "content": text_of(instructions, "instructions")})
        own = len(messages)
        conversation = _conversation(body, kept)
        if previous := body.get("previous_response_id") or conversation:
            if not isinstance(previous, str) or previous not in kept:
                told = f"previous_response_id {previous!r:.80} is no answer of this rollout"
                raise GatewayRequestError(told, param="previous_response_id")
            messages += kept[previous]
        given = body.get("input") or []
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list) or not (given or messages):
            raise GatewayRequestError("input must be a text or a list of at least one item", param="input")
        items = read_items(given, kept)
        tools = read_tools(body.get("tools"), items.tools)
        choice, allowed = _tool_choice(body.get("tool_choice"), tools)
        return Call(
            messages=[*messages, *read_messages(items.messages)] if items.messages else messages,
            kept=own if (conversation or body.get("store") is not False) and not items.compacts else None,
            conversation=conversation,
            model=str(body.get("model") or ""),
            tools=tools.shown,
            loaded=tools.loaded,
            left_out=tools.left_out,
            allowed=allowed,
            sent_back=sent_back(all_declared(body)),
            tool_choice="none" if items.compacts else choice,
            max_tokens=number(body, "max_output_tokens", least=1),
            asked=self.asked(body),
            constraint={} if items.compacts else _constraint(body),
            template_kwargs=body.get("chat_template_kwargs") or {},
            top_log_probs=number(body, "top_logprobs", most=MOST_LOG_PROBS) or 0,
            stream=bool(body.get("stream")),
            compacts=items.compacts,
            compacted=None if items.compacted is None else len(messages) + items.compacted,
        )

    def more(self, items: list[Any], kept: Kept) -> list[Message]:
        read = read_items(items, kept)
        if read.tools or read.compacts or read.compacted is not None:
            raise GatewayRequestError("these items change more than the messages", param="input")
        return read_messages(read.messages)

    def kept_items(self, items: list[Any]) -> list[Any]:
        return [item for item in items if isinstance(item, Mapping) and item.get("type") in DECLARING]

    def answer(self, body: Mapping[str, Any], answered: Answered, decode: Decode) -> dict[str, Any]:
        choice = answered.choices[0]
        items = [compaction_item(answered.id, choice.content)] if compacts(body) else []
        items = items or list(_items(answered.id, choice, body, decode))
        length = choice.finish == "length"
        return {
            **_head(answered, body, "incomplete" if length else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "output": items,
            "usage": _usage(answered),
        }

    def stream(self, body: Mapping[str, Any], head: Answered, decode: Decode) -> Stream:
        return _ResponseStream(body, head, decode)


class InputTokens(Responses):
    """How long the prompt of a request would be."""

    honoured = Responses.honoured | {"personality"}
    counts = True

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}


class Compact(Responses):
    """A conversation is asked for its summary, with which it goes on: the users' messages and an item that has it."""

    grows = ""  # a request of its own, which no other begins with

    def read(self, body: Mapping[str, Any], kept: Kept = NOTHING_KEPT) -> Call:
        given = body.get("input") or []
        given = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(given, list) or not (given or body.get("previous_response_id")):
            raise GatewayRequestError("input must be a text or a list of at least one item", param="input")
        if body.get("stream"):
            raise GatewayRequestError("stream is not supported for a compaction", param="stream")
        return super().read({**body, "input": [*given, {"type": "compaction_trigger"}], "store": False}, kept)

    def answer(self, body: Mapping[str, Any], answered: Answered, decode: Decode) -> dict[str, Any]:
        said = [message for message in answered.asked[:-1] if message["role"] == "user" and not is_summary(message)]
        users = [
            {"id": f"msg_{answered.id}_{at}", "type": "message", "role": "user", "status": "completed", "content": text}
            for at, message in enumerate(said)
            if (text := [{"type": "input_text", "text": message["content"]}])
        ]
        summary = compaction_item(answered.id, answered.choices[0].content)
        head = {"id": answered.id, "object": "response.compaction", "created_at": answered.created}
        return {**head, "output": [*users, summary], "usage": _usage(answered)}


def new_conversation(raw: bytes, kept: Kept) -> tuple[dict[str, Any], list[Message]]:
    """A conversation that responses may be part of, and the messages that it begins with."""
    body = parsed_body(raw or b"{}")
    items = body.get("items") or []
    if not isinstance(items, list):
        raise GatewayRequestError("items must be a list of items", param="items")
    read = read_items(items, kept).messages
    head = {"id": f"conv_{secrets.token_hex(16)}", "object": "conversation", "created_at": int(time.time())}
    return {**head, "metadata": body.get("metadata") or {}}, read_messages(read) if read else []


def _id_of(conversation: Any) -> Any:
    return conversation.get("id") if isinstance(conversation, Mapping) else conversation


def _conversation(body: Mapping[str, Any], kept: Kept) -> str:
    made = _id_of(body.get("conversation"))
    if not made:
        return ""
    if body.get("previous_response_id"):
        told = "previous_response_id cannot be used in conjunction with conversation"
        raise GatewayRequestError(told, code="mutually_exclusive_parameters", param="previous_response_id")
    if not isinstance(made, str) or made not in kept:
        told = f"Conversation with id {made!r:.80} not found in this rollout: POST /v1/conversations makes one"
        raise GatewayRequestError(told, status=404, param="conversation")
    return made


# the events and the field of a call that comes in pieces
_PIECES = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


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
            if not text or compacts(self.body):
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
            if item["type"] in ("message", "reasoning"):
                continue
            self._place, self._item = self._place + 1, item
            name, key = _PIECES.get(item["type"], ("", ""))
            empty = {**item, key: ""} if key else item
            status = {"status": "in_progress"} if "status" in item else {}
            yield self._event("response.output_item.added", output_index=self._place, item={**empty, **status})
            if key:
                yield self._event(f"response.{name}.delta", **self._at(), delta=item[key])
                done = {key: item[key], **({"name": item["name"]} if key == "arguments" else {})}
                yield self._event(f"response.{name}.done", **self._at(), **done)
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
        **({"conversation": {"id": _id_of(body["conversation"])}} if body.get("conversation") else {}),
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
    kinds = all_declared(body)
    for at, call in enumerate(choice.calls):
        yield _call(f"fc_{made}_{at}", call, *kinds.get(call.name, ("function", "")))


def _call(made: str, call: ToolCall, kind: str, namespace: str) -> dict[str, Any]:
    head: dict[str, Any] = {"id": made, "call_id": call.id}
    if kind in OPENAIS and (fields := OPENAIS[kind].fields(call.arguments)) is not None:
        return {**head, "type": OPENAIS[kind].item, "status": "completed", **fields}
    name = call.name.removeprefix(namespace + JOIN) if namespace else call.name
    head |= {"name": name, **({"namespace": namespace} if namespace else {})}
    if kind == "custom":
        return {**head, "type": "custom_tool_call", "input": custom_input(call.arguments)}
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {**head, "type": "function_call", "status": "completed", "arguments": arguments}


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


def _tool_choice(value: Any, tools: Tools) -> tuple[str, frozenset[str] | None]:
    """The choice, and the names of the only tools that may be called, where not all may."""
    some = bool(tools.shown or tools.loaded)
    if value in (None, "auto", "none", "required"):
        return ((value or "auto") if some else "none"), None
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        return read_allowed(value, tools, _name_of)
    if isinstance(value, Mapping) and (name := _name_of(value)):
        return name, None
    told = "auto, none, required, allowed_tools, or a tool that is declared"
    raise GatewayRequestError(f"tool_choice must be {told}, got {value!r:.80}", param="tool_choice")


def _name_of(tool: Any) -> str:
    """The name to the model of the tool that a choice names."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind in ("function", "custom") and isinstance(tool.get("name"), str):
        return f"{tool['namespace']}{JOIN}{tool['name']}" if tool.get("namespace") else tool["name"]
    return kind if isinstance(kind, str) and kind in OPENAIS else ""


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
