"""OpenAI's chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import IMPOSED, Call, CallResult, Choice, grammar, json_format, number, strings
from agl_slime.gateway.declared import Tools, custom_arguments, custom_input, openai_function, read_choice, unknown_tool
from agl_slime.gateway.messages import Message, read_messages
from agl_slime.gateway.protocol import NO_HISTORIES, Decode, Histories, Protocol, Stream, sse, token_name

_HONOURED = """
    messages model tools tool_choice max_tokens max_completion_tokens max_output_tokens max_new_tokens stop n logprobs
    top_logprobs return_token_ids return_tokens_as_token_ids return_prompt_token_ids stream stream_options
    response_format chat_template_kwargs regex ebnf json_schema modalities reasoning_effort reasoning thinking
"""
_MOST_CHOICES = 128
_UNFINISHED = {"logprobs": None, "finish_reason": None}


class ChatCompletions(Protocol):
    honoured = frozenset((*_HONOURED.split(), *IMPOSED))
    prefix = "chatcmpl-"
    list_field = "messages"
    calls_in_text = True
    orphan_error = (
        "messages with role 'tool' must be a response to a preceding message with 'tool_calls'; no call is '{}'"
    )

    def read(self, body: Mapping[str, Any], histories: Histories = NO_HISTORIES) -> Call:
        if body.get("functions") or body.get("function_call"):
            message = "functions and function_call are OpenAI's old form: send tools"
            raise GatewayRequestError(message, param="functions")
        self.check_fields(body)
        if (body.get("modalities") or ["text"]) != ["text"]:
            raise GatewayRequestError("modalities other than text are not served", param="modalities")
        tools = tuple(_read_tool(tool, f"tools[{n}]") for n, tool in enumerate(body.get("tools") or []))
        choice, allowed = _tool_choice(body.get("tool_choice"), tools)
        return Call(
            messages=_messages(body.get("messages")),
            tools=tools,
            tool_choice=choice,
            allowed=allowed,
            returned_arguments=dict.fromkeys(_custom(body), lambda args: custom_arguments(custom_input(args))),
            max_tokens=self.max_tokens(body),
            stop=strings(body, "stop"),
            n=number(body, "n", least=1, most=_MOST_CHOICES) or 1,
            **self.call_fields(body),
            constraint=_constraint(body),
            top_log_probs=self.top_log_probs(body),
        )

    def read_more(self, items: list[Any], histories: Histories) -> list[Message]:
        return _messages(items)

    def answer(self, body: Mapping[str, Any], result: CallResult, decode: Decode) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": _message(choice, _custom(body)),
                "logprobs": logprobs(choice, _names(body, decode)) if body.get("logprobs") else None,
                "finish_reason": choice.finish,
                **({"token_ids": choice.token_ids} if body.get("return_token_ids") else {}),
                **({"prompt_token_ids": result.prompt_ids.tolist()} if body.get("return_prompt_token_ids") else {}),
            }
            for index, choice in enumerate(result.choices)
        ]
        head = head_of(result, "chat.completion")
        if body.get("return_token_ids"):
            head["prompt_token_ids"] = result.prompt_ids.tolist()
        return {**head, "choices": choices, "usage": usage(result)}

    def stream(self, body: Mapping[str, Any], head: CallResult, decode: Decode) -> Stream:
        return _ChatStream(body, head, decode)


class _ChatStream(Stream):
    def begin(self) -> Iterator[bytes]:
        for index in range(len(self.texts)):
            yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, reasoning: str, content: str) -> Iterator[bytes]:
        if reasoning:
            yield self._chunk(index, {"reasoning_content": reasoning})
        if content:
            yield self._chunk(index, {"content": content})

    def end(self, result: CallResult) -> Iterator[bytes]:
        for index, choice in enumerate(result.choices):
            for n, call in enumerate(_tool_calls(choice, _custom(self.body))):
                yield self._chunk(index, {"tool_calls": [{"index": n, **call}]})
            log_probs = logprobs(choice, _names(self.body, self.decode)) if self.body.get("logprobs") else None
            last: dict[str, Any] = {"logprobs": log_probs, "finish_reason": choice.finish}
            ids = {"token_ids": choice.token_ids} if self.body.get("return_token_ids") else {}
            prompt = {"prompt_token_ids": result.prompt_ids.tolist()} if ids else {}
            yield self._chunk(index, {}, last | ids, **prompt)
        if (self.body.get("stream_options") or {}).get("include_usage"):
            yield sse({**head_of(self.head, "chat.completion.chunk"), "choices": [], "usage": usage(result)})
        yield b"data: [DONE]\n\n"

    def _chunk(self, index: int, delta: Any, end: Any = _UNFINISHED, **fields: Any) -> bytes:
        choice = {"index": index, "delta": delta, **end}
        return sse({**head_of(self.head, "chat.completion.chunk"), **fields, "choices": [choice]})


def head_of(result: CallResult, kind: str) -> dict[str, Any]:
    return {"id": result.id, "object": kind, "created": result.created, "model": result.model}


def _message(choice: Choice, custom: frozenset[str]) -> dict[str, Any]:
    calls = _tool_calls(choice, custom)
    message: dict[str, Any] = {"role": "assistant", "content": choice.content if choice.content or not calls else None}
    message["refusal"] = None
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    return {**message, "tool_calls": calls} if calls else message


def _tool_calls(choice: Choice, custom: frozenset[str]) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": custom_input(call.arguments)}}
        if call.name in custom
        else call.to_message()
        for call in choice.calls
    ]


def usage(result: CallResult) -> dict[str, Any]:
    total = result.prompt_tokens + result.output_tokens
    counts = {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.output_tokens}
    return {**counts, "total_tokens": total, "prompt_tokens_details": {"cached_tokens": result.cached_tokens}}


def logprobs(choice: Choice, decode: Decode) -> dict[str, Any]:
    """All sampled tokens with the engine's log-probs, including tool calls and the stop token."""
    generation = choice.generation
    if generation is None:
        return {"content": [], "refusal": None}
    tops = generation.top_log_probs or ((),) * len(generation.output_ids)
    content = [
        {**_token(token, value, decode), "top_logprobs": [_token(*pair, decode) for pair in top]}
        for token, value, top in zip(generation.output_ids, generation.log_probs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _names(body: Mapping[str, Any], decode: Decode) -> Decode:
    return token_name if body.get("return_tokens_as_token_ids") else decode


def _token(token: int, value: float, decode: Decode) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


# -- reading ----------------------------------------------------------------------------------------------------------


def _read_tool(tool: Any, param: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    inner = tool.get(kind) if kind in ("function", "custom") else None
    if isinstance(kind, str) and kind not in ("function", "custom"):
        raise unknown_tool(param, kind, schema="parameters")
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise GatewayRequestError(f"{param} must be a function or a custom tool with a name", param=param)
    return openai_function(inner["name"], inner, custom=kind == "custom")


def _custom(body: Mapping[str, Any]) -> frozenset[str]:
    """The names of custom tools, whose calls have a text instead of arguments."""
    tools = body.get("tools") or ()
    return frozenset(tool["custom"]["name"] for tool in tools if tool.get("type") == "custom")


def _messages(items: Any) -> list[Message]:
    return read_messages([*map(_with_functions, items)] if isinstance(items, list) else items)


def _with_functions(message: Any) -> Any:
    """The message with calls of custom tools as function calls."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list) or not any(isinstance(call, Mapping) and call.get("custom") for call in calls):
        return message

    def as_function(call: Any) -> Any:
        custom = call.get("custom") if isinstance(call, Mapping) else None
        if not isinstance(custom, Mapping):
            return call
        arguments = custom_arguments(custom.get("input"))
        return {"id": call.get("id"), "function": {"name": custom.get("name"), "arguments": arguments}}

    return {**message, "tool_calls": [*map(as_function, calls)]}


def _tool_choice(value: Any, tools: tuple[dict[str, Any], ...]) -> tuple[str, frozenset[str] | None]:
    """The choice, and the names of the only tools that may be called (``None``: all)."""
    if value is None:
        return "auto", None
    inner = value.get("allowed_tools") if isinstance(value, Mapping) else None
    return read_choice(value, inner, Tools(listed=tools), _name_of, form="a function or custom tool with its name")


def _name_of(tool: Any) -> str:
    inner = (tool.get("function") or tool.get("custom")) if isinstance(tool, Mapping) else None
    return inner["name"] if isinstance(inner, Mapping) and isinstance(inner.get("name"), str) else ""


def _constraint(body: Mapping[str, Any]) -> dict[str, Any]:
    response_format = body.get("response_format") or {}
    if (constraint := grammar(body) or json_format(response_format, schema_in="json_schema")) is None:
        message = "response_format must be text, json_object, or json_schema with its schema, got "
        raise GatewayRequestError(message + json.dumps(response_format)[:80], param="response_format")
    return constraint
