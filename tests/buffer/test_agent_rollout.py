"""The agent rollout against a real buffer: calls of slime, documented requests, Samples; slime's own client and
contract."""

import asyncio
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_slime.buffer import agent_rollout, session, stages
from agl_slime.buffer.agent_rollout import generate_agent_rollout, generate_rollout, start_rollout
from agl_slime.buffer.masks import get_loss_mask_generator
from agl_slime.buffer.samples import SampleMaker, make_uniform
from agl_slime.buffer.server import BufferServer
from agl_slime.buffer.session import get_rollout_data
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.types import RolloutFnEvalOutput, Sample
from tests.buffer.items import Client, add_generator, make_item, settings_for
from tests.harness.agent_rollout import GENERATOR, DataBuffer, args_for, buffer_that, call, instances, serve
from tests.harness.slime_programs import environment, read_result, require_slime, run_guarded
from tests.harness.tokenizers import small_tokenizer
from tests.harness.vocabularies import chat_tokenizer

pytestmark = pytest.mark.usefixtures("fresh_sessions")


async def test_batches_come_one_after_the_other_with_everything_set(tmp_path):
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        data_buffer = DataBuffer()
        args = args_for(server.url, tmp_path, instances=6)
        first = await call(args, 0, data_buffer)
        second = await call(args, 1, data_buffer)
        awaited = await generate_agent_rollout(args, 2, data_buffer, evaluation=False)
    assert [len(group) for group in first.samples] == [len(group) for group in awaited] == [2, 2]
    third = [group[0].metadata["instance_id"] for group in awaited]
    assert sorted(instances(first) + instances(second) + third) == [f"id{n}" for n in range(6)]
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


async def test_a_resumed_trainer_trains_the_rest_and_nothing_twice(tmp_path):
    """The trainer dies after step 2 with a checkpoint of step 0: steps 1 and 2 are made of the same groups again, and
    of no others. Step 3 was then generated ahead of the checkpoint, as asynchronous training does, and is repeated."""
    add_generator(tmp_path, "sums", GENERATOR)
    async with BufferServer(settings=settings_for(tmp_path, run_dir=tmp_path / "run")) as server:
        args = args_for(server.url, tmp_path, instances=8)
        data_buffer = DataBuffer()
        first = await call(args, 0, data_buffer)
        checkpoint = json.loads(json.dumps(data_buffer.metadata))
        lost = instances(await call(args, 1, data_buffer)) + instances(await call(args, 2, data_buffer))
        agent_rollout.sessions.clear()
        data_buffer = DataBuffer(checkpoint)
        resumed = [instance for step in (1, 2, 3) for instance in instances(await call(args, step, data_buffer))]
        assert sorted(resumed[:4]) == sorted(lost)
        assert sorted(instances(first) + resumed) == [f"id{n}" for n in range(8)]
        agent_rollout.sessions.clear()
        assert sorted(instances(await call(args, 3, data_buffer))) == sorted(resumed[4:])


async def test_unusable_groups_are_left_out_and_slime_may_get_raw_rewards(tmp_path):
    code = GENERATOR.replace('"response_length": 2', '"response_length": 2 if instance_id != "id1" else 99')
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        data_buffer = DataBuffer()
        args = args_for(server.url, tmp_path, rollout_batch_size=3, rewards_normalization=True)
        output = await call(args, 0, data_buffer)
        assert [sample.reward for sample in output.samples[0]] == [0, 1]
        assert instances(output) == ["id0", "id2", "id3"]
        assert output.metrics is not None
        assert output.metrics["rollout/buffer/unusable_groups"] == 1
        assert sorted(data_buffer.metadata["0"]) == ["id0", "id1", "id2", "id3"]


@pytest.mark.parametrize("names", ["the same uids in every run", "fresh uids"])
async def test_evaluations_have_a_generator_of_their_own_and_new_rollouts(tmp_path, monkeypatch, names):
    """The items of the first evaluation must not answer the second."""
    monkeypatch.setattr(session, "CHECK_RUN_S", 0.1)
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
        args = args_for(server.url, tmp_path)
        with pytest.raises(ConfigError, match="agent_rollout_eval_task_type"):
            await asyncio.to_thread(generate_rollout, args, 0, DataBuffer(), evaluation=True)
        args.agent_rollout_eval_task_type = "sums_eval"
        for run in (1, 2):
            output = await asyncio.wait_for(asyncio.to_thread(generate_rollout, args, run, DataBuffer(), True), 60)
            assert isinstance(output, RolloutFnEvalOutput)
            entry = output.data["sums_eval"]
            assert [sample.tokens[-1] for sample in entry["samples"]] == [run] * 8
            assert sorted(entry["rewards"]) == [0, 0, 0, 0, 1, 1, 1, 1]
            assert len(entry["truncated"]) == 8
        async with Client(server.url) as client:
            _, stats = await client.get("/stats")
    counts = stats["items"]
    assert counts["opened"] == counts["open"] + counts["ready"] + sum(counts["closed"].values()) == 16


