"""The agent rollout against a real buffer: what slime calls, from a thread of its own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_slime.buffer import agent_rollout, session
from agl_slime.buffer.agent_rollout import (
    generate_agent_rollout,
    generate_rollout,
    get_rollout_data,
    log_raw_info,
    start_rollout,
)
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.types import RolloutFnEvalOutput, RolloutFnTrainOutput
from tests.buffer_cases import Client, add_generator, make_item, settings_for
from tests.trace_tokenizers import small_tokenizer

GENERATOR = """
    import json, urllib.request

    TASK_TYPE = "sums"
    EPOCHS = None

    def run_rollout(data):
        skip = list(data["skip_instance_ids"])
        for epoch in range(EPOCHS or data["num_epoch"]):
            for line in open(data["input_file"]):
                instance_id = json.loads(line)["instance_id"]
                if instance_id in skip:
                    skip.remove(instance_id)
                    continue
                n_items = int(data["num_repeat_per_sample"])
                items = [
                    {
                        "uid": f"{epoch}.{instance_id}.{n}", "instance_id": instance_id, "group_id": epoch,
                        "messages": [], "reward": n % 2,
                        "extra_info": {"payload": {
                            k: data[k] for k in ("sampling_params", "remote_engine_url", "num_process")
                        }},
                        "tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-0.5, -1.0],
                    }
                    for n in range(n_items)
                ]
                request = urllib.request.Request(
                    data["remote_buffer_url"] + "/buffer/write", json.dumps(items).encode(),
                    {"Content-Type": "application/json"},
                )
                urllib.request.urlopen(request).read()
"""


@pytest.fixture(autouse=True)
def fresh_sessions() -> Iterator[None]:
    agent_rollout.forget_sessions()
    yield
    agent_rollout.forget_sessions()


class DataBuffer:
    """slime's data buffer, as far as the agent rollout uses it."""

    def __init__(self, metadata: dict[str, Any] | None = None) -> None:
        self.metadata = dict(metadata or {})

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)


def args_for(url: str, tmp_path: Path, *, instances: int = 4, **changes: Any) -> SimpleNamespace:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"instance_id": f"id{n}"}) + "\n" for n in range(instances)))
    values = {
        "agent_rollout_buffer_url": url,
        "rollout_task_type": "sums",
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 64,
        "rollout_temperature": 0.8,
        "rollout_top_p": 0.9,
        "num_epoch": 1,
        "prompt_data": str(file),
        "hf_checkpoint": None,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": 3000,
        "rewards_normalization": False,
        "fetch_trajectory_retry_times": 3,
    }
    return SimpleNamespace(**{**values, **changes})


async def call(args: Any, rollout_id: int, data_buffer: Any) -> RolloutFnTrainOutput:
    output = await asyncio.to_thread(generate_rollout, args, rollout_id, data_buffer)
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def instances(output: RolloutFnTrainOutput) -> list[str]:
    return [group[0].metadata["instance_id"] for group in output.samples]


async def test_batches_come_one_after_the_other_with_everything_set(tmp_path):
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        data_buffer = DataBuffer()
        args = args_for(server.url, tmp_path)
        first = await call(args, 0, data_buffer)
        second = await call(args, 1, data_buffer)
    assert [len(group) for group in first.samples] == [2, 2]
    assert sorted(instances(first) + instances(second)) == ["id0", "id1", "id2", "id3"]
    samples = [sample for output in (first, second) for group in output.samples for sample in group]
    assert [sample.index for sample in samples] == list(range(8))
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len({sample.rollout_id for sample in samples}) == 8
    assert all(sample.rollout_log_probs == [-0.5, -1.0] for sample in samples)
    assert [sample.reward for sample in first.samples[0]] == pytest.approx([-1, 1], abs=1e-6)
    assert samples[0].metadata["payload"] == {
        "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9},
        "remote_engine_url": "http://127.0.0.1:3000",
        "num_process": 100,
    }
    assert first.metrics is not None
    assert all(name.startswith("rollout/") for name in first.metrics)
    assert first.metrics["rollout/no_filter/avg_reward"] == 0.5
    assert first.metrics["rollout/buffer/retokenized_ratio"] == 0
    assert data_buffer.metadata["0"] == instances(first)
    assert len(data_buffer.metadata["buffer_groups:0"]) == 2


async def test_slime_gets_raw_rewards_when_it_normalises_itself(tmp_path):
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        output = await call(args_for(server.url, tmp_path, rewards_normalization=True), 0, DataBuffer())
    assert [sample.reward for sample in output.samples[0]] == [0, 1]


async def test_one_sample_per_prompt_works(tmp_path):
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        output = await call(args_for(server.url, tmp_path, n_samples_per_prompt=1), 0, DataBuffer())
    assert [len(group) for group in output.samples] == [1, 1]


