"""One suite, two servers (test_conformance.py): aborting, pausing, new weights, flushing."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.engine_client import PROMPTS, TOLERANCE, Client, assert_close, expected_log_probs, sampled
from tests.harness.engine_servers import MAX_RUNNING


def start(client: Client, *, rid: str | None = None, **sampling: Any) -> asyncio.Task[Any]:
    """A request that does not end by itself."""
    sampling = {"temperature": 1, "max_new_tokens": 4000, "ignore_eos": True} | sampling
    return asyncio.create_task(client.generate(PROMPTS[0], rid=rid, **sampling))


async def test_aborted_request_returns_its_tokens(client: Client, model: Any) -> None:
    task = start(client, rid="run-1")
    await client.running(1)
    await client.post("/flush_cache", {}, status=400)
    refused = await client.generate(PROMPTS[0], rid="run-1", max_new_tokens=1, status=400)
    assert "Duplicate request ID" in refused["error"]["message"]
    await client.post("/abort_request", {"rid": "never-seen"})
    await client.post("/abort_request", {})
    assert not task.done()
    await client.post("/abort_request", {"rid": "run-1"})
    answer = await task
    ids, log_probs = sampled(answer)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 1 <= len(ids) < 4000
    assert answer["meta_info"]["completion_tokens"] == len(ids)
    # thousands of tokens: more rounding than in a short answer
    assert_close(log_probs, expected_log_probs(model, PROMPTS[0], ids), 3e-4)
    # SGLang's scheduler may still clean up the ended request when its answer has arrived
    await client.post("/flush_cache?timeout=10", {})


async def test_requests_aborted_in_the_queue_have_no_ids(client: Client) -> None:
    tasks = [start(client, rid=f"all-{n}") for n in range(MAX_RUNNING + 3)]
    await client.running(MAX_RUNNING, waiting=3)
    await client.post("/abort_request", {"abort_all": True})
    answers = await asyncio.gather(*tasks)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    queued = [answer["meta_info"] for answer in answers if not answer["output_ids"]]
    assert len(queued) == 3
    for meta in queued:
        assert not {"prompt_tokens", "cached_tokens"} & set(meta)
        assert meta["e2e_latency"] > 0


async def test_pause_returns_partial_answers_and_holds_new_requests(client: Client) -> None:
    running = start(client)
    await client.running(1)
    await client.post("/pause_generation", {})
    answer = await running
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"]
    waiting = start(client, max_new_tokens=4)
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    await client.post("/continue_generation", {})
    assert len((await waiting)["output_ids"]) == 4


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_paused_request_resumes_in_place(client: Client, model: Any, mode: str) -> None:
    running = start(client, max_new_tokens=600)
    await client.running(1)
    await client.post("/pause_generation", {"mode": mode})
    done, _ = await asyncio.wait({running}, timeout=0.3)
    assert not done
    await client.post("/continue_generation", {})
    answer = await running
    assert answer["meta_info"]["num_retractions"] == (mode == "retract")
    ids, log_probs = sampled(answer)
    assert len(ids) == 600
    assert_close(log_probs, expected_log_probs(model, PROMPTS[0], ids), 3e-4)


@pytest.fixture
def moved_policy(policy_dir: Path, tmp_path: Path) -> tuple[Path, Any]:
    """A copy of the policy with other weights, and its model."""
    import torch
    import transformers

    directory = tmp_path / "moved"
    shutil.copytree(policy_dir, directory)
    moved = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    moved.save_pretrained(directory)
    return directory, moved


async def test_new_weights_come_under_their_version(client: Client, model: Any, moved_policy: tuple[Path, Any]) -> None:
    """The trainer's sequence: pause, flush, update, continue."""
    directory, moved = moved_policy
    prompt = PROMPTS[1]
    for path, version, reference in ((directory, "7", moved), (client.server.policy, "8", model)):
        await client.post("/pause_generation", {})
        await client.post("/flush_cache?timeout=10", {})
        answer = await client.post("/update_weights_from_disk", {"model_path": str(path), "weight_version": version})
        assert answer["success"] is True
        await client.post("/continue_generation", {})
        assert (await client.get("/model_info"))["weight_version"] == version
        answer = await client.generate(prompt, temperature=1, max_new_tokens=12, ignore_eos=True)
        assert answer["meta_info"]["weight_version"] == version
        ids, log_probs = sampled(answer)
        assert_close(log_probs, expected_log_probs(reference, prompt, ids))
        # the two policies differ, or the comparison would prove nothing
        pairs = zip(expected_log_probs(model, prompt, ids), expected_log_probs(moved, prompt, ids), strict=True)
        assert max(abs(a - b) for a, b in pairs) > 100 * TOLERANCE


async def test_each_of_many_updates_at_once_is_answered_with_its_own_version(client: Client) -> None:
    if client.server.real:
        pytest.skip("SGLang's answer has no version")
    body = {"model_path": str(client.server.policy)}
    versions = [f"many-{number}" for number in range(12)]
    answers = await asyncio.gather(
        *(client.post("/update_weights_from_disk", {**body, "weight_version": version}) for version in versions)
    )
    for version, answer in zip(versions, answers, strict=True):
        assert answer["message"].endswith(f"Weight version: {version}.")


@pytest.mark.parametrize("path", ["init_weights_update_group", "update_weights_from_distributed", "pull_weights"])
async def test_weights_by_other_ways_than_disk_name_the_flag(client: Client, path: str) -> None:
    answer = await client.post(f"/{path}", {"group_name": "slime"}, status=400)
    assert answer["error"]["message"].endswith("--update-weight-mode full --update-weight-transport disk.")


async def test_weights_that_cannot_be_loaded_leave_the_old_ones(client: Client, model: Any) -> None:
    version = (await client.get("/model_info"))["weight_version"]
    answer = await client.post(
        "/update_weights_from_disk", {"model_path": "/nonexistent/checkpoint", "weight_version": "99"}, status=400
    )
    assert answer["success"] is False
    assert answer["message"]
    assert (await client.get("/model_info"))["weight_version"] == version
    ids, log_probs = sampled(await client.generate(PROMPTS[0], temperature=1, max_new_tokens=8, ignore_eos=True))
    assert_close(log_probs, expected_log_probs(model, PROMPTS[0], ids))
