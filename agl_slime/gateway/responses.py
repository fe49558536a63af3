"""OpenAI's responses. ``previous_response_id`` names a response of the same attempt."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import Call, CallResult, Choice, json_format, number
from agl_slime.gateway.chat import logprobs
from agl_slime.gateway.declared import OPENAI_TOOLS, custom_input, read_choice
from agl_slime.gateway.items import (
    DECLARING,
    JOIN,
    all_declared,
    compaction_item,
    compacts,
    is_summary,
    read_items,
    read_tools,
    returned_arguments,
)
from agl_slime.gateway.messages import Message, read_messages, system_text
from agl_slime.gateway.protocol import IGNORED, NO_HISTORIES, Decode, Histories, Protocol, Stream, parsed_body, sse
from agl_slime.tokens.answer import ToolCall

_IMPOSED = ("temperature", "top_p")
_HONOURED = "input instructions model tools tool_choice max_output_tokens previous_response_id text stream top_logprobs"
_HONOURED += " include conversation chat_template_kwargs reasoning reasoning_effort thinking"


class Responses(Protocol):
    honoured, ignored = frozenset((*_HONOURED.split(), *_IMPOSED)), IGNORED | {"stream_options"}
    prefix = "resp_"
    list_field = "input"
    orphan_error = "No tool call found for function call output with call_id {}."

    def read(self, body: Mapping[str, Any], histories: Histories = NO_HISTORIES) -> Call:
        self.check_fields(body)
        messages: list[Message] = []
        if instructions := system_text(body.get("instructions") or "", "instructions"):
            messages.append({"role": "system", "content": instructions})
        store_from = len(messages)
        conversation = _conversation(body, histories)
        if previous := body.get("previous_response_id") or conversation:
            if not isinstance(previous, str) or previous not in histories:
                message = f"previous_response_id {previous!r:.80} is no answer of this rollout"
                raise GatewayRequestError(message, param="previous_response_id")
            messages += histories[previous]
        input_items = body.get("input") or []
        if isinstance(input_items, str):
            input_items = [{"role": "user", "content": input_items}]
        if not isinstance(input_items, list) or not (input_items or messages):
            raise GatewayRequestError("input must be a text or a list of at least one item", param="input")
        items = read_items(input_items, histories)
        tools = read_tools(body.get("tools"), items.tools)
        wanted = body.get("tool_choice")
        allowing = wanted if isinstance(wanted, Mapping) and wanted.get("type") == "allowed_tools" else None
        choice, allowed = read_choice(wanted, allowing, tools, _name_of, form="a tool that is declared")
        stored = conversation or body.get("store") is not False
        return Call(
            messages=[*messages, *read_messages(items.messages)] if items.messages else messages,
            store_from=store_from if stored and not items.compacts else None,
            conversation=conversation,
            tools=tools.listed,
            loaded=tools.loaded,
            server_tools=tools.server_tools,
            allowed=allowed,
            returned_arguments=returned_arguments(all_declared(body)),
            tool_choice="none" if items.compacts else choice,
            max_tokens=number(body, "max_output_tokens", least=1),
            **self.call_fields(body),
            constraint={} if items.compacts else _constraint(body),
            top_log_probs=self.top_log_probs(body),
            compacts=items.compacts,
            summary_index=None if items.summary_index is None else len(messages) + items.summary_index,
        )

    def read_more(self, items: list[Any], histories: Histories) -> list[Message]:
        read = read_items(items, histories)
        if read.tools or read.compacts or read.summary_index is not None:
            raise GatewayRequestError("these items change more than the messages", param="input")
        return read_messages(read.messages)

    def kept_items(self, items: list[Any]) -> list[Any]:
        return [item for item in items if isinstance(item, Mapping) and item.get("type") in DECLARING]

    def answer(self, body: Mapping[str, Any], result: CallResult, decode: Decode) -> dict[str, Any]:
        choice = result.choices[0]
        items = [compaction_item(result.id, choice.content)] if compacts(body) else []
        items = items or list(_items(result.id, choice, body, decode))
        length = choice.finish == "length"
        return {
            **_head(result, body, "incomplete" if length else "completed"),
            "incomplete_details": {"reason": "max_output_tokens"} if length else None,
            "output": items,
            "usage": _usage(result),
        }

    def stream(self, body: Mapping[str, Any], head: CallResult, decode: Decode) -> Stream:
        return _ResponseStream(body, head, decode)


class InputTokens(Responses):
    """The number of tokens of a request's prompt."""

    honoured = Responses.honoured | {"personality"}
    counts_only = True

    def count_answer(self, ids: list[int]) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": len(ids)}