async def test_a_resumed_trainer_trains_the_rest_and_nothing_twice(tmp_path):
    """The trainer dies after step 2 with a checkpoint of step 0: steps 1 and 2 are made of the same groups again, and
    of no others."""
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path, run_dir=tmp_path / "run")) as server:
        args = args_for(server.url, tmp_path, instances=8)
        data_buffer = DataBuffer()
        first = await call(args, 0, data_buffer)
        checkpoint = json.loads(json.dumps(data_buffer.metadata))
        lost = instances(await call(args, 1, data_buffer)) + instances(await call(args, 2, data_buffer))
        agent_rollout.forget_sessions()
        data_buffer = DataBuffer(checkpoint)
        again = [instance for step in (1, 2, 3) for instance in instances(await call(args, step, data_buffer))]
        assert sorted(again[:4]) == sorted(lost)
        assert sorted(instances(first) + again) == [f"id{n}" for n in range(8)]


async def test_steps_that_a_saved_data_buffer_knows_and_the_trainer_forgot_do_not_count(tmp_path):
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        args = args_for(server.url, tmp_path)
        data_buffer = DataBuffer()
        await call(args, 0, data_buffer)
        lost = instances(
            await call(args, 1, data_buffer)
        )  # generated ahead of the checkpoint of step 0, as asynchronous training does
        agent_rollout.forget_sessions()
        assert sorted(instances(await call(args, 1, data_buffer))) == sorted(lost)


async def test_what_was_fetched_beyond_a_batch_waits_for_the_next_call(tmp_path):
    """A server that gives all it has, whatever is asked, as slime's does."""
    answers = [
        {
            "data": [
                make_item(f"{i}.{n}", f"id{i}", tokens=[1, 2], response_length=1) for i in range(3) for n in range(2)
            ],
            "meta_info": {},
        }
    ]

    async def get(request: web.Request) -> web.Response:
        data = answers.pop() if answers else {"data": [], "meta_info": {}}
        return web.json_response({"success": bool(data["data"]), "message": "", "data": data})

    async def start(request: web.Request) -> web.Response:
        return web.json_response({"message": "Rollout started"})

    app = web.Application()
    app.router.add_post("/get_rollout_data", get)
    app.router.add_post("/start_rollout", start)
    async with serve(app) as url:
        args = args_for(url, tmp_path, rollout_batch_size=1)
        assert [instances(await call(args, step, DataBuffer())) for step in range(3)] == [["id0"], ["id1"], ["id2"]]


class serve:
    """A server for the time of a block."""

    def __init__(self, app: web.Application) -> None:
        self._runner = web.AppRunner(app)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()


async def test_a_generator_that_ends_too_early_ends_the_wait_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "ASK_ABOUT_RUN_S", 0.1)
    add_generator(
        tmp_path, "sums", GENERATOR.replace("skip = list", "raise RuntimeError('no engine')\n        skip = list")
    )
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        with pytest.raises(DataSourceError, match=r"has ended \(failed\)(.|\n)*RuntimeError: no engine"):
            await call(args_for(server.url, tmp_path), 0, DataBuffer())


async def test_groups_that_cannot_be_used_are_left_out(tmp_path):
    code = GENERATOR.replace('"response_length": 2', '"response_length": 2 if instance_id != "id1" else 99')
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        data_buffer = DataBuffer()
        output = await call(args_for(server.url, tmp_path, rollout_batch_size=3), 0, data_buffer)
        assert instances(output) == ["id0", "id2", "id3"]
        assert output.metrics is not None
        assert output.metrics["rollout/buffer/unusable_groups"] == 1
        assert sorted(data_buffer.metadata["0"]) == ["id0", "id1", "id2", "id3"]


async def test_items_that_no_request_can_make_good_end_the_wait(tmp_path):
    """fault 16: a server that gives items without messages gives them again to the same request, for ever."""
    item = make_item("1", tokens=[1, 2], response_length=1)
    del item["messages"]

    async def get(request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "", "data": {"data": [item], "meta_info": {}}})

    async def start(request: web.Request) -> web.Response:
        return web.json_response({"message": "Rollout started"})

    app = web.Application()
    app.router.add_post("/get_rollout_data", get)
    app.router.add_post("/start_rollout", start)
    async with serve(app) as url:
        args = args_for(url, tmp_path, fetch_trajectory_retry_times=-1)
        with pytest.raises(DataSourceError, match="messages"):
            await asyncio.wait_for(call(args, 0, DataBuffer()), 30)


