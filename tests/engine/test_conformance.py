"""One suite, two servers: the embedded engine, and a real SGLang on the CPU with the same checkpoint. Here: sampling,
log-probs, forms of input, refusals, information, pauses and updates.

The real one is started when AGL_SLIME_SGLANG_PYTHON names a Python with SGLang (scripts/sglang_cpu.sh sets one up) and
the tests run with ``-m sglang``. Everything goes over raw HTTP. Where the two differ on purpose, the test says so.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.harness.engine_client import (
    PROMPTS,
    TOLERANCE,
    Client,
    assert_close,
    expected_log_probs,
    greedy,
    log_softmax,
    sampled,
)
from tests.harness.engine_servers import MAX_RUNNING

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture
def task_prompt(tokenizer: Any) -> list[int]:
    """A prompt of the kind that the policy was warmed up on."""
    from agl_slime.cli.demo import LookupDemonstrations

    messages = LookupDemonstrations().prompt({"key": "bdf"})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


# -- sampled tokens and their log-probs ------------------------------------------------------------------------------


async def test_top_log_probs_are_the_models_most_likely_tokens(client: Client, model: Any) -> None:
    with_top, without = await asyncio.gather(
        client.generate(PROMPTS[0], temperature=0.7, max_new_tokens=5, ignore_eos=True, top_logprobs_num=3),
        client.generate(PROMPTS[0], temperature=0.7, max_new_tokens=5, ignore_eos=True),
    )
    ids, _ = sampled(with_top)
    rows = with_top["meta_info"]["output_top_logprobs"]
    table = log_softmax(model, [*PROMPTS[0], *ids], 0.7)
    for place, top in enumerate(rows):
        values, likeliest = table[len(PROMPTS[0]) - 1 + place].topk(3)
        assert [pair[1] for pair in top] == likeliest.tolist()
        assert_close([pair[0] for pair in top], values.tolist())
    assert len(rows) == 5
    assert not without["meta_info"].get("output_top_logprobs")


async def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one(client: Client, model: Any) -> None:
    for prompt in PROMPTS:
        ids, log_probs = sampled(await client.generate(prompt, temperature=0, max_new_tokens=16, ignore_eos=True))
        assert ids == greedy(model, prompt, 16)
        assert_close(log_probs, expected_log_probs(model, prompt, ids))


async def test_top_k_and_top_p_cut_the_choice_and_not_the_log_probs(client: Client, model: Any) -> None:
    prompt = PROMPTS[1]
    for cut in ({"top_k": 3}, {"top_p": 0.5}):
        answer = await client.generate(prompt, temperature=1.3, max_new_tokens=48, ignore_eos=True, **cut)
        ids, log_probs = sampled(answer)
        assert_close(log_probs, expected_log_probs(model, prompt, ids, 1.3))
        table = log_softmax(model, prompt + ids, 1.3)
        for row, token in zip(table[len(prompt) - 1 : -1], ids, strict=True):
            likelier = row[row > row[token]]
            assert len(likelier) < 3 if "top_k" in cut else float(likelier.exp().sum()) <= 0.5 + TOLERANCE
        if "top_k" in cut:
            assert ids != greedy(model, prompt, 48)


async def test_requests_do_not_influence_each_other(client: Client, model: Any) -> None:
    """More requests than rows, of mixed lengths and parameters, all at once."""
    import torch

    rng = torch.Generator().manual_seed(3)
    cases = []
    for index in range(3 * MAX_RUNNING):
        n_tokens = int(torch.randint(1, 60, (1,), generator=rng))
        prompt = torch.randint(10, 440, (n_tokens,), generator=rng).tolist()
        cases.append((prompt, (0.5, 1.0, 1.7)[index % 3], 4 + 3 * (index % 9), 0.9 if index % 2 else 1.0))
    answers = await asyncio.gather(
        *(
            client.generate(prompt, temperature=temperature, max_new_tokens=length, top_p=top_p, ignore_eos=True)
            for prompt, temperature, length, top_p in cases
        )
    )
    for (prompt, temperature, length, _), answer in zip(cases, answers, strict=True):
        ids, log_probs = sampled(answer)
        assert len(ids) == length
        assert_close(log_probs, expected_log_probs(model, prompt, ids, temperature))


async def test_input_log_probs_are_at_temperature_one_from_the_requested_start(client: Client, model: Any) -> None:
    prompt = PROMPTS[2]
    table = log_softmax(model, prompt)
    for start, new in ((0, 1), (7, 1), (7, 0)):
        answer = await client.generate(prompt, temperature=0.5, max_new_tokens=new, logprob_start_len=start)
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == prompt[start:]
        assert entries[0][0] is None
        assert_close(
            [entry[0] for entry in entries[1:]],
            [float(table[place - 1, prompt[place]]) for place in range(start + 1, len(prompt))],
        )


# -- the end of a generation -----------------------------------------------------------------------------------------


async def test_length_end_and_counts(client: Client) -> None:
    meta = (await client.generate(PROMPTS[0], temperature=1, max_new_tokens=7, ignore_eos=True))["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 7)
    assert meta["cached_tokens"] in range(5)
    assert 0 < meta["e2e_latency"] < 60
    assert (meta["num_retractions"], meta["reasoning_tokens"]) == (0, 0)


async def test_a_stop_token_ends_it_and_stays_among_the_ids(client, model, tokenizer, task_prompt):
    expected = greedy(model, task_prompt, 8)
    stop = [token for place, token in enumerate(expected) if token not in expected[:place]][2]
    end = expected.index(stop) + 1
    for trimmed in (True, False):
        answer = await client.generate(
            task_prompt, temperature=0, max_new_tokens=40, stop_token_ids=[stop], no_stop_trim=not trimmed
        )
        ids, log_probs = sampled(answer)
        assert ids == expected[:end]
        assert len(log_probs) == end
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == tokenizer.decode(expected[: end - trimmed])


async def test_a_stop_string_across_tokens_ends_it(client: Client, model: Any, tokenizer: Any, task_prompt: list[int]):
    call = task_prompt + tokenizer.encode('<tool_call>{"name')  # the answer continues the call
    expected = greedy(model, call, 12)
    text = tokenizer.decode(expected)
    # from the middle of one token into the next
    first, second = tokenizer.decode(expected[:2]), tokenizer.decode(expected[:4])
    stop = second[len(first) - 1 : len(second)]
    assert text.index(stop) == len(first) - 1
    for trimmed in (True, False):
        answer = await client.generate(
            call, temperature=0, max_new_tokens=12, stop=["never sampled", stop], no_stop_trim=not trimmed
        )
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert answer["text"] == (text[: text.index(stop)] if trimmed else second)
        assert answer["output_ids"] == expected[:4]


async def test_the_end_token_ends_it_unless_ignored(client: Client, model: Any, tokenizer: Any, task_prompt: list[int]):
    from agl_slime.cli.demo import LookupDemonstrations

    prompt = task_prompt + tokenizer.encode(LookupDemonstrations().tool_call("bdf"))
    assert greedy(model, prompt, 1) == [tokenizer.eos_token_id]
    answer = await client.generate(prompt, temperature=0, max_new_tokens=9)
    assert answer["output_ids"] == [tokenizer.eos_token_id]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokenizer.eos_token_id}
    assert answer["text"] == ""
    # the last allowed token being the end token counts as length, to the newest SGLang as a stop
    version = str((await client.get("/server_info"))["version"]).split(".") if client.server.real else ["0"]
    newest = [int(part) for part in version[:3]] >= [0, 5, 23]
    last = await client.generate(prompt, temperature=0, max_new_tokens=1)
    assert last["meta_info"]["finish_reason"]["type"] == ("stop" if newest else "length")
    # special tokens are left out of the text by default
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}}
    ignored = await client.post("/generate", body)
    assert ignored["output_ids"] == greedy(model, prompt, 9)
    assert ignored["text"] == tokenizer.decode(ignored["output_ids"], skip_special_tokens=True)
    assert "output_token_logprobs" not in ignored["meta_info"]


# -- forms of input --------------------------------------------------------------------------------------------------


async def test_batches_and_parallel_samples(client: Client, model: Any) -> None:
    counts = (3, 5, 4)
    body = {
        "input_ids": PROMPTS,
        "sampling_params": [{**GREEDY, "max_new_tokens": count} for count in counts],
        "return_logprob": [True, True, True],
        "rid": ["a-1", "a-2", "a-3"],
    }
    answers = await client.post("/generate", body)
    assert [answer["meta_info"]["id"] for answer in answers] == body["rid"]
    expected = [greedy(model, prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    assert [answer["output_ids"] for answer in answers] == expected
    answers = await client.generate(PROMPTS[0], n=4, temperature=1, max_new_tokens=12, ignore_eos=True)
    assert len(answers) == 4
    assert len({answer["meta_info"]["id"] for answer in answers}) == 4
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    for answer in answers:
        ids, log_probs = sampled(answer)
        assert_close(log_probs, expected_log_probs(model, PROMPTS[0], ids))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [7] * 5000}, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"sampling_params": {"max_new_tokens": 1}}, "Either text, input_ids"),
        (
            {"input_ids": [7] * 10, "sampling_params": {"max_new_tokens": 4090}},
            "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        ),
        ({"input_ids": [7], "sampling_params": {"top_p": 0.0}}, "top_p must be in (0, 1]"),
    ],
)
async def test_invalid_request_is_a_400_with_a_message(client: Client, body: dict[str, Any], message: str) -> None:
    answer = await client.post("/generate", body, status=400)
    assert message in answer["error"]["message"]


async def test_unknown_ids_and_too_many_sequences_are_refused(client: Client) -> None:
    if client.server.real:
        pytest.skip("SGLang does not check ids, and a newer one dies of them: the embedded engine refuses instead")
    for ids in ([5, 460], [5, -1]):
        answer = await client.post("/generate", {"input_ids": ids}, status=400)
        assert "vocab size" in answer["error"]["message"]
    many = await client.post("/generate", {"input_ids": [[5]] * 2, "sampling_params": {"n": 4096}}, status=400)
    assert "more than 4096 sequences" in many["error"]["message"]
    assert len((await client.generate([5, 459], max_new_tokens=1))["output_ids"]) == 1


# -- information ------------------------------------------------------------------------------------------------------


async def test_information(client: Client) -> None:
    assert Path((await client.get("/model_info"))["model_path"]) == client.server.policy
    assert (await client.get("/get_model_info"))["is_generation"] is True
    assert (await client.get("/v1/models"))["data"][0]["max_model_len"] == 4096
    assert {"model_path", "version"} <= set(await client.get("/server_info"))
    load = (await client.get("/v1/loads?include=core"))["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    assert load["max_running_requests"] == MAX_RUNNING
    await client.get("/health")
    await client.get("/health_generate")


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
    if client.server.real:
        pytest.skip("SGLang has these ways, or none of that name; the sentence is the embedded engine's")
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
