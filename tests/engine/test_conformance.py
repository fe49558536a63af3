"""One suite, two servers: the embedded engine, and a real SGLang on the CPU with the same checkpoint. Here: sampling,
log-probs, forms of input, refusals and information; ``test_control.py`` is a part of the same suite.

The real one is started when AGL_SLIME_SGLANG_PYTHON names a Python with SGLang (scripts/sglang_cpu.sh sets one up) and
the tests run with ``-m sglang``. Everything goes over raw HTTP. Where the two differ on purpose, the test says so.
"""

import asyncio
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