async def test_training_continues_after_an_in_memory_buffer_restarts(tmp_path, monkeypatch):
    """The buffer has forgotten the run, so the client has to start it again."""
    monkeypatch.setattr(session, "CHECK_RUN_S", 0.1)
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


async def test_environment_variables_replace_missing_args(tmp_path, monkeypatch):
    """slime's contract tests call with ``args=None``."""
    code = GENERATOR.replace('open(data["input_file"])', "['{\"instance_id\": 1}']")
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        monkeypatch.setenv("AGL_SLIME_BUFFER_URL", server.url)
        monkeypatch.setenv("AGL_SLIME_BUFFER_TASK_TYPE", "sums")
        output = await call(None, 2, SimpleNamespace(n_samples_per_prompt=2))
        assert [[sample.metadata["uid"] for sample in group] for group in output.samples] == [["0.1.0", "0.1.1"]]


def test_defaults_of_slimes_parser_do_not_override_the_environment(monkeypatch):
    args = SimpleNamespace(rollout_task_type="math", loss_mask_type="qwen", rollout_buffer_url=None)
    settings = agent_rollout.settings_of(args)
    assert (settings.task_type, settings.loss_mask_type) == ("math", "auto")
    monkeypatch.setenv("AGL_SLIME_BUFFER_TASK_TYPE", "sums")
    monkeypatch.setenv("AGL_SLIME_LOSS_MASK_TYPE", "qwen")
    settings = agent_rollout.settings_of(args)
    assert (settings.task_type, settings.loss_mask_type) == ("sums", "qwen")
    args.rollout_task_type, args.loss_mask_type = "agl", "qwen3"
    settings = agent_rollout.settings_of(args)
    assert (settings.task_type, settings.loss_mask_type) == ("agl", "qwen3")


async def test_a_loss_mask_of_ones_own_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_masks.py").write_text(
        "from agl_slime.buffer.masks import MultiTurnLossMaskGenerator\n\n\n"
        "class CustomTaskMask(MultiTurnLossMaskGenerator):\n"
        "    def get_loss_mask(self, messages):\n"
        "        return [7, 8, 9], [0, 1, 1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_masks", raising=False)
    small_tokenizer().save_pretrained(tmp_path / "tokenizer")
    code = GENERATOR.replace('"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-0.5, -1.0],', "")
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        args = args_for(
            server.url,
            tmp_path,
            n_samples_per_prompt=1,
            hf_checkpoint=str(tmp_path / "tokenizer"),
            loss_mask_type="my_masks:CustomTaskMask",
        )
        (sample,), (_,) = (await call(args, 0, DataBuffer())).samples
        assert (sample.tokens, sample.loss_mask, sample.metadata["token_source"]) == ([7, 8, 9], [1, 1], "retokenized")
        agent_rollout.sessions.clear()
        args.loss_mask_type = "my_masks:Missing"
        with pytest.raises(ConfigError, match="'my_masks:Missing' cannot be loaded"):
            await call(args, 1, DataBuffer())


async def test_a_generator_that_ends_too_early_or_is_refused_ends_the_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "CHECK_RUN_S", 0.1)
    add_generator(
        tmp_path, "sums", GENERATOR.replace("skip = list", "raise RuntimeError('no engine')\n        skip = list")
    )
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        with pytest.raises(DataSourceError, match=r"has ended \(failed\)(.|\n)*RuntimeError: no engine"):
            await call(args_for(server.url, tmp_path), 0, DataBuffer())
        with pytest.raises(ConfigError, match="task_type 'words'"):
            await call(args_for(server.url, tmp_path, rollout_task_type="words"), 0, DataBuffer())


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
        requests.append(await request.json())
        if items is None:
            return web.Response(status=500, text="broken")
        return web.json_response({"success": True, "message": "", "data": {"data": items, "meta_info": {}}})

    async with buffer_that(get) as url:
        args = args_for(url, tmp_path, fetch_trajectory_retry_times=-1 if items else 1)
        with pytest.raises(DataSourceError, match=message):
            await asyncio.wait_for(call(args, 0, DataBuffer()), 30)
    assert len(requests) == (1 if items else 2)
    assert len({body["request_id"] for body in requests}) == 1  # a lost answer is given again