class Compact(Responses):
    """Compaction of a conversation: returns the user's messages and an item with a summary, to continue from."""

    list_field = ""  # no later request extends this one

    def read(self, body: Mapping[str, Any], histories: Histories = NO_HISTORIES) -> Call:
        items = body.get("input") or []
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        if not isinstance(items, list) or not (items or body.get("previous_response_id")):
            raise GatewayRequestError("input must be a text or a list of at least one item", param="input")
        if body.get("stream"):
            raise GatewayRequestError("stream is not supported for a compaction", param="stream")
        return super().read({**body, "input": [*items, {"type": "compaction_trigger"}], "store": False}, histories)

    def answer(self, body: Mapping[str, Any], result: CallResult, decode: Decode) -> dict[str, Any]:
        messages = result.compacted[:-1]
        user_messages = [message for message in messages if message["role"] == "user" and not is_summary(message)]
        users = [
            {"id": f"msg_{result.id}_{n}", "type": "message", "role": "user", "status": "completed", "content": text}
            for n, message in enumerate(user_messages)
            if (text := [{"type": "input_text", "text": message["content"]}])
        ]
        summary = compaction_item(result.id, result.choices[0].content)
        head = {"id": result.id, "object": "response.compaction", "created_at": result.created}
        return {**head, "output": [*users, summary], "usage": _usage(result)}


def new_conversation(raw: bytes, histories: Histories) -> tuple[dict[str, Any], list[Message]]:
    """A new conversation for responses, and its first messages."""
    body = parsed_body(raw or b"{}")
    items = body.get("items") or []
    if not isinstance(items, list):
        raise GatewayRequestError("items must be a list of items", param="items")
    read = read_items(items, histories).messages
    head = {"id": f"conv_{secrets.token_hex(16)}", "object": "conversation", "created_at": int(time.time())}
    return {**head, "metadata": body.get("metadata") or {}}, read_messages(read) if read else []


def _id_of(conversation: Any) -> Any:
    return conversation.get("id") if isinstance(conversation, Mapping) else conversation


def _conversation(body: Mapping[str, Any], histories: Histories) -> str:
    conversation_id = _id_of(body.get("conversation"))
    if not conversation_id:
        return ""
    if body.get("previous_response_id"):
        message = "previous_response_id cannot be used in conjunction with conversation"
        raise GatewayRequestError(message, code="mutually_exclusive_parameters", param="previous_response_id")
    if not isinstance(conversation_id, str) or conversation_id not in histories:
        problem = f"Conversation with id {conversation_id!r:.80} not found in this rollout"
        raise GatewayRequestError(f"{problem}: POST /v1/conversations makes one", status=404, param="conversation")
    return conversation_id


# event names and field of calls that are streamed in pieces
_PIECES = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}


class _Form(NamedTuple):
    """The form of an item's text: the item's field, the type of its part, and the names of their events."""

    field: str
    type: str
    part_event: str
    text_event: str


_MESSAGE = _Form("content", "output_text", "content_part", "output_text")
_THINKING = _Form("content", "reasoning_text", "content_part", "reasoning_text")
_SUMMARY = _Form("summary", "summary_text", "reasoning_summary_part", "reasoning_summary_text")


def _form_of_thinking(body: Mapping[str, Any]) -> _Form:
    """The form of thinking; as a summary of itself for a client that requests one, which does not read the other."""
    options = body.get("reasoning")
    options = options if isinstance(options, Mapping) else {}
    return _SUMMARY if options.get("summary") or options.get("generate_summary") else _THINKING


