"""One suite, two servers: the embedded engine, and a real SGLang on the CPU serving the same checkpoint. Here: what is
sampled, its log-probs, and where a generation ends; ``test_requests.py`` and ``test_control.py`` go on.

The real one is started when AGL_SLIME_SGLANG_PYTHON names a Python with SGLang (scripts/sglang_cpu.sh sets one up) and
the tests run with ``-m sglang``. Everything goes over raw HTTP. Where the two differ on purpose, the test says so.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason='the embedded engine needs torch: pip install "agl-slime[local]"')
pytest.importorskip("transformers")

from agl_slime.cli.demo import LookupDemonstrations  # noqa: E402
from tests.harness.engine_client import (  # noqa: E402
    PROMPTS,
    TOLERANCE,
    Client,
    assert_close,
    expected_log_probs,
    greedy,
    log_softmax,
    sampled,
)
from tests.harness.engine_servers import MAX_RUNNING  # noqa: E402


def task_prompt(tokenizer: Any) -> list[int]:
    """A prompt of the kind that the policy was warmed up on."""
    return tokenizer.apply_chat_template(
        LookupDemonstrations().prompt({"key": "bdf"}), add_generation_prompt=True, return_dict=True
    )["input_ids"]


# -- what is sampled, and its log-probs ------------------------------------------------------------------------------


async def test_top_log_probs_are_the_models_most_likely_tokens(client: Client, model: Any) -> None:
    answers = await asyncio.gather(
        client.generate(PROMPTS[0], temperature=0.7, max_new_tokens=5, ignore_eos=True, top_logprobs_num=3),
        client.generate(PROMPTS[0], temperature=0.7, max_new_tokens=5, ignore_eos=True),
    )
    ids, _ = sampled(answers[0])
    told = answers[0]["meta_info"]["output_top_logprobs"]
    table = log_softmax(model, [*PROMPTS[0], *ids], 0.7)
    for place, top in enumerate(told):
        values, likeliest = table[len(PROMPTS[0]) - 1 + place].topk(3)
        assert [pair[1] for pair in top] == likeliest.tolist()
        assert_close([pair[0] for pair in top], values.tolist())
    assert len(told) == 5
    assert not answers[1]["meta_info"].get("output_top_logprobs")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
async def test_log_probs_are_of_the_temperature_scaled_distribution(
    client: Client, model: Any, temperature: float
) -> None:
    for prompt in PROMPTS:
        ids, log_probs = sampled(
            await client.generate(prompt, temperature=temperature, max_new_tokens=24, ignore_eos=True)
        )
        assert len(ids) == 24
        assert_close(log_probs, expected_log_probs(model, prompt, ids, temperature))


async def test_temperature_zero_is_greedy_with_log_probs_at_temperature_one(client: Client, model: Any) -> None:
    for prompt in PROMPTS:
        ids, log_probs = sampled(await client.generate(prompt, temperature=0, max_new_tokens=24, ignore_eos=True))
        assert ids == greedy(model, prompt, 24)
        assert_close(log_probs, expected_log_probs(model, prompt, ids))


async def test_top_k_one_is_greedy(client: Client, model: Any) -> None:
    ids, _ = sampled(await client.generate(PROMPTS[0], temperature=1.5, top_k=1, max_new_tokens=16, ignore_eos=True))
    assert ids == greedy(model, PROMPTS[0], 16)


async def test_top_k_and_top_p_cut_the_choice_and_not_the_log_probs(client: Client, model: Any) -> None:
    prompt = PROMPTS[1]
    ids, log_probs = sampled(
        await client.generate(prompt, temperature=1.3, top_k=3, max_new_tokens=48, ignore_eos=True)
    )
    assert_close(log_probs, expected_log_probs(model, prompt, ids, 1.3))
    table = log_softmax(model, prompt + ids, 1.3)
    assert all(token in table[len(prompt) - 1 + place].topk(3).indices for place, token in enumerate(ids))
    assert ids != greedy(model, prompt, 48)

    ids, log_probs = sampled(
        await client.generate(prompt, temperature=1.3, top_p=0.5, max_new_tokens=48, ignore_eos=True)
    )
    assert_close(log_probs, expected_log_probs(model, prompt, ids, 1.3))
    table = log_softmax(model, prompt + ids, 1.3).exp()
    for place, token in enumerate(ids):
        row = table[len(prompt) - 1 + place]
        assert float(row[row > row[token]].sum()) <= 0.5 + TOLERANCE


async def test_requests_do_not_influence_each_other(client: Client, model: Any) -> None:
    """More requests than rows, of mixed lengths and parameters, all at once."""
    rng = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(10, 440, (int(torch.randint(1, 60, (1,), generator=rng)),), generator=rng).tolist()
        for _ in range(3 * MAX_RUNNING)
    ]
    temperatures = [(0.7, 1.0, 1.4)[index % 3] for index in range(len(prompts))]
    answers = await asyncio.gather(
        *(
            client.generate(
                prompt,
                temperature=temperature,
                max_new_tokens=4 + 3 * (index % 9),
                top_p=0.9 if index % 2 else 1.0,
                ignore_eos=True,
            )
            for index, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True))
        )
    )
    for index, (prompt, temperature, answer) in enumerate(zip(prompts, temperatures, answers, strict=True)):
        ids, log_probs = sampled(answer)
        assert len(ids) == 4 + 3 * (index % 9)
        assert_close(log_probs, expected_log_probs(model, prompt, ids, temperature))


async def test_input_log_probs_are_at_temperature_one_from_the_start_asked_for(client: Client, model: Any) -> None:
    prompt = PROMPTS[2]
    table = log_softmax(model, prompt)
    for start, new in ((0, 1), (7, 1), (7, 0)):
        answer = await client.generate(prompt, temperature=0.5, max_new_tokens=new, logprob_start_len=start)
        given = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in given] == prompt[start:]
        assert given[0][0] is None
        assert_close(
            [entry[0] for entry in given[1:]],
            [float(table[place - 1, prompt[place]]) for place in range(start + 1, len(prompt))],
        )


async def test_tokens_are_drawn_as_often_as_the_model_says(client: Client, model: Any) -> None:
    """The first token of many samples follows the model's probabilities: chi-square over the likely tokens and all the
    others together, at 5 sigma."""
    prompt, count = PROMPTS[0], 600
    answers = await asyncio.gather(
        *(client.generate([prompt] * 100, temperature=1.0, max_new_tokens=1) for _ in range(count // 100))
    )
    drawn = [answer["output_ids"][0] for batch in answers for answer in batch]
    probabilities = log_softmax(model, prompt)[-1].exp().tolist()
    likely = [token for token, probability in enumerate(probabilities) if probability * count >= 10]
    assert len(likely) >= 3
    bins = [(drawn.count(token), probabilities[token] * count) for token in likely]
    bins.append((count - sum(seen for seen, _ in bins), count - sum(expected for _, expected in bins)))
    degrees = len(bins) - 1
    assert sum((seen - expected) ** 2 / expected for seen, expected in bins) <= degrees + 5 * (2 * degrees) ** 0.5


# -- where a generation ends -----------------------------------------------------------------------------------------


async def test_length_end_and_counts(client: Client) -> None:
    meta = (await client.generate(PROMPTS[0], temperature=1, max_new_tokens=7, ignore_eos=True))["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 7)
    assert meta["cached_tokens"] in range(5)
    assert 0 < meta["e2e_latency"] < 60
    assert (meta["num_retractions"], meta["reasoning_tokens"]) == (0, 0)


async def test_a_stop_token_ends_it_and_stays_among_the_ids(client: Client, model: Any, tokenizer: Any) -> None:
    prompt = task_prompt(tokenizer)
    expected = greedy(model, prompt, 8)
    stop = [token for place, token in enumerate(expected) if token not in expected[:place]][2]
    end = expected.index(stop) + 1
    answer = await client.generate(prompt, temperature=0, max_new_tokens=40, stop_token_ids=[stop])
    ids, log_probs = sampled(answer)
    assert ids == expected[:end]
    assert len(log_probs) == end
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == tokenizer.decode(expected[: end - 1])
    kept = await client.generate(prompt, temperature=0, max_new_tokens=40, stop_token_ids=[stop], no_stop_trim=True)
    assert kept["text"] == tokenizer.decode(expected[:end])


async def test_a_stop_string_across_tokens_ends_it(client: Client, model: Any, tokenizer: Any) -> None:
    call = task_prompt(tokenizer) + tokenizer.encode(
        '<tool_call>{"name'
    )  # so that what follows is known to be the rest of a call
    expected = greedy(model, call, 12)
    text = tokenizer.decode(expected)
    # from the middle of one token into the next
    first, second = tokenizer.decode(expected[:2]), tokenizer.decode(expected[:4])
    stop = second[len(first) - 1 : len(second)]
    assert text.index(stop) == len(first) - 1
    answer = await client.generate(call, temperature=0, max_new_tokens=12, stop=["never said", stop])
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]
    assert answer["output_ids"] == expected[:4]
    kept = await client.generate(call, temperature=0, max_new_tokens=12, stop=stop, no_stop_trim=True)
    assert kept["text"] == second


async def test_the_end_token_ends_it_unless_ignored(client: Client, model: Any, tokenizer: Any) -> None:
    prompt = task_prompt(tokenizer) + tokenizer.encode(LookupDemonstrations().tool_call("bdf"))
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
    ignored = await client.generate(prompt, temperature=0, max_new_tokens=9, ignore_eos=True)
    assert ignored["output_ids"] == greedy(model, prompt, 9)


async def test_special_tokens_are_left_out_of_the_text_by_default(client: Client, model: Any, tokenizer: Any) -> None:
    prompt = task_prompt(tokenizer) + tokenizer.encode(LookupDemonstrations().tool_call("bdf"))
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}}
    answer = await client.post("/generate", body)
    assert answer["output_ids"][0] == tokenizer.eos_token_id  # as in the test above: the call is complete
    assert answer["text"] == tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    assert "output_token_logprobs" not in answer["meta_info"]
