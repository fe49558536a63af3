"""Generators against a real engine over HTTP (a scripted one) and a real buffer."""

import asyncio
import math
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from agl_slime.buffer.client import BufferUnreachableError, BufferWriter, ask_buffer
from agl_slime.buffer.generators import base_generator
from agl_slime.buffer.runs import SHIPPED_GENERATORS, discover_generators
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import BufferRequestError
from agl_slime.support.agl_types import LLM
from agl_slime.tools.record.recorder import RecordGateway
from tests.buffer.items import Client, add_generator, make_item, settings_for, write_problems
from tests.harness.agent_rollout import serve
from tests.harness.waiting import until


@asynccontextmanager
async def chat_engine(answer: Any) -> AsyncIterator[SimpleNamespace]:
    """An OpenAI-compatible server; ``answer(request)`` gives text, finish reason and the number of tokens."""
    requests: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.Response:
        requests.append(await request.json())
        scripted = answer(requests[-1])
        if isinstance(scripted, int):
            return web.json_response({"error": {"message": "scripted"}}, status=scripted)
        text, finish_reason, tokens = scripted
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
        usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
        completion = {"id": "x", "object": "chat.completion", "created": 0, "model": "custom"}
        return web.json_response({**completion, "choices": [choice], "usage": usage})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    async with serve(app) as url:
        yield SimpleNamespace(url=url, requests=requests)


def adds(body: dict[str, Any]) -> tuple[str, str, int]:
    return rf"That is \boxed{{{int(body['messages'][0]['content'].split()[0]) + 1}}}.", "stop", 8


