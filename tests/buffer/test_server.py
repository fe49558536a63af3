"""The rollout buffer over HTTP, as clients meet it: items and groups, requests that are refused, limits and tokens."""

import asyncio
import http.client
import json
import time

import orjson
import pytest

from agl_slime.buffer.models import parse_body
from agl_slime.buffer.server import BufferServer
from agl_slime.buffer.settings import BufferSettings
from agl_slime.errors import BufferRequestError, ConfigError
from agl_slime.support.http import json_value
from tests.buffer.items import WRITES_TWO_PER_INSTANCE, Client, add_generator, make_item, settings_for


async def test_items_are_written_and_read_as_with_slimes_server(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        status, answer = await client.post("/get_rollout_data", {})
        assert (status, answer) == (
            200,
            {"success": False, "message": "No data available to read", "data": {"data": [], "meta_info": {}}},
        )
        assert await client.post("/get_rollout_data", data=b"") == (200, answer)
        item = make_item("1", reward=0)
        status, answer = await client.post("/buffer/write", item)
        assert status == 200
        assert (answer["success"], answer["message"]) == (True, "Data has been successfully written to buffer")
        assert answer["data"] == {"data": [item], "meta_info": "write to buffer", "written": 1, "duplicates": 0}
        status, answer = await client.post("/buffer/write", item, headers={"Prefer": "return=minimal"})
        assert answer["data"] == {"data": [], "meta_info": "write to buffer", "written": 0, "duplicates": 1}
        await client.post("/buffer/write", [make_item("2"), make_item("3", "other")])
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
        await client.post("/buffer/write", [make_item(f"{i}.{n}", i) for i in range(5) for n in range(2)])
        for batch_size, items in (({"batch_size": 5}, 4), ({"batch_size": 1}, 2), ({}, 4)):
            assert len(await client.read(**batch_size)) == items  # in whole groups


REFUSED = [
    ("/buffer/write", b"{", 400, "the body is not JSON"),
    ("/buffer/write", b"[" * 100_000, 400, "the body is not JSON"),
    ("/buffer/write", b"[]", 400, "the list of items is empty"),
    ("/buffer/write", b"[3]", 400, "item 0 is of type int"),
    ("/buffer/write", b'{"uid": "1", "messages": []}', 400, "instance_id"),
    # no reader can use an item without messages: it would request the same item forever
    ("/buffer/write", b'{"instance_id": "a", "reward": 1, "extra_info": {}}', 400, "messages"),
    ("/buffer/write", b'{"instance_id": "a", "messages": "hello"}', 400, "messages"),
    ("/buffer/write", b'{"uid": "a\\u0000b", "instance_id": "a", "messages": []}', 400, "uid is 'a\\x00b'"),
    ("/buffer/write", b'[{"instance_id": [], "messages": []}]', 400, "item 0: instance_id is []"),
    ("/buffer/write", b'{"instance_id": "a", "messages": [], "task_type": "unheard"}', 404, "'unheard'"),
    ("/buffer/write", b'{"instance_id": "a", "messages": [], "task_type": 3}', 400, "task_type is 3"),
    ("/runs/guessed/buffer/write", b'{"instance_id": "a"}', 404, "this path belongs to no run"),
    ("/get_rollout_data", b"[]", 400, "the body is of type list"),
    ("/get_rollout_data", b'{"batch_size": true}', 400, "batch_size is True"),
    ("/get_rollout_data", b'{"task_type": "unheard"}', 404, "'unheard'"),
    ("/get_rollout_data", b'{"ack": [1]}', 400, "ack.0 is 1"),
    ("/start_rollout", b"{}", 400, "task_type"),
    ("/start_rollout", b'{"task_type": "unheard"}', 404, "'unheard'"),
    ("/start_rollout", b'{"task_type": "sums", "num_repeat_per_sample": "x"}', 400, "num_repeat_per_sample is 'x'"),
    ("/start_rollout", b'{"task_type": "sums", "skip_instance_ids": "a"}', 400, "skip_instance_ids is 'a'"),
    ("/start_rollout", b'{"task_type": "sums", "input_file": "a\\u0000b"}', 400, "input_file"),
    ("/start_rollout", b'{"task_type": "sums", "input_file": "missing.jsonl"}', 400, "there is no such file"),
    ("/nowhere", b"{}", 404, "POST /nowhere: Not Found"),
    ("/stats", b"{}", 405, "POST /stats: Method Not Allowed"),
]


async def test_invalid_buffer_request_is_an_error_in_one_sentence(tmp_path):
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        for path, body, status, message in REFUSED:
            answer_status, answer = await client.post(path, data=body)
            assert (answer_status, answer["success"]) == (status, False), (path, body)
            assert message in answer["message"], (path, body)
        _, stats = await client.get("/stats")
        assert stats["held_items"] == 0


async def test_a_large_body_and_a_full_buffer_are_refused(tmp_path):
    settings = settings_for(tmp_path, max_body_mb=0.01, max_buffer_size=2)
    async with BufferServer(settings=settings) as server, Client(server.url) as client:
        status, answer = await client.post("/buffer/write", make_item("1", filler="x" * 20_000))
        assert (status, answer["message"]) == (413, "the body is larger than 0.01 MB; send fewer items per request")
        await client.post("/buffer/write", [make_item("1"), make_item("2")])
        async with client._session.post(f"{server.url}/buffer/write", json=make_item("3")) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
        await client.read()
        assert (await client.post("/buffer/write", make_item("3")))[0] == 200


async def test_a_token_is_needed_everywhere_but_at_the_door_and_on_other_hosts(tmp_path):
    with pytest.raises(ConfigError, match="--token"):
        BufferSettings(host="0.0.0.0")
    assert BufferSettings(host="0.0.0.0", token="secret").host == "0.0.0.0"
    async with BufferServer(settings=settings_for(tmp_path, token="secret")) as server:
        async with Client(server.url) as stranger:
            assert (await stranger.get("/health"))[0] == 200
            assert (await stranger.get("/stats"))[0] == 401
            assert (await stranger.post("/buffer/write", make_item("1")))[0] == 401
        async with Client(server.url, Authorization="Bearer secret") as friend:
            assert (await friend.post("/buffer/write", make_item("1")))[0] == 200


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


@pytest.mark.parametrize("number", ["1" + "0" * 309, "-1" + "0" * 309, str(2**64), "1e400", "1e308"])
async def test_numbers_beyond_64_bits_are_kept_or_refused_and_end_nothing(tmp_path, number):
    add_generator(tmp_path, "sums", 'TASK_TYPE = "sums"\ndef run_rollout(data): pass')
    fields = [("/buffer/write", make_item("@"), name) for name in (*make_item("@"), "group_id", "task_type", "other")]
    fields += [("/get_rollout_data", {}, name) for name in ("batch_size", "request_id", "ack", "other")]
    names = "num_repeat_per_sample skip_instance_ids trained_groups fresh other"
    fields += [("/start_rollout", {"task_type": "sums"}, name) for name in names.split()]
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        for path, body, name in fields:
            for value in (0.5, [0.5], {"a": 0.5})[: 2 if path == "/start_rollout" else 3]:
                text = json.dumps({**body, name: value}).replace("0.5", number).replace("@", f"{name}{value}")
                status, answer = await client.post(path, data=text.encode())
                assert status in (200, 400), (text, answer)
                if (name, value) == ("reward", 0.5):
                    assert status == (200 if number in (str(2**64), "1e308") else 400)
            assert (await client.post(path, body))[0] == 200, (path, name)  # what was kept ends no later request
        assert (await client.get("/stats"))[0] == 200


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


# -- values that orjson does not carry through as they are ------------------------------------------------------------


@pytest.mark.parametrize(
    "number", ["-9223372036854775809", "0.1234567890123456789", "12345678901234567890.5", '"12345678901234567890"']
)
def test_numbers_are_read_as_pythons_own_reader_reads_them(number: str):
    text = f'{{"a": [0.00012345678901234567, {number}]}}'
    assert json_value(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "odd", [b"NaN", b"1e999", b'"\\ud800"', b"\xff", b"{", b"9" * 5000, b"[" * 260 + b"]" * 260, b"[" * 9999]
)
def test_beside_a_long_integer_json_is_as_strict_as_without_one(odd: bytes):
    for text in (b"[%b]" % odd, b"[123456789012345678901234567890, %b]" % odd):
        with pytest.raises(BufferRequestError, match=r"nested|the body is not JSON"):
            parse_body(text)