class _ResponseStream(Stream):
    _form = _MESSAGE
    _number = -1
    _item: dict[str, Any] | None = None
    _place = -1
    _sent = ""

    def begin(self) -> Iterator[bytes]:
        response = {**_head(self.head, self.body, "in_progress"), "output": [], "usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[bytes]:
        for kind, text in (("reasoning", reasoning), ("message", content)):
            if not text or compacts(self.body):
                continue
            if self._item is None or self._item["type"] != kind:
                yield from self._shut()
                yield from self._begin(kind)
            self._sent += text
            logprobs = {"logprobs": []} if kind == "message" else {}
            yield self._text_event(f"{self._form.text_event}.delta", delta=text, **logprobs)

    def end(self, result: CallResult) -> Iterator[bytes]:
        final = Responses().answer(self.body, result, self.decode)
        yield from self._shut({item["id"]: item for item in final["output"]})
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
        # also for an answer cut by a limit, as SGLang does: SDKs raise on OpenAI's response.incomplete
        yield self._event("response.completed", response=final)

    def error(self, refusal: GatewayRequestError) -> bytes:
        return self._event("error", code=refusal.code, message=str(refusal), param=refusal.param)

    def _begin(self, kind: str) -> Iterator[bytes]:
        self._place, self._sent = self._place + 1, ""
        self._form = _MESSAGE if kind == "message" else _form_of_thinking(self.body)
        item = self._item = self._streamed_item("", status="in_progress")
        (part,) = item[self._form.field]
        yield self._event("response.output_item.added", output_index=self._place, item={**item, self._form.field: []})
        yield self._text_event(f"{self._form.part_event}.added", part=part)

    def _streamed_item(self, text: str, **message: str) -> dict[str, Any]:
        if self._form is _MESSAGE:
            return _message(self.head.id, text, **message)
        return _reasoning(self.head.id, text, self.body)

    def _text_event(self, kind: str, **fields: Any) -> bytes:
        return self._event(f"response.{kind}", **self._at(), **{f"{self._form.field}_index": 0}, **fields)

    def _shut(self, final_items: Mapping[str, Any] | None = None) -> Iterator[bytes]:
        if self._item is None:
            return
        item = (final_items or {}).get(self._item["id"]) or self._streamed_item(self._sent)
        part = item[self._form.field][0]
        done = {name: part[name] for name in ("text", "logprobs") if name in part}
        yield self._text_event(f"{self._form.text_event}.done", **done)
        yield self._text_event(f"{self._form.part_event}.done", part=part)
        yield self._event("response.output_item.done", output_index=self._place, item=item)
        self._item = None

    def _at(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": self._place}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return sse({"type": kind, "sequence_number": self._number, **fields}, kind)


def _head(result: CallResult, body: Mapping[str, Any], status: str) -> dict[str, Any]:
    return {
        "id": result.id,
        "object": "response",
        "created_at": result.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "model": result.model,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        **({"conversation": {"id": _id_of(body["conversation"])}} if body.get("conversation") else {}),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "metadata": body.get("metadata") or {},
    }


def _items(answer_id: str, choice: Choice, body: Mapping[str, Any], decode: Decode) -> Iterator[dict[str, Any]]:
    if choice.reasoning:
        yield _reasoning(answer_id, choice.reasoning, body)
    if choice.content or not (choice.calls or choice.reasoning):
        requested = "message.output_text.logprobs" in (body.get("include") or ())
        log_probs = logprobs(choice, decode)["content"] if requested else []
        status = "incomplete" if choice.finish == "length" else "completed"
        yield _message(answer_id, choice.content, status, log_probs)
    kinds = all_declared(body)
    for n, call in enumerate(choice.calls):
        yield _call(f"fc_{answer_id}_{n}", call, *kinds.get(call.name, ("function", "")))


def _call(item_id: str, call: ToolCall, kind: str, namespace: str) -> dict[str, Any]:
    head: dict[str, Any] = {"id": item_id, "call_id": call.id}
    if kind in OPENAI_TOOLS and (fields := OPENAI_TOOLS[kind].fields(call.arguments)) is not None:
        return {**head, "type": f"{kind}_call", "status": "completed", **fields}
    name = call.name.removeprefix(namespace + JOIN) if namespace else call.name
    head |= {"name": name, **({"namespace": namespace} if namespace else {})}
    if kind == "custom":
        return {**head, "type": "custom_tool_call", "input": custom_input(call.arguments)}
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {**head, "type": "function_call", "status": "completed", "arguments": arguments}


def _reasoning(answer_id: str, text: str, body: Mapping[str, Any]) -> dict[str, Any]:
    form = _form_of_thinking(body)
    item = {"id": f"rs_{answer_id}", "type": "reasoning", "summary": []}
    return {**item, form.field: [{"type": form.type, "text": text}]}


def _message(answer_id: str, text: str, status: str = "completed", logprobs: Any = ()) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}]
    return {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "status": status, "content": content}


def _usage(result: CallResult) -> dict[str, Any]:
    return {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": result.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": result.prompt_tokens + result.output_tokens,
    }


# -- reading ----------------------------------------------------------------------------------------------------------


def _name_of(tool: Any) -> str:
    """The name in prompts of the tool in a choice."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if kind in ("function", "custom") and isinstance(tool.get("name"), str):
        return f"{tool['namespace']}{JOIN}{tool['name']}" if tool.get("namespace") else tool["name"]
    return kind if isinstance(kind, str) and kind in OPENAI_TOOLS else ""


def _constraint(body: Mapping[str, Any]) -> dict[str, Any]:
    if (constraint := json_format((body.get("text") or {}).get("format") or {})) is None:
        message = "text.format must be text, json_object, or json_schema with its schema"
        raise GatewayRequestError(message, param="text")
    return constraint
