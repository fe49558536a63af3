"""``APIMultiTurnRollout`` against a chat-completions server on 127.0.0.1: a test per sentence of its documentation."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agl_slime.agent.tools import ToolManager
from agl_slime.buffer.batched.api_multi_turn import APIMultiTurnRollout, OpenAI
from agl_slime.buffer.batched.multi_turn import messages_to_sample
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.support.http import listening
from tests.agent.multi_turn_agents import look
from tests.harness.loop_thread import in_thread
from tests.harness.samples import trained_ids
from tests.harness.vocabularies import chat_tokenizer

Reply = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def _openai() -> None:
    pytest.importorskip("openai")


class ChatServer:
    """``/v1/chat/completions``: answers with ``reply(request)``: a message, perhaps with finish_reason, or a status."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.together = self.most_together = 0
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:  # for tests/tools/evaluation
        return web.json_response({"object": "list", "data": [{"id": "stub"}]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.together += 1
        self.most_together = max(self.most_together, self.together)
        try:
            message = self.reply(body)
            if asyncio.iscoroutine(message):
                message = await message
        finally:
            self.together -= 1
        if isinstance(message, int):
            return web.json_response({"error": {"message": "no"}}, status=message)
        finish = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
        choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
        return web.json_response(
            {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )


@contextmanager
def serving(reply: Reply) -> Iterator[ChatServer]:
    server = ChatServer(reply)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/v1/models", server.models)
    with in_thread(listening(app, host="127.0.0.1", port=0, backlog=128)) as url:
        server.url = f"{url}/v1"
        yield server


def calling(**arguments: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": json.dumps(arguments)}
    return {"content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def two_turns(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": "Three."} if body["messages"][-1]["role"] == "tool" else calling(key="kz")


def trajectories(n: int = 1) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": f"q{i}"}], "id": f"t{i}"} for i in range(n)]


def rollout(server: ChatServer, **options: Any) -> APIMultiTurnRollout:
    api = OpenAI(model="m", base_url=server.url, max_retries=0)
    return APIMultiTurnRollout(api=api, **{"tool_manager": ToolManager([look]), **options})


def test_tools_are_called_and_the_conversation_comes_back() -> None:
    """It can be trained, as text that is tokenized once more."""
    with serving(two_turns) as server:
        (done,) = rollout(server)(trajectories())
    assert [message["role"] for message in done["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert done["messages"][2] == {"role": "tool", "name": "look", "tool_call_id": "call_1", "content": "three"}
    assert done["messages"][1]["tool_calls"][0]["function"]["name"] == "look"
    assert (done["turns"], done["stop_reason"], done["truncated"], done["id"]) == (2, "stop", False, "t0")
    assert server.requests[0]["tools"][0]["function"]["name"] == "look"
    assert "input_ids" not in done
    tokenizer = chat_tokenizer("anthropic", "groups_tools")
    messages = [{**message, "content": message["content"] or "calling"} for message in done["messages"]]
    sample = messages_to_sample(messages, reward=1.0, tokenizer=tokenizer, stop_reason=done["stop_reason"], index=3)
    assert sample.metadata["token_source"] == "retokenized"
    assert sample.rollout_log_probs is None
    assert tokenizer.decode(trained_ids(sample)) == "calling<|im_end|>Three.<|im_end|>"
    assert (sample.loss_mask or [0])[0] == 1


def test_stop_reasons() -> None:
    replies: list[tuple[Reply, str, bool]] = [
        (lambda body: {"content": "Thr", "finish_reason": "length"}, "length", True),
        (lambda body: calling(key="kz"), "max_turns", True),
        (lambda body: 500, "api_error", False),
    ]
    for reply, reason, truncated in replies:
        with serving(reply) as server:
            (done,) = rollout(server, max_turns=2)(trajectories())
        assert (done["stop_reason"], done["truncated"]) == (reason, truncated)
        assert ("error" in done) == (reason == "api_error")


def test_a_failing_row_never_raises_out_of_the_batch(tmp_path: Path) -> None:
    def raising(key: str) -> str:
        raise RuntimeError("the sandbox is gone")

    raising.__name__ = "look"

    def reply(body: dict[str, Any]) -> Any:
        if not body["messages"]:
            return 422
        return 400 if body["messages"][0]["content"] == "q1" else two_turns(body)

    with serving(reply) as server:
        good = ToolManager([look])
        options = {"tool_manager": [good, good, ToolManager([raising]), good], "step": 7}
        done = rollout(server, trace_dir=tmp_path)([*trajectories(3), {"id": "no messages"}], **options)
    assert [trajectory["stop_reason"] for trajectory in done] == ["stop", "api_error", "api_error", "api_error"]
    assert done[2]["error"].endswith("RuntimeError: the sandbox is gone")
    assert (done[2]["turns"], done[2]["tools_called"]["calls"]) == (1, {"look": 1})
    names = ["7-fail-no_messages.json", "7-fail-t1.json", "7-fail-t2.json", "7-ok-t0.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_at_most_concurrency_calls_at_the_same_time() -> None:
    three = asyncio.Barrier(3)

    async def reply(body: dict[str, Any]) -> dict[str, Any]:
        await three.wait()  # for as many as may come
        return {"content": "Three."}

    with serving(reply) as server:
        done = rollout(server, concurrency=3)(trajectories(9))
        assert server.most_together == 3
    assert [trajectory["id"] for trajectory in done] == [f"t{i}" for i in range(9)]


def test_sampling_and_extra_fields_are_sent() -> None:
    with serving(lambda body: {"content": "x"}) as server:
        sampling = SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=11, stop=("END",))
        rollout(server, sampling_params=sampling, extra_body={"top_k": 5}, tool_manager=None)(trajectories())
        (request,) = server.requests
    sent = {name: request[name] for name in ("model", "temperature", "top_p", "max_tokens", "stop", "top_k")}
    assert sent == {"model": "m", "temperature": 0.7, "top_p": 0.9, "max_tokens": 11, "stop": ["END"], "top_k": 5}
    assert "tools" not in request


def test_calls_in_the_text_are_read_when_a_parser_is_named() -> None:
    def reply(body: dict[str, Any]) -> Any:
        text = '<tool_call>{"name": "look", "arguments": {"key": "kz"}}</tool_call>'
        return {"content": "Three." if body["messages"][-1]["role"] == "tool" else text}

    with serving(reply) as server:
        assert rollout(server, tool_parser="hermes")(trajectories())[0]["turns"] == 2
        assert rollout(server)(trajectories())[0]["turns"] == 1
