"""One suite, two servers (test_conformance.py): forms of input, refusals, text clients and information."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.engine_client import PROMPTS, Client, assert_close, expected_log_probs, greedy, sampled
from tests.harness.engine_servers import MAX_RUNNING

GREEDY = {"temperature": 0, "ignore_eos": True}


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


async def test_text_is_encoded_by_the_tokenizer(client: Client, model: Any, tokenizer: Any) -> None:
    text = "<|im_start|>user\nWhat is stored"
    answer = await client.post("/generate", {"text": text, "sampling_params": {**GREEDY, "max_new_tokens": 6}})
    assert answer["output_ids"] == greedy(model, tokenizer.encode(text), 6)
    assert answer["meta_info"]["prompt_tokens"] == len(tokenizer.encode(text))


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


async def test_out_of_vocabulary_ids_are_refused(client: Client) -> None:
    if client.server.real:
        pytest.skip("SGLang does not check ids, and a newer one dies of them: the embedded engine refuses instead")
    for ids in ([5, 460], [5, -1]):
        answer = await client.post("/generate", {"input_ids": ids}, status=400)
        assert "vocab size" in answer["error"]["message"]
    assert len((await client.generate([5, 459], max_new_tokens=1))["output_ids"]) == 1


# -- text clients and information ------------------------------------------------------------------------------------


async def test_chat_completion_equals_generation_from_the_template(client: Client, model: Any, tokenizer: Any) -> None:
    from agl_slime.cli.demo import LookupDemonstrations

    messages = LookupDemonstrations().prompt({"key": "hjk"})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = greedy(model, prompt, 10)
    body = {**GREEDY, "model": "policy", "messages": messages, "max_tokens": 10, "logprobs": True}
    answer = await client.post("/v1/chat/completions", body)
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    log_probs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert_close(log_probs, expected_log_probs(model, prompt, expected))
    counts = {"prompt_tokens": len(prompt), "completion_tokens": 10, "total_tokens": len(prompt) + 10}
    assert {name: answer["usage"][name] for name in counts} == counts
    answer = await client.post("/v1/chat/completions", {"model": "policy", "messages": []}, status=400)
    assert answer["message"]


async def test_completion_takes_a_plain_prompt(client: Client, model: Any, tokenizer: Any) -> None:
    answer = await client.post("/v1/completions", {**GREEDY, "model": "policy", "prompt": "What is", "max_tokens": 5})
    expected = greedy(model, tokenizer.encode("What is"), 5)
    assert answer["choices"][0]["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer["usage"]["completion_tokens"] == 5


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


async def test_workers_lists_itself_as_a_router_would(client: Client) -> None:
    """With the fields of sglang-router 0.3.2."""
    if client.server.real:
        pytest.skip("/workers is the router's endpoint; a worker answers 404")
    answer = await client.get("/workers")
    assert set(answer) == {"workers", "total", "stats"}
    [worker] = answer["workers"]
    assert (worker["url"], worker["is_healthy"]) == (client.server.url, True)
    fields = "id url model_id priority cost worker_type is_healthy load connection_mode metadata disable_health_check"
    assert set(worker) == set(fields.split())
