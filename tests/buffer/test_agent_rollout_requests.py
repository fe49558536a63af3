"""The agent rollout's requests and log as documented, and answers that end its wait for a batch."""

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_slime.buffer.agent_rollout import get_rollout_data, start_rollout
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import DataSourceError
from tests.buffer.items import Client, make_item, settings_for
from tests.harness.agent_rollout import DataBuffer, args_for, buffer_that, call, instances, serve

pytestmark = pytest.mark.usefixtures("fresh_sessions")


async def test_documented_start_payload_is_sent(tmp_path):
    """The payload format of the documentation, key by key."""
    payloads: list[Any] = []

    async def start(request: web.Request) -> web.Response:
        payloads.append(await request.json())
        return web.json_response({"message": "Rollout started"})

    app = web.Application()
    app.router.add_post("/start_rollout", start)
    async with serve(app) as url:
        sizes = {"rollout_num_process": 1024, "num_epoch": 3, "n_samples_per_prompt": 8}
        args = args_for(url, tmp_path, hf_checkpoint="/path/to/tokenizer", **sizes)
        answer = await asyncio.to_thread(start_rollout, url, args, {"0": ["id1"], "1": ["id2"]})
    assert answer == {"message": "Rollout started"}
    where = {"remote_engine_url": "http://127.0.0.1:3000", "input_file": str(tmp_path / "prompts.jsonl")}
    run = {"num_process": 1024, "num_epoch": 3, "num_repeat_per_sample": "8", "skip_instance_ids": ["id1", "id2"]}
    sampling = {"max_tokens": 64, "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9}}
    assert payloads == [{**where, **run, **sampling, "task_type": "sums", "tokenizer_path": "/path/to/tokenizer"}]


async def test_get_rollout_data_has_the_documented_results_and_errors(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        assert await get_rollout_data(api_base_url=server.url) == ([], {})
        await client.post("/buffer/write", [make_item(f"{i}.{n}", i) for i in range(2) for n in range(2)])
        data, meta_info = await get_rollout_data(server.url, 2, 10.0)
        assert [item["uid"] for item in data] == ["0.0", "0.1"]
        assert meta_info["total_samples"] == 4
        url = server.url
    with pytest.raises(aiohttp.ClientError):
        await get_rollout_data(url)

    timed_out = asyncio.Event()
    bodies = {
        '{"success": true, "data": {"data": [{"uid": "1"}]}}': "has no extra_info, instance_id, messages, reward",
        "[1]": "expected an object",
        '{"success": true, "data": {"data": 3}}': "without a list",
        "hello": "did not answer with JSON",
    }
    answers = iter(bodies)

    async def answer(request: web.Request) -> web.Response:
        if (text := next(answers, None)) is None:
            await timed_out.wait()
        return web.Response(text=text, content_type="application/json")

    async with buffer_that(answer) as url:
        for message in bodies.values():
            with pytest.raises(ValueError, match=message):
                await get_rollout_data(url)
        with pytest.raises(asyncio.TimeoutError):
            await get_rollout_data(url, timeout=0.1)
        timed_out.set()


async def test_groups_beyond_a_batch_wait_for_the_next_call(tmp_path):
    """A server that gives all it has, whatever is asked, as slime's does."""
    tokens = {"tokens": [1, 2], "response_length": 1}
    answers = [[make_item(f"{i}.{n}", f"id{i}", **tokens) for i in range(3) for n in range(2)]]

    async def get(request: web.Request) -> web.Response:
        items = answers.pop() if answers else []
        data = {"data": items, "meta_info": {}}
        return web.json_response({"success": bool(items), "message": "", "data": data})

    async with buffer_that(get) as url:
        args = args_for(url, tmp_path, rollout_batch_size=1)
        assert [instances(await call(args, step, DataBuffer())) for step in range(3)] == [["id0"], ["id1"], ["id2"]]


WITHOUT_MESSAGES = {name: value for name, value in make_item("1").items() if name != "messages"}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([WITHOUT_MESSAGES], "messages"),  # a buffer would return such items to each retry, forever
        ([make_item("1", "a"), make_item("2", "b")], "n_samples_per_prompt 2 is not the generator's group size"),
        (None, "2 tries"),
    ],
)
async def test_answers_that_no_request_can_make_good_end_the_wait(tmp_path, items, message):
    requests: list[Any] = []

    async def get(request: web.Request) -> web.Response:
        requests.append(request)
        if items is None:
            return web.Response(status=500, text="broken")
        return web.json_response({"success": True, "message": "", "data": {"data": items, "meta_info": {}}})

    async with buffer_that(get) as url:
        args = args_for(url, tmp_path, fetch_trajectory_retry_times=-1 if items else 1)
        with pytest.raises(DataSourceError, match=message):
            await asyncio.wait_for(call(args, 0, DataBuffer()), 30)
    assert len(requests) == (1 if items else 2)