def test_the_buffer_starts_without_agent_lightning():
    """Importing it takes seconds, which a start of the buffer and each start of a generator would wait for."""
    modules = "agl_slime.buffer.server, agl_slime.buffer.generators.agl_generator"
    code = f"import sys, {modules}; sys.exit('agentlightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_the_math_generator_goes_from_payload_to_groups(tmp_path):
    discovery = discover_generators(SHIPPED_GENERATORS)
    assert (set(discovery.generators), discovery.problems) == ({"math", "agl"}, {})
    async with (
        chat_engine(adds) as engine,
        BufferServer(settings=settings_for(tmp_path, generators=None)) as server,
        Client(server.url) as client,
    ):
        payload = {"num_process": 8, "num_epoch": 2, "num_repeat_per_sample": "4", "skip_instance_ids": ["math_0"]}
        payload |= {"remote_engine_url": engine.url, "input_file": write_problems(tmp_path), "task_type": "math"}
        payload |= {"max_tokens": 64, "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9}}
        assert (await client.post("/start_rollout", payload))[0] == 200
        data: list[dict[str, Any]] = []

        async def all_there() -> bool:
            data.extend(await client.read())
            return len(data) >= 20

        await until(all_there, within_s=60)
        assert Counter(entry["instance_id"] for entry in data) == {"math_0": 4, "math_1": 8, "math_2": 8}
        assert {entry["raw_reward"] for entry in data} == {1.0}
        assert {"uid", "instance_id", "messages", "reward", "extra_info"} <= data[0].keys()
        assert data[0]["extra_info"]["finish_reason"] == "stop"
        assert {(body["temperature"], body["top_p"], body["max_tokens"]) for body in engine.requests} == {
            (0.8, 0.9, 64)
        }


async def test_aborted_answer_is_continued_until_no_tokens_remain(monkeypatch):
    monkeypatch.setattr(base_generator, "_PAUSE_S", 0.001)
    script = iter(
        [("The answer", "abort", 3), (" is", "abort", 2), (r" \boxed{4}", "stop", 5)] + 2 * [("word", "abort", 16)]
    )
    import openai

    async with (
        chat_engine(lambda body: next(script)) as engine,
        openai.AsyncOpenAI(api_key="none", base_url=f"{engine.url}/v1") as client,
    ):
        question = [{"role": "user", "content": "2+2?"}]
        ended = await base_generator.query_single_turn(client, question, {"max_tokens": 32})
        cut_off = await base_generator.query_single_turn(client, question, {"max_tokens": 32})
    assert ended == ([*question, {"role": "assistant", "content": r"The answer is \boxed{4}"}], "stop")
    assert cut_off == ([*question, {"role": "assistant", "content": "wordword"}], "length")
    first, second, third, *_ = engine.requests
    assert "continue_final_message" not in first
    assert second["messages"][-1] == {"role": "assistant", "content": "The answer"}
    assert second["continue_final_message"] is True
    assert [body["max_tokens"] for body in engine.requests] == [32, 29, 27, 32, 16]
    assert third["messages"][-1]["content"] == "The answer is"


@pytest.mark.parametrize("content", [400, object(), {"a set"}])
async def test_a_rollout_that_fails_or_is_no_json_costs_its_own_group_only(tmp_path, content):
    """Its items are stored, marked as failed, and its group is refused; the others come out."""

    def refuses_one(body: dict[str, Any]) -> Any:
        return 400 if content == 400 and body["messages"][0]["content"].startswith("1") else adds(body)

    async def rollout(client: Any, messages: Any, sampling_params: Any) -> Any:
        if content == 400 or not messages[0]["content"].startswith("1"):
            return await base_generator.query_single_turn(client, messages, sampling_params)
        return [*messages, {"role": "assistant", "content": content}]

    async with (
        chat_engine(refuses_one) as engine,
        BufferServer(settings=settings_for(tmp_path)) as server,
        Client(server.url) as client,
    ):
        generator = base_generator.BaseGenerator(engine.url, server.url, num_repeat_per_sample=2, max_tokens=16)
        await generator.run(write_problems(tmp_path), rollout, base_generator.get_rule_based_math_reward)
        assert {entry["instance_id"] for entry in await client.read()} == {"math_0", "math_2"}
        _, stats = await client.get("/stats")
    assert stats["task_types"]["math"]["groups_refused"] == {"too_few_valid_items": 1}
    assert stats["items"]["reasons"] == {"filtered: too_few_valid_items": 2}


ODD_ROWS = r"""
{"instance_id": "big", "prompt": "1", "label": "4", "number": 123456789012345678901234567890}
{"instance_id": "half", "prompt": "2 \ud83d", "label": "4", "note": "x\ud83d", "ke\ud83dy": ["\ud83d"]}
{"instance_id": "nan", "prompt": "3", "label": "4", "low": NaN, "high": [1e999, -Infinity]}
"""


async def test_odd_rows_lose_none_of_their_rollouts(tmp_path):
    path = tmp_path / "odd.jsonl"
    path.write_text(ODD_ROWS.strip())
    rows: list[Any] = []

    async def rollout(client: Any, messages: Any, sampling_params: Any) -> Any:
        return [*messages, {"role": "assistant", "content": "\\boxed{4}"}]

    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        generator = base_generator.BaseGenerator("http://127.0.0.1:9", server.url, num_repeat_per_sample=2)
        await generator.run(str(path), rollout, lambda item: rows.append(item) or 1.0)
        answer = await ask_buffer(server.url, "/get_rollout_data", {})
        _, stats = await client.get("/stats")
    assert stats["items"]["reasons"] == {}
    by_id = {item["instance_id"]: item for item in answer["data"]["data"]}
    extra = {name: item["extra_info"] for name, item in by_id.items()}
    assert extra["big"]["number"] == 123456789012345678901234567890
    assert extra["half"]["note"] == "x\\ud83d"
    assert (extra["nan"]["low"], extra["nan"]["high"]) == ("NaN", ["Infinity", "-Infinity"])
    assert extra["half"]["ke\\ud83dy"] == ["\\ud83d"]
    assert by_id["half"]["messages"][0]["content"] == "2 \\ud83d"
    rows_by_id = {row["instance_id"]: row for row in rows}  # a reward sees the row as the file has it
    assert (rows_by_id["half"]["note"], rows_by_id["nan"]["high"]) == ("x\ud83d", [math.inf, -math.inf])


async def test_refused_items_cost_no_other_and_numbers_without_json_are_named(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, BufferWriter(url=server.url) as writer:
        for item, message in (
            (make_item("1", reward=math.nan), r"item '1' is not JSON: reward is nan; only finite"),
            (make_item("2", rollout_log_probs=[-0.5, -math.inf], group_id=None), r"rollout_log_probs\.1 is -inf"),
            (make_item("3", reward=math.nan, seed=2**70), "item '3' is not JSON"),
        ):
            with pytest.raises(BufferRequestError, match=message):
                await writer.write(item)
        await writer.write(make_item("0", group_id=None))
        items = [make_item("1"), {"uid": "2"}, make_item("3"), make_item("0", group_id=None)]
        results = await asyncio.gather(*map(writer.write, items), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), BufferRequestError, type(None), type(None)]
        assert server.buffer.store.held_items == 3


async def test_writes_wait_for_a_buffer_that_is_away_up_to_give_up_s(tmp_path):
    settings = settings_for(tmp_path, run_dir=tmp_path / "run")
    async with BufferServer(settings=settings) as server:
        url = server.url
    async with BufferWriter(url=url, give_up_s=0.2) as writer:
        with pytest.raises(BufferUnreachableError, match="stored no item"):
            await writer.write(make_item("1"))
    async with BufferWriter(url=url) as writer:
        waiting = asyncio.create_task(writer.write(make_item("1")))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done
        async with BufferServer(settings=replace(settings, port=int(url.rpartition(":")[2]))) as server:
            await asyncio.wait_for(waiting, 20)
            assert server.buffer.store.held_items == 1


async def test_only_missing_items_are_generated_with_a_whole_runs_seeds(tmp_path):
    partial = [{"instance_id": "math_1", "group_id": 0, "items": 3}]
    missing = {"skip_instance_ids": ["math_0", "math_0"], "partial_groups": partial}
    requests = []
    for planned in (missing, {}, {"seed": 1}):
        async with (
            chat_engine(adds) as engine,
            BufferServer(settings=settings_for(tmp_path, group_size=4)) as server,
            Client(server.url) as client,
        ):
            sizes: Any = {"num_repeat_per_sample": 4, "num_repeats": 2, **planned}
            generator = base_generator.BaseGenerator(engine.url, server.url, **sizes)
            reward = base_generator.get_rule_based_math_reward
            await generator.run(write_problems(tmp_path), base_generator.query_single_turn, reward)
            _, stats = await client.get("/stats")
            assert stats["items"]["opened"] == len(engine.requests)
        requests.append({(body["messages"][0]["content"], body["seed"]) for body in engine.requests})
    assert Counter(content for content, _ in requests[0]) == {"1 + 1?": 1 + 4, "2 + 1?": 8}
    assert requests[0] < requests[1]
    assert len(requests[1]) == len(requests[2]) == 24
    assert not requests[1] & requests[2]


async def test_the_recorder_gives_the_embedded_engine_chat_completions(tmp_path, embedded_engine, policy_dir):
    llm = LLM(endpoint=embedded_engine, model=str(policy_dir), sampling_parameters={})
    with RecordGateway(directory=tmp_path, llm=llm) as recorder:
        async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
            url = f"{recorder.rollouts_url}/buffer/v1"
            generator = base_generator.BaseGenerator(url, server.url, num_repeat_per_sample=2, max_tokens=4)
            await generator.run(write_problems(tmp_path), base_generator.query_single_turn, lambda item: 0.5)
            data = await client.read()
    assert [(entry["raw_reward"], entry["messages"][-1]["role"]) for entry in data] == [(0.5, "assistant")] * 6


async def test_documented_generator_runs_as_a_file(tmp_path):
    """The template of the documentation: its own task type, sync functions, an OpenAI client, run_rollout as printed
    (less its sleep and prints)."""
    add_generator(
        tmp_path,
        "your_task",
        """
        from agl_slime.buffer.generators.base_generator import SAMPLING_PARAMS, BaseGenerator
        from agl_slime.buffer.generators.default_func import normalize_group_data  # becomes the file's stage

        TASK_TYPE = "your_task_name"

        def query_single_turn(client, messages, sampling_params, tools=None):
            payload = {"messages": messages, **sampling_params, "model": "custom", "stream": False, "seed": 7}
            response = client.chat.completions.create(**payload)
            return messages + [{"role": "assistant", "content": response.choices[0].message.content}]

        def reward(item):
            assert item["messages"][-1]["role"] == "assistant"
            return 1 if item["label"] in item["messages"][-1]["content"] else 0

        def run_rollout(data: dict):
            global SAMPLING_PARAMS
            for k, v in data["sampling_params"].items():
                SAMPLING_PARAMS[k] = v
            generator = BaseGenerator(
                data["remote_engine_url"],
                data["remote_buffer_url"],
                num_repeat_per_sample=int(data["num_repeat_per_sample"]),
                queue_size=1000000,
                max_tokens=int(data["sampling_params"]["max_tokens"]),
                num_process=int(data.get("num_process", 100)),
                task_type=data["task_type"],
                skip_instance_ids=data.get("skip_instance_ids", None),
            )
            generator.entry(data["input_file"], query_single_turn, reward, int(data.get("num_epoch", 1)))
        """,
    )
    (run_rollout,) = (each.run_rollout for each in discover_generators(tmp_path / "generators").generators.values())
    async with (
        chat_engine(adds) as engine,
        BufferServer(settings=settings_for(tmp_path)) as server,
        Client(server.url) as client,
    ):
        payload = {"remote_engine_url": engine.url, "remote_buffer_url": server.url, "task_type": "your_task_name"}
        payload |= {"input_file": write_problems(tmp_path), "num_repeat_per_sample": "2"}
        payload["sampling_params"] = {"max_tokens": 8, "temperature": 0.5}
        await asyncio.to_thread(run_rollout, payload)
        data = await client.read()
    assert Counter(entry["instance_id"] for entry in data) == {"math_0": 2, "math_1": 2, "math_2": 2}
    assert {entry["raw_reward"] for entry in data} == {1}
    assert {body["temperature"] for body in engine.requests} == {0.5}