def sent(uid: str, reward: float = 1.0, **fields: Any) -> dict[str, Any]:
    """An item with the engine's ids."""
    tokens = {"tokens": [5, 6, 7, 8], "response_length": 2, "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -0.25]}
    return make_item(uid, reward=reward, **{**tokens, **fields})


def maker(*, normalized: bool = True, masks: Any = None) -> SampleMaker:
    return SampleMaker(masks=masks, normalized=normalized)


def template_masks() -> Any:
    return get_loss_mask_generator(chat_tokenizer("anthropic", "chatml"))


def test_sent_token_ids_and_log_probs_are_used_as_they_are():
    (sample,) = maker().group([sent("1", extra_info={"finish_reason": "stop", "label": "x"}, weight_versions=[3])])
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([5, 6, 7, 8], 2, [1, 1])
    assert sample.rollout_log_probs == [-0.5, -0.25]
    assert (sample.reward, sample.status, sample.label) == (1.0, Sample.Status.COMPLETED, "x")
    assert (sample.response, sample.prompt) == (
        "-2 and -3",
        [{"role": "user", "content": "Solve the equation x^2 + 5x + 6 = 0"}],
    )
    assert sample.weight_versions == ["3"]
    assert sample.metadata["token_source"] == "engine"
    assert (sample.metadata["uid"], sample.metadata["instance_id"]) == ("1", "math_001")
    (sample,) = maker().group([sent("1", extra_info={"finish_reason": "length"})])
    assert sample.status == Sample.Status.TRUNCATED


def test_numbers_never_repeat_and_a_rollout_that_forked_becomes_siblings():
    parts = [{"tokens": [1, 2, 3], "response_length": 1}, {"tokens": [1, 9, 9], "response_length": 2}]
    shared = maker()
    groups = [shared.group([sent("1"), sent("2")]), shared.group([{**make_item("3"), "samples": parts}, sent("4")])]
    samples = [sample for group in groups for sample in group]
    assert [sample.index for sample in samples] == [0, 1, 2, 3, 4]
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 1]
    assert [sample.rollout_id for sample in samples] == [0, 1, 2, 2, 3]
    assert [sample.response_length for sample in samples] == [2, 2, 1, 2, 2]
    assert samples[2].loss_mask == [1]


def padded(rewards: list[float], size: int) -> list[dict[str, Any]]:
    group = ("math_001", [sent(str(n), reward) for n, reward in enumerate(rewards)])
    return stages.pad_group_data(stages.normalize_group_data(group), size)[1]


def test_padded_copies_are_masked_and_originals_keep_the_full_advantage():
    """slime's own normalisation gets raw rewards, whose mean the copy does not move."""
    rewards = [1.0, 0.0, 0.0]
    samples = maker().group(padded(rewards, 4))
    advantages = [
        item["reward"] for item in stages.normalize_group_data(("i", [{"reward": reward} for reward in rewards]))[1]
    ]
    assert [sample.reward for sample in samples] == pytest.approx([*advantages, 0.0])
    assert [bool(sample.remove_sample) for sample in samples] == [False, False, False, True]
    assert samples[3].loss_mask == [0, 0]
    assert len({sample.rollout_id for sample in samples}) == 4
    raw = maker(normalized=False).group(padded(rewards, 4))
    assert [sample.reward for sample in raw] == pytest.approx([*rewards, 1 / 3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [1, "2"]}, "tokens.1 is '2'"),
        ({"response_length": 4}, "response_length is 4 with 4 tokens"),
        ({"response_length": 0}, "response_length is 0"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries"),
        ({"loss_mask": [1, 2]}, "loss_mask.1 is 2"),
        ({"rollout_log_probs": [-0.5, math.nan]}, "rollout_log_probs.1 is nan"),
    ],
)
def test_misaligned_tokens_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"item '1': {message}"):
        maker().group([sent("1", **fields)])


def test_text_is_rendered_and_masked():
    tokenizer = chat_tokenizer("anthropic", "chatml")
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and 3?"},
        {"role": "assistant", "content": "7"},
    ]
    (sample,) = maker(masks=template_masks()).group([make_item("1", messages=messages)])
    assert sample.metadata["token_source"] == "retokenized"
    assert sample.rollout_log_probs is None
    assert sample.loss_mask is not None
    assert len(sample.loss_mask) == sample.response_length < len(sample.tokens)
    response = sample.tokens[-sample.response_length :]
    trained = tokenizer.decode([token for token, mask in zip(response, sample.loss_mask, strict=True) if mask])
    assert trained == "4<|im_end|>7<|im_end|>"
    assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    (sample,) = maker(masks=template_masks()).group([make_item("2", messages=messages[:1])])  # no answer
    assert (sample.remove_sample, sample.response_length, sample.loss_mask) == (True, 1, [0])
    with pytest.raises(ValueError, match="there is no tokenizer; set --hf-checkpoint"):
        maker().group([make_item("1")])


