"""The agent rollout against a real buffer: what slime calls, from a thread of its own."""

import asyncio
import json
import sys
from types import SimpleNamespace

import pytest

from agl_slime.buffer import agent_rollout
from agl_slime.buffer.agent_rollout import generate_agent_rollout, generate_rollout
from agl_slime.buffer.server import BufferServer
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.types import RolloutFnEvalOutput
from tests.buffer.items import Client, add_generator, settings_for
from tests.harness.agent_rollout import GENERATOR, DataBuffer, args_for, call, instances
from tests.harness.tokenizers import small_tokenizer

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
    monkeypatch.setattr(agent_rollout, "CHECK_RUN_S", 0.1)
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
    monkeypatch.setattr(agent_rollout, "CHECK_RUN_S", 0.1)
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
    monkeypatch.setattr(agent_rollout, "CHECK_RUN_S", 0.1)
    add_generator(
        tmp_path, "sums", GENERATOR.replace("skip = list", "raise RuntimeError('no engine')\n        skip = list")
    )
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        with pytest.raises(DataSourceError, match=r"has ended \(failed\)(.|\n)*RuntimeError: no engine"):
            await call(args_for(server.url, tmp_path), 0, DataBuffer())
        with pytest.raises(ConfigError, match="task_type 'words'"):
            await call(args_for(server.url, tmp_path, rollout_task_type="words"), 0, DataBuffer())
