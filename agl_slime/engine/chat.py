"""The OpenAI-style forms, for agents that talk to the model through an OpenAI client: chat completions and completions,
mapped to the engine's requests and back."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from inspect import signature
from reprlib import repr as shortened
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agl_slime.engine.requests import UNSUPPORTED, BadRequest, Encode, Request, Sampling, parse, parse_generate

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_SAMPLING_NAMES = (Sampling.model_fields.keys() | UNSUPPORTED.keys()) - {"max_new_tokens"}


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[_Part] | None = None


class _Body(BaseModel):
    """The fields of both forms beside sampling parameters."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None


class _ChatBody(_Body):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _CompletionBody(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]


def chat_requests(body: Mapping[str, Any], *, tokenizer: Any, encode: Encode) -> list[Request]:
    """The requests of a ``/v1/chat/completions`` body, one per choice. Raises ``BadRequest``."""
    asked = parse(_ChatBody, body)
    if (asked.response_format or {}).get("type", "text") != "text":
        raise BadRequest("response_format is not supported by the embedded engine: leave it out or use a real SGLang")
    kwargs = asked.chat_template_kwargs or {}
    if reserved := sorted(kwargs.keys() & signature(tokenizer.apply_chat_template).parameters.keys()):
        raise BadRequest(f"chat_template_kwargs are variables of the template, not {shortened(reserved)}")
    rendered = [{**message.model_dump(), "content": _text(message.content)} for message in asked.messages]
    try:
        text = tokenizer.apply_chat_template(
            rendered, tools=_tools(body), add_generation_prompt=True, tokenize=False, **kwargs
        )
    except Exception as error:  # the template is code of the model's: whatever it raises is about these messages
        raise BadRequest(f"The chat template cannot render these messages: {error}") from error
    maximum = asked.max_completion_tokens or asked.max_tokens
    return _requests(body, {"input_ids": encode(text, add_special_tokens=False)}, maximum, encode=encode)


def completion_requests(body: Mapping[str, Any], *, encode: Encode) -> list[Request]:
    """The requests of a ``/v1/completions`` body: ``prompt`` is a string, a list of strings, a list of ids or a list of
    such lists. Raises ``BadRequest``."""
    asked = parse(_CompletionBody, body)
    prompt = asked.prompt
    text = isinstance(prompt, str) or (prompt and isinstance(prompt[0], str))
    maximum = 16 if asked.max_tokens is None else asked.max_tokens  # OpenAI's default here
    return _requests(body, {"text" if text else "input_ids": prompt}, maximum, encode=encode)


def openai_answer(
    requests: list[Request], body: Mapping[str, Any], *, tokenizer: Any, text: Callable[[Request], str]
) -> dict[str, Any]:
    """SGLang's answer to a chat completion, or a completion; the latter gives no log-probs, ``/generate`` does."""
    chat = "messages" in body
    choices: list[dict[str, Any]] = []
    for index, request in enumerate(requests):
        finish, content = request.finish or {"type": "abort"}, text(request)
        choice = {"index": index, "finish_reason": finish["type"], "matched_stop": finish.get("matched")}
        if chat:
            content, calls = split_tool_calls(content) if _tools(body) else (content, None)
            message = {"role": "assistant", "content": content, "reasoning_content": None, "tool_calls": calls}
            choice |= {"message": message, **({"finish_reason": "tool_calls"} if calls else {})}
        else:
            choice["text"] = content
        logprobs = {"content": _log_probs(request, tokenizer)} if chat and body.get("logprobs") else None
        choices.append({**choice, "logprobs": logprobs})
    # every choice of one prompt shares its tokens
    prompt = sum({id(request.input_ids): len(request.input_ids) for request in requests}.values())
    completion = sum(len(request.output_ids) for request in requests)
    versions = [request.versions[-1][0] for request in requests if request.versions]
    return {
        "id": requests[0].rid,
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": body["model"],
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion},
        "metadata": {"weight_version": versions[-1] if versions else None},
    }


def _log_probs(request: Request, tokenizer: Any) -> list[dict[str, Any]]:
    def entry(token: int, log_prob: float) -> dict[str, Any]:
        piece = tokenizer.decode([token])
        return {"token": piece, "bytes": list(piece.encode()), "logprob": log_prob}

    tops = request.tops or [[]] * len(request.output_ids)
    return [
        {**entry(token, log_prob), "top_logprobs": [entry(other, value) for value, other in top]}
        for token, log_prob, top in zip(request.output_ids, request.log_probs, tops, strict=True)
    ]


def split_tool_calls(content: str) -> tuple[str | None, list[dict[str, Any]] | None]:
    """The text outside ``<tool_call>`` blocks and the calls in them, OpenAI-style; a block that is not a call stays
    text and then nothing is split."""
    calls = []
    for number, block in enumerate(_TOOL_CALL.findall(content)):
        try:
            call = json.loads(block)
            function = {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return content, None
        calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "index": number, "type": "function", "function": function})
    return (_TOOL_CALL.sub("", content).strip() or None, calls) if calls else (content, None)


def _tools(body: Mapping[str, Any]) -> Any:
    return body.get("tools") if body.get("tool_choice") != "none" else None


def _requests(body: Mapping[str, Any], prompt: dict[str, Any], maximum: int | None, *, encode: Encode) -> list[Request]:
    """The ``/generate`` requests of ``prompt`` with the sampling parameters of an OpenAI-style body."""
    given = {name: body[name] for name in _SAMPLING_NAMES if body.get(name) is not None}
    logprobs = bool(body.get("logprobs"))
    generate = {**prompt, "sampling_params": {**given, "max_new_tokens": maximum}, "return_logprob": logprobs}
    generate["top_logprobs_num"] = body.get("top_logprobs")
    if body.get("stream"):
        raise BadRequest("stream is supported by the embedded engine's /generate only: ask that, or a real SGLang")
    return parse_generate({**generate, "rid": body.get("rid")}, encode=encode)[0]


def _text(content: str | list[_Part] | None) -> str:
    """A message's content as one string; OpenAI's list form may hold text parts only."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())
