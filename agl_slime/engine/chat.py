"""The OpenAI-style forms: chat completions and completions, mapped to the engine's requests and back."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from agl_slime.engine.requests import BadRequest, Request, Sampling

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)

# Taken over under SGLang's own names; everything else that would change the sampling is refused by Sampling.parse.
_SAMPLING_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "regex",
    "ebnf",
    "logit_bias",
)


def chat_requests(body: Any, *, tokenizer: Any) -> list[Request]:
    """The requests of a ``/v1/chat/completions`` body, one per choice. Raises ``BadRequest``."""
    if not isinstance(body, Mapping):
        raise BadRequest(f"The body must be a JSON object, got {type(body).__name__}.")
    messages = body.get("messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(item, Mapping) and isinstance(item.get("role"), str) for item in messages)
    ):
        raise BadRequest("messages must be a list of objects with a role.")
    if (body.get("response_format") or {}).get("type", "text") != "text":
        raise BadRequest("response_format is not supported by the embedded engine: leave it out or use a real SGLang")
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    try:
        ids = tokenizer.apply_chat_template(
            [{**item, "content": _text(item.get("content"))} for item in messages],
            tools=tools,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(body.get("chat_template_kwargs") or {}),
        )["input_ids"]
    except BadRequest:
        raise
    except Exception as error:  # the template is code of the model's: whatever it raises is about these messages
        raise BadRequest(f"The chat template cannot render these messages: {error}") from error
    return _requests(body, list(ids), body.get("max_completion_tokens") or body.get("max_tokens"))


def completion_requests(body: Any, *, encode: Callable[[str], list[int]]) -> list[Request]:
    """The requests of a ``/v1/completions`` body: ``prompt`` is a string, a list of strings, a list of ids or a list of
    such lists. Raises ``BadRequest``."""
    if not isinstance(body, Mapping):
        raise BadRequest(f"The body must be a JSON object, got {type(body).__name__}.")
    prompt = body.get("prompt")
    prompts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
    requests: list[Request] = []
    for item in prompts:
        if isinstance(item, str):
            item = encode(item)
        if not isinstance(item, list) or not item or not all(type(token) is int for token in item):
            raise BadRequest(
                "prompt must be a string, a list of strings, a list of ids or a list of lists of ids, none of them empty."
            )
        maximum = body.get("max_tokens")
        requests += _requests(body, item, 16 if maximum is None else maximum)  # 16 is OpenAI's default here
    return requests


def chat_answer(
    requests: list[Request], body: Mapping[str, Any], *, model: str, tokenizer: Any, text: Callable[[Request], str]
) -> dict[str, Any]:
    """SGLang's answer to a chat completion."""
    choices = []
    for index, request in enumerate(requests):
        content = text(request)
        calls: list[dict[str, Any]] | None = None
        if body.get("tools") and body.get("tool_choice") != "none":
            content, calls = split_tool_calls(content)
        choices.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": content, "reasoning_content": None, "tool_calls": calls},
                "logprobs": {"content": _content_log_probs(request, tokenizer)} if body.get("logprobs") else None,
                "finish_reason": "tool_calls" if calls else _finish(request)["type"],
                "matched_stop": _finish(request).get("matched"),
            }
        )
    return _answer("chat.completion", choices, requests, model)


def completion_answer(requests: list[Request], *, model: str, text: Callable[[Request], str]) -> dict[str, Any]:
    """SGLang's answer to a completion; log-probs are not given there, ``/generate`` gives them."""
    choices = [
        {
            "index": index,
            "text": text(request),
            "logprobs": None,
            "finish_reason": _finish(request)["type"],
            "matched_stop": _finish(request).get("matched"),
        }
        for index, request in enumerate(requests)
    ]
    return _answer("text_completion", choices, requests, model)


def split_tool_calls(content: str) -> tuple[str | None, list[dict[str, Any]] | None]:
    """The text outside ``<tool_call>`` blocks and the calls in them, OpenAI-style; a block that is not a call stays
    text and then nothing is split."""
    calls = []
    for number, block in enumerate(_TOOL_CALL.findall(content)):
        try:
            call = json.loads(block)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return content, None
        calls.append(
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "index": number,
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
        )
    return (_TOOL_CALL.sub("", content).strip() or None, calls) if calls else (content, None)


def _requests(body: Mapping[str, Any], ids: list[int], maximum: Any) -> list[Request]:
    if body.get("stream"):
        raise BadRequest("stream is not supported by the embedded engine: leave it out or use a real SGLang")
    if body.get("top_logprobs"):
        raise BadRequest("top_logprobs is not supported by the embedded engine: leave it out or use a real SGLang")
    n = 1 if body.get("n") is None else body["n"]
    if type(n) is not int or n < 1:
        raise BadRequest(f"n must be at least 1, got {n!r}.")
    sampling = Sampling.parse(
        {**{name: body[name] for name in _SAMPLING_NAMES if body.get(name) is not None}, "max_new_tokens": maximum}
    )
    rid = body.get("rid")
    rids = [rid] if isinstance(rid, str) and n == 1 else [uuid.uuid4().hex for _ in range(n)]
    return [
        Request(rid=each, input_ids=ids, sampling=sampling, return_logprob=bool(body.get("logprobs"))) for each in rids
    ]


def _answer(kind: str, choices: list[dict[str, Any]], requests: list[Request], model: str) -> dict[str, Any]:
    # every choice of one prompt shares its tokens
    prompt = sum({id(request.input_ids): len(request.input_ids) for request in requests}.values())
    completion = sum(len(request.output_ids) for request in requests)
    versions = [request.versions[-1][0] for request in requests if request.versions]
    return {
        "id": requests[0].rid,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
        },
        "metadata": {"weight_version": versions[-1] if versions else None},
    }


def _finish(request: Request) -> Mapping[str, Any]:
    return request.finish or {"type": "abort"}


def _content_log_probs(request: Request, tokenizer: Any) -> list[dict[str, Any]]:
    entries = []
    for token, log_prob in zip(request.output_ids, request.log_probs, strict=True):
        piece = tokenizer.decode([token])
        entries.append({"token": piece, "bytes": list(piece.encode()), "logprob": log_prob, "top_logprobs": []})
    return entries


def _text(content: Any) -> str:
    """A message's content as one string; OpenAI's list form may hold text parts only."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadRequest("A message's content must be a string or a list of text parts: this model reads text only.")
