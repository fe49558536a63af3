"""The rollout buffer over HTTP, as clients meet it: items and groups, requests that are refused, limits and tokens."""

from __future__ import annotations

import asyncio
import http.client
import json
import time

import orjson
import pytest

from agl_slime.buffer.server import BufferServer
from agl_slime.buffer.settings import BufferSettings
from agl_slime.errors import ConfigError
from tests.buffer.items import WRITES_TWO_PER_INSTANCE, Client, add_generator, make_item, settings_for


async def test_a_written_item_is_answered_as_slimes_server_does(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        status, answer = await client.post("/buffer/write", make_item("1"))
        assert status == 200
        assert (answer["success"], answer["message"]) == (True, "Data has been successfully written to buffer")
        assert answer["data"]["data"] == [make_item("1")]
        assert answer["data"]["meta_info"] == "write to buffer"
        status, answer = await client.post("/buffer/write", make_item("1"), headers={"Prefer": "return=minimal"})
        assert answer["data"] == {"data": [], "meta_info": "write to buffer", "written": 0, "duplicates": 1}


async def test_an_empty_buffer_says_so(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        status, answer = await client.post("/get_rollout_data", {})
        assert status == 200
        assert answer == {
            "success": False,
            "message": "No data available to read",
            "data": {"data": [], "meta_info": {}},
        }
        assert await client.post("/get_rollout_data", data=b"") == (200, answer)


async def test_groups_come_out_with_their_meta_information(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        await client.post("/buffer/write", [make_item("1", reward=0), make_item("2"), make_item("3", "other")])
        status, answer = await client.post("/get_rollout_data", {})
        assert (status, answer["success"], answer["message"]) == (200, True, "Successfully read 2 items")
        assert answer["data"]["meta_info"] == {
            "total_samples": 3,
            "num_groups": 2,
            "avg_group_size": 1.5,
            "avg_reward": pytest.approx(2 / 3),
            "finished_groups": ["math_001"],
        }
        assert [entry["raw_reward"] for entry in answer["data"]["data"]] == [0, 1]
        assert {"uid", "instance_id", "messages", "reward", "extra_info"} <= answer["data"]["data"][0].keys()


async def test_batch_size_counts_items_in_whole_groups(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        await client.post("/buffer/write", [make_item(f"{i}.{n}", i) for i in range(5) for n in range(2)])
        assert len(await client.read(batch_size=5)) == 4
        assert len(await client.read(batch_size=1)) == 2
        assert len(await client.read()) == 4


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/buffer/write", b"{", 400, "the body is not JSON"),
        ("/buffer/write", b"", 400, "the body is not JSON"),
        ("/buffer/write", b'{"instance_id": "a", "reward": NaN}', 400, "the body is not JSON"),
        ("/buffer/write", b'{"instance_id": "a", "reward": 1e999}', 400, "the body is not JSON"),
        ("/buffer/write", b"\xff\xfe", 400, "the body is not JSON"),
        ("/buffer/write", b"[" * 100_000, 400, "the body is not JSON"),
        ("/buffer/write", b"[]", 400, "the list of items is empty"),
        ("/buffer/write", b"[3]", 400, "item 0 is of type int"),
        ("/buffer/write", b'{"uid": "1", "messages": []}', 400, "instance_id"),
        # no reader can use an item without messages: it would request the same item forever
        ("/buffer/write", b'{"instance_id": "a", "reward": 1, "extra_info": {}}', 400, "messages"),
        ("/buffer/write", b'{"instance_id": "a", "messages": "hello"}', 400, "messages"),
        (
            "/buffer/write",
            b'[{"instance_id": 1, "messages": []}, {"instance_id": [], "messages": []}]',
            400,
            "item 1: instance_id is []",
        ),
        ("/buffer/write", b'{"instance_id": "a", "messages": [], "task_type": "unheard"}', 404, "'unheard'"),
        ("/buffer/write", b'{"instance_id": "a", "messages": [], "task_type": 3}', 400, "task_type is 3"),
        ("/buffer/write", b'[{"instance_id": "a", "messages": [], "task_type": []}]', 400, "task_type is []"),
        ("/runs/guessed/buffer/write", b'{"instance_id": "a"}', 404, "this path belongs to no run"),
        ("/get_rollout_data", b"[]", 400, "the body is of type list"),
        ("/get_rollout_data", b'{"batch_size": 0}', 400, "batch_size is 0"),
        ("/get_rollout_data", b'{"batch_size": true}', 400, "batch_size is True"),
        ("/get_rollout_data", b'{"task_type": "unheard"}', 404, "'unheard'"),
        ("/get_rollout_data", b'{"ack": [1]}', 400, "ack.0 is 1"),
        ("/start_rollout", b"[]", 400, "the body is of type list"),
        ("/start_rollout", b"{}", 400, "task_type"),
        ("/start_rollout", b'{"task_type": "unheard"}', 404, "'unheard'"),
        (
            "/start_rollout",
            b'{"task_type": "sums", "num_repeat_per_sample": "many"}',
            400,
            "num_repeat_per_sample is 'many'",
        ),
        ("/start_rollout", b'{"task_type": "sums", "skip_instance_ids": "a"}', 400, "skip_instance_ids is 'a'"),
        ("/start_rollout", b'{"task_type": "sums", "input_file": 3}', 400, "input_file is 3"),
        ("/start_rollout", b'{"task_type": "sums", "input_file": "a\\u0000b"}', 400, "input_file"),
        ("/start_rollout", b'{"task_type": "sums", "input_file": "missing.jsonl"}', 400, "there is no such file"),
        ("/nowhere", b"{}", 404, "POST /nowhere: Not Found"),
        ("/stats", b"{}", 405, "POST /stats: Method Not Allowed"),
    ],
)
async def test_invalid_buffer_request_is_an_error_in_one_sentence(tmp_path, path, body, status, message):
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        got, answer = await client.post(path, data=body)
        assert got == status
        assert answer["success"] is False
        assert message in answer["message"]
        _, stats = await client.get("/stats")
        assert stats["held_items"] == 0


async def test_a_body_over_the_limit_is_refused(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path, max_body_mb=0.01)) as server, Client(server.url) as client:
        large = json.dumps(make_item("1", filler="x" * 20_000)).encode()
        status, answer = await client.post("/buffer/write", data=large)
        assert (status, answer["message"]) == (413, "the body is larger than 0.01 MB; send fewer items per request")


async def test_a_full_buffer_asks_writers_to_come_back(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path, max_buffer_size=2)) as server, Client(server.url) as client:
        await client.post("/buffer/write", [make_item("1"), make_item("2")])
        async with client._session.post(f"{server.url}/buffer/write", json=make_item("3")) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "5"
        await client.read()
        assert (await client.post("/buffer/write", make_item("3")))[0] == 200


async def test_reward_minus_one_marks_failure_unless_the_range_includes_it(tmp_path):
    items = [make_item("1", reward=-1), make_item("2", reward=1)]
    for reward_range, came in ((None, []), ((-1.0, 1.0), [-1, 1])):
        settings = settings_for(tmp_path, reward_range=reward_range)
        async with BufferServer(settings=settings) as server, Client(server.url) as client:
            await client.post("/buffer/write", items)
            assert [entry["raw_reward"] for entry in await client.read()] == came


async def test_too_deeply_nested_items_are_refused(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        for depth in (240, 260, 800, 1020, 5000):
            deep = b"[" * depth + b"]" * depth
            for fields in (
                b'"extra_info":{"a":%s},"uid":"1"',
                b'"extra_info":{"a":%s}',
                b'"instance_id":%s',
                b'"uid":%s',
            ):
                body = b'{"instance_id":"1","messages":[],"reward":1,' + fields % deep + b"}"
                for data in (body, b"[" + body + b"]"):
                    status, answer = await client.post("/buffer/write", data=data)
                    assert status == (200 if depth < 250 and b"extra" in fields else 400), answer
            status, answer = await client.post("/start_rollout", data=b'{"task_type":"math","x":' + deep + b"}")
            assert status < 500, answer


@pytest.mark.parametrize("reward", [-0.5, 2.0, -1.5, 100])
async def test_any_other_finite_reward_is_trained_on_unless_a_range_is_set(tmp_path, reward):
    """A reward outside of 0 to 1 is no mark of failure."""
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        await client.post("/buffer/write", [make_item("1", reward=reward), make_item("2", reward=0)])
        assert [entry["raw_reward"] for entry in await client.read()] == [reward, 0]
    settings = settings_for(tmp_path, reward_range=(0.0, 1.0))
    async with BufferServer(settings=settings) as server, Client(server.url) as client:
        await client.post("/buffer/write", [make_item("1", reward=reward), make_item("2", reward=0)])
        assert await client.read() == []


async def test_a_large_body_is_parsed_beside_the_event_loop(tmp_path):
    """Measured in CPU time of the loop's thread, which other processes do not change."""
    tokens = list(range(100_000, 200_000))
    body = json.dumps([make_item(str(n), tokens=tokens) for n in range(40)]).encode()
    began = time.thread_time()
    for item in orjson.loads(body):
        orjson.dumps(item)
    parsing_s = time.thread_time() - began
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        host, port = server.url.removeprefix("http://").split(":")

        def send() -> bytes:
            connection = http.client.HTTPConnection(host, int(port), timeout=60)
            connection.request("POST", "/buffer/write", body, {"Prefer": "return=minimal"})
            return connection.getresponse().read()

        began = time.thread_time()
        assert json.loads(await asyncio.to_thread(send))["data"]["written"] == 40
        assert time.thread_time() - began < parsing_s / 2


async def test_a_token_is_asked_for_everywhere_but_at_the_door(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path, token="secret")) as server:
        async with Client(server.url) as stranger:
            assert (await stranger.get("/health"))[0] == 200
            assert (await stranger.get("/stats"))[0] == 401
            assert (await stranger.post("/buffer/write", make_item("1")))[0] == 401
        async with Client(server.url, Authorization="Bearer secret") as friend:
            assert (await friend.post("/buffer/write", make_item("1")))[0] == 200


def test_other_machines_need_a_token():
    with pytest.raises(ConfigError, match="--token"):
        BufferSettings(host="0.0.0.0")
    assert BufferSettings(host="0.0.0.0", token="secret").host == "0.0.0.0"


async def test_every_item_of_64_writers_is_stored_once(tmp_path):
    async with (
        BufferServer(settings=settings_for(tmp_path, run_dir=tmp_path / "run")) as server,
        Client(server.url) as client,
    ):

        async def writer(n: int) -> None:
            for k in range(4):
                status, _ = await client.post("/buffer/write", make_item(f"{n}.{k}", f"i{n}.{k // 2}"))
                assert status == 200

        await asyncio.gather(*(writer(n) for n in range(64)))
        uids = [entry["uid"] for entry in await client.read()]
        assert sorted(uids) == sorted(f"{n}.{k}" for n in range(64) for k in range(4))
