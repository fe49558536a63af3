"""Requests and answers in each of the gateway's protocols, and the packages of their vendors as clients."""

import json
from typing import Any

import httpx
import pytest

from agl_slime.gateway.anthropic import AnthropicMessages
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.completions import Completions
from agl_slime.gateway.protocol import Protocol
from agl_slime.gateway.responses import Responses
from tests.harness.gateway import WEATHER, Case, post

CHATS = ("chat/completions", "messages", "responses")
PROTOCOLS: dict[str, Protocol] = {
    "chat/completions": ChatCompletions(),
    "completions": Completions(),
    "responses": Responses(),
    "messages": AnthropicMessages(),
}
FUNCTION = {"type": "function", **WEATHER["function"]}
ANTHROPIC_TOOL = {
    "name": "weather",
    "description": "How the weather is.",
    "input_schema": WEATHER["function"]["parameters"],
}
TOOLS: dict[str, list[Any]] = {"chat/completions": [WEATHER], "messages": [ANTHROPIC_TOOL], "responses": [FUNCTION]}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def body_of(path: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """A request with these messages; their texts are the prompt of a completion."""
    if path == "completions":
        prompt = "".join(message["content"] for message in messages)
        return {"model": "m", "prompt": prompt, "max_tokens": 999, **fields}
    limit = {"max_tokens": 999} if path == "messages" else {}
    return {"model": "m", "input" if path == "responses" else "messages": messages, **limit, **fields}


def called(path: str, name: str, output: Any, **call: Any) -> list[Any]:
    """A call of a tool, perhaps with ``arguments``, and its result, as a history of the protocol has them."""
    if path == "messages":
        use = {"type": "tool_use", "id": "c", "name": name, **({"input": call["arguments"]} if call else {})}
        return [assistant([use]), user([{"type": "tool_result", "tool_use_id": "c", "content": output}])]
    if path == "responses":
        item = {"type": "function_call", "call_id": "c", "name": name, **call}
        return [item, {"type": "function_call_output", "call_id": "c", "output": output}]
    calls = [{"id": "c", "type": "function", "function": {"name": name, **call}}]
    return [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "c", "content": output}]


def openai_client(case: Case) -> Any:
    import openai

    return openai.OpenAI(base_url=case.llm.endpoint, api_key="somebody-elses", max_retries=0)


def anthropic_client(case: Case) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="the client of Anthropic: pip install anthropic")
    return anthropic.Anthropic(base_url=case.llm.endpoint.removesuffix("/v1"), api_key="any", max_retries=0)


def error_text(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, without the mark of its end."""
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def response_events(answer: httpx.Response) -> list[Any]:
    """The events of a streamed response, by the types of OpenAI's package."""
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    return [TypeAdapter[Any](ResponseStreamEvent).validate_python(event) for event in events_of(answer)]


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The words of a whole answer."""
    if path == "messages":
        return "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    if path == "responses":
        messages = (item["content"] for item in answer["output"] if item["type"] == "message")
        return "".join(part["text"] for content in messages for part in content)
    (choice, *_) = answer["choices"]
    return choice["text"] if path == "completions" else choice["message"]["content"] or ""


def delta_of(event: dict[str, Any]) -> str:
    """The words of an event, of whichever protocol."""
    assert "error" not in event or event.get("response", {}).get("status"), event
    if choices := event.get("choices"):
        return choices[0].get("text") or choices[0].get("delta", {}).get("content") or ""
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return event["delta"].get("text", "") if event.get("type") == "content_block_delta" else ""


class Talk:
    """A client's conversation in the protocol ``path``: each request has the history, and each answer extends it.
    ``fields`` are of every request."""

    def __init__(self, case: Case, path: str, **fields: Any) -> None:
        self.case, self.path, self.fields = case, path, fields
        self.history: list[Any] = []
        self.text = ""

    def ask(self, *items: Any, **fields: Any) -> Any:
        """The answer as its protocol has it in a history: blocks, items, or one message."""
        self.history += items
        answer = post(self.case, self.path, **body_of(self.path, self.history, **self.fields, **fields))
        self.text = text_of(self.path, answer)
        if self.path == "responses":
            self.answer = answer["output"]
            self.history += self.answer
        else:
            chat = self.path == "chat/completions"
            self.answer = answer["choices"][0]["message"] if chat else answer["content"]
            self.history.append(self.answer if chat else assistant(self.answer))
        return self.answer

    def results(self, output: str = "fine") -> list[dict[str, Any]]:
        """Results of the calls of the last answer."""
        if self.path == "responses":
            ids = [item["call_id"] for item in self.answer if item["type"] == "function_call"]
            return [{"type": "function_call_output", "call_id": id, "output": output} for id in ids]
        if self.path == "messages":
            ids = [block["id"] for block in self.answer if block["type"] == "tool_use"]
            return [user([{"type": "tool_result", "tool_use_id": id, "content": output} for id in ids])]
        calls = self.answer.get("tool_calls") or []
        return [{"role": "tool", "tool_call_id": call["id"], "content": output} for call in calls]


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content blocks that the events of a message add up to."""
    blocks: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            blocks[event["index"]] = dict(event["content_block"])
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            for key in {"text", "thinking", "partial_json"} & delta.keys():
                block[key] = block.get(key, "") + delta[key]
    for block in blocks.values():
        if block["type"] == "tool_use":
            block["input"] = json.loads(block.pop("partial_json"))
    return [*blocks.values()]