def test_a_batch_has_log_probs_and_round_numbers_on_all_samples_or_on_none():
    shared = maker(masks=template_masks())
    groups = [shared.group([sent("1", extra_info={"round_number": 2})]), shared.group([make_item("2")])]
    assert make_uniform(groups) == 1
    assert [sample.rollout_log_probs for group in groups for sample in group] == [None, None]
    assert all("round_number" not in sample.metadata for group in groups for sample in group)


CONTRACTS = "tests/plugin_contracts/test_plugin_rollout_contracts.py"

_GENERATOR = """
    import json, urllib.request
    TASK_TYPE = "{task}"
    def run_rollout(data):
        size = int(data["num_repeat_per_sample"])
        for n in range(12):
            items = [
                {{
                    "uid": f"{{n}}.{{k}}", "instance_id": f"id{{n}}", "messages": [], "reward": k % 2,
                    "extra_info": {{"timestamp": str(n)}},
                    "tokens": [1, 2, 3, 4], "response_length": 2,
                }}
                for k in range(size)
            ]
            body = json.dumps(items).encode()
            urllib.request.urlopen(urllib.request.Request(data["remote_buffer_url"] + "/buffer/write", body)).read()
"""

# What slime's old example does with a buffer, less the training: start it, and take data until a batch is there.
_OLD_CLIENT = """
import asyncio, json, sys, types
sys.modules["wandb"] = types.ModuleType("wandb")
from slime_plugins.rollout_buffer import rollout_buffer_example as example
url, input_file = sys.argv[1:]
args = types.SimpleNamespace(
    num_epoch=1, sglang_router_ip="127.0.0.1", sglang_router_port=3000, rollout_buffer_url=url,
    rollout_task_type="sums", prompt_data=input_file, n_samples_per_prompt=4, rollout_max_response_len=64,
    rollout_temperature=1.0, rollout_top_p=1.0, hf_checkpoint="x", use_wandb=False,
)
started = example.start_rollout(url, args, {"0": ["id0"]})
results, metas = [], []
async def collect():
    while len(results) < 48:
        data, meta_info = await example.get_rollout_data(api_base_url=url)
        results.extend(data)
        metas.append(meta_info)
asyncio.run(collect())
example.log_raw_info(args, metas, 0)
chosen = example.select_rollout_data(args, results, 2)
print("RESULT " + json.dumps({"started": started, "n": len(results),
    "chosen": [[i["instance_id"] for i in group] for group in chosen],
    "finished": sorted(i for meta in metas for i in meta["finished_groups"])}))
"""


async def run(root: Path, *command: str, **variables: str) -> str:
    """The output of a command in slime's directory."""
    env = {**environment(root), **variables}
    code, output = await asyncio.to_thread(run_guarded, command, timeout_s=300, cwd=root, env=env)
    assert code == 0, output
    return output


@pytest.mark.slime
async def test_slimes_old_example_gets_its_data_from_our_server(tmp_path):
    root = require_slime("torch", "requests")
    add_generator(tmp_path, "sums", _GENERATOR.format(task="sums"))
    (tmp_path / "input.jsonl").write_text("{}\n")
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        output = await run(root, sys.executable, "-c", _OLD_CLIENT, server.url, str(tmp_path / "input.jsonl"))
    result = read_result(output)
    assert result["started"]["message"] == "Rollout started"
    assert result["n"] == 48
    assert result["finished"] == sorted(f"id{n}" for n in range(12))
    assert result["chosen"] == [["id11"] * 4, ["id10"] * 4]


@pytest.mark.slime
async def test_the_agent_rollout_passes_slimes_contract(tmp_path):
    root = require_slime("torch", "httpx", "pylatexenc")
    add_generator(tmp_path, "sums", _GENERATOR.format(task="sums"))
    add_generator(tmp_path, "sums_eval", _GENERATOR.format(task="sums_eval"))
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        output = await run(
            root,
            *(sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", CONTRACTS),
            SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH="agl_slime.buffer.agent_rollout.generate_rollout",
            AGL_SLIME_BUFFER_URL=server.url,
            AGL_SLIME_BUFFER_TASK_TYPE="sums",
            AGL_SLIME_BUFFER_EVAL_TASK_TYPE="sums_eval",
        )
    assert f"PASSED {CONTRACTS}::test_rollout_function_path_contract_supports_user_override" in output