async def test_groups_of_another_size_are_told(tmp_path):
    items = [
        make_item("1", "a", tokens=[1, 2], response_length=1),
        make_item("2", "b", tokens=[1, 2], response_length=1),
    ]

    async def get(request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": "", "data": {"data": items, "meta_info": {}}})

    async def start(request: web.Request) -> web.Response:
        return web.json_response({"message": "Rollout started"})

    app = web.Application()
    app.router.add_post("/get_rollout_data", get)
    app.router.add_post("/start_rollout", start)
    async with serve(app) as url:
        with pytest.raises(DataSourceError, match="n_samples_per_prompt is 2"):
            await call(args_for(url, tmp_path), 0, DataBuffer())


async def test_failed_requests_are_counted_and_then_told(tmp_path):
    requests = 0

    async def get(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        return web.Response(status=500, text="broken")

    async def start(request: web.Request) -> web.Response:
        return web.json_response({"message": "Rollout started"})

    app = web.Application()
    app.router.add_post("/get_rollout_data", get)
    app.router.add_post("/start_rollout", start)
    async with serve(app) as url:
        with pytest.raises(DataSourceError, match="4 tries"):
            await call(args_for(url, tmp_path, fetch_trajectory_retry_times=3), 0, DataBuffer())
    assert requests == 4


async def test_a_refused_start_is_told_at_once(tmp_path):
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        with pytest.raises(ConfigError, match="task_type 'sums'"):
            await call(args_for(server.url, tmp_path), 0, DataBuffer())


async def test_evaluations_have_a_generator_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "ASK_ABOUT_RUN_S", 0.1)
    add_generator(tmp_path, "sums", GENERATOR.replace('"sums"', '"sums_eval"'))
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        args = args_for(server.url, tmp_path)
        with pytest.raises(ConfigError, match="agent_rollout_eval_task_type"):
            await asyncio.to_thread(generate_rollout, args, 0, DataBuffer(), evaluation=True)
        args.agent_rollout_eval_task_type = "sums_eval"
        output = await asyncio.to_thread(generate_rollout, args, 0, DataBuffer(), evaluation=True)
        assert isinstance(output, RolloutFnEvalOutput)
        entry = output.data["sums_eval"]
        assert sorted(entry["rewards"]) == [0, 0, 0, 0, 1, 1, 1, 1]
        assert len(entry["truncated"]) == len(entry["samples"]) == 8


@pytest.mark.parametrize("names", ["the same uids in every run", "fresh uids"])
async def test_each_evaluation_gets_rollouts_of_its_own(tmp_path, monkeypatch, names):
    """fault 15: the second evaluation must not be answered with the items of the first."""
    monkeypatch.setattr(session, "ASK_ABOUT_RUN_S", 0.1)
    runs = tmp_path / "runs"
    runs.write_text("")
    code = GENERATOR.replace('"sums"', '"sums_eval"').replace('"tokens": [1, 2, 3]', '"tokens": [1, 2, run]')
    code = code.replace(
        "skip = list",
        f"open({str(runs)!r}, 'a').write('x'); run = len(open({str(runs)!r}).read())\n        skip = list",
    )
    if names == "fresh uids":
        code = code.replace('f"{epoch}.', 'f"{run}.{epoch}.')
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        args = args_for(server.url, tmp_path, agent_rollout_eval_task_type="sums_eval")
        for run in (1, 2, 3):
            output = await asyncio.wait_for(asyncio.to_thread(generate_rollout, args, run, DataBuffer(), True), 60)
            assert isinstance(output, RolloutFnEvalOutput)
            samples = output.data["sums_eval"]["samples"]
            assert [sample.tokens[-1] for sample in samples] == [run] * 8
        async with Client(server.url) as client:
            _, stats = await client.get("/stats")
    counts = stats["items"]
    assert counts["opened"] == counts["open"] + counts["ready"] + sum(counts["closed"].values()) == 24


async def test_training_goes_on_when_a_buffer_that_kept_all_in_memory_starts_again(tmp_path, monkeypatch):
    """fault 21: nothing of the run is known any more, so nothing would ever come without a new start."""
    monkeypatch.setattr(session, "ASK_ABOUT_RUN_S", 0.1)
    add_generator(tmp_path, "sums", GENERATOR)
    data_buffer = DataBuffer()
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        args = args_for(server.url, tmp_path, rollout_batch_size=1)
        trained = instances(await call(args, 0, data_buffer))
        port = int(server.url.rpartition(":")[2])
    async with BufferServer(settings=settings_for(tmp_path, port=port)):
        for step in (1, 2, 3):
            trained += instances(await asyncio.wait_for(call(args, step, data_buffer), 60))
    assert sorted(trained) == ["id0", "id1", "id2", "id3"]


async def test_it_can_be_awaited_as_documented(tmp_path):
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        groups = await generate_agent_rollout(args_for(server.url, tmp_path), 0, DataBuffer(), evaluation=False)
        assert [len(group) for group in groups] == [2, 2]


async def test_the_documented_payload_is_what_is_sent(tmp_path):
    """The payload format of the documentation, key by key."""
    seen: list[Any] = []

    async def start(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response({"message": "Rollout started"})

    app = web.Application()
    app.router.add_post("/start_rollout", start)
    async with serve(app) as url:
        args = args_for(
            url,
            tmp_path,
            rollout_num_process=1024,
            num_epoch=3,
            n_samples_per_prompt=8,
            hf_checkpoint="/path/to/tokenizer",
        )
        answer = await asyncio.to_thread(start_rollout, url, args, {"0": ["id1"], "1": ["id2"]})
    assert answer == {"message": "Rollout started"}
    assert seen == [
        {
            "num_process": 1024,
            "num_epoch": 3,
            "remote_engine_url": "http://127.0.0.1:3000",
            "task_type": "sums",
            "input_file": str(tmp_path / "prompts.jsonl"),
            "num_repeat_per_sample": "8",
            "max_tokens": 64,
            "sampling_params": {"max_tokens": 64, "temperature": 0.8, "top_p": 0.9},
            "tokenizer_path": "/path/to/tokenizer",
            "skip_instance_ids": ["id1", "id2"],
        }
    ]


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

    asked_enough = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        case = request.match_info["case"]
        if case == "slow":
            await asked_enough.wait()
        body = {
            "keys": {"success": True, "data": {"data": [{"uid": "1"}]}},
            "shape": [1],
            "list": {"success": True, "data": {"data": 3}},
        }.get(case)
        return (
            web.json_response(body) if body is not None else web.Response(text="hello", content_type="application/json")
        )

    app = web.Application()
    app.router.add_post("/{case}/get_rollout_data", answer)
    async with serve(app) as url:
        for case, message in [
            ("keys", "has no extra_info, instance_id, messages, reward"),
            ("shape", "expected an object"),
            ("list", "without a list"),
        ]:
            with pytest.raises(ValueError, match=message):
                await get_rollout_data(f"{url}/{case}")
        with pytest.raises(ValueError, match="did not answer with JSON"):
            await get_rollout_data(f"{url}/text")
        with pytest.raises(asyncio.TimeoutError):
            await get_rollout_data(f"{url}/slow", timeout=0.1)
        asked_enough.set()


def test_the_documented_log_format(caplog):
    caplog.set_level("INFO", logger="agl_slime.buffer.agent_rollout")
    meta = [{"total_samples": 60, "avg_reward": 1.0}, {"total_samples": 40, "avg_reward": 0.375}, {"other": 1}]
    log_raw_info(SimpleNamespace(use_wandb=False, use_tensorboard=False), meta, 7)
    assert caplog.messages == [
        "rollout 7: {'rollout/no_filter/total_samples': 100, 'rollout/no_filter/avg_reward': 0.75}"
    ]


async def test_without_args_the_environment_says_what_is_needed(tmp_path, monkeypatch):
    """slime's contract tests call with ``args=None``."""
    code = GENERATOR.replace('open(data["input_file"])', "['{\"instance_id\": 1}']")
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        monkeypatch.setenv("AGL_SLIME_BUFFER_URL", server.url)
        monkeypatch.setenv("AGL_SLIME_BUFFER_TASK_TYPE", "sums")
        output = await call(None, 2, SimpleNamespace(n_samples_per_prompt=2))
        assert [[sample.metadata["uid"] for sample in group] for group in output.samples] == [["0.1.0", "0.1.1"]]


async def test_a_loss_mask_of_ones_own_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_masks.py").write_text(
        "from agl_slime.tokens.masks import MaskGenerator\n\n\n"
        "class CustomTaskMask(MaskGenerator):\n"
        "    def get_loss_mask(self, messages, tools=None):\n"
        "        return [7, 8, 9], [0, 1, 1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    code = GENERATOR.replace('"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-0.5, -1.0],', "")
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        args = args_for(
            server.url, tmp_path, hf_checkpoint=str(tmp_path / "tokenizer"), loss_mask_type="my_masks:CustomTaskMask"
        )
        output = await call(args, 0, DataBuffer())
        sample = output.samples[0][0]
        assert (sample.tokens, sample.loss_mask, sample.metadata["token_source"]) == ([7, 8, 9], [1, 1], "retokenized")
        agent_rollout.forget_sessions()
        args.loss_mask_type = "my_masks:Missing"
        with pytest.raises(ConfigError, match="'my_masks:Missing' cannot be loaded"):
            await call(args, 1, DataBuffer())
