"""One suite, two servers: the embedded engine, and a real SGLang on the CPU serving the same checkpoint.

The real one is started when AGL_SLIME_SGLANG_PYTHON names a Python with SGLang (scripts/sglang_cpu.sh sets one up) and
the tests run with ``-m sglang``. Everything goes over raw HTTP. Where the two differ on purpose, the test says so.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

torch = pytest.importorskip("torch", reason='the embedded engine needs torch: pip install "agl-slime[local]"')
transformers = pytest.importorskip("transformers")

from agl_slime.demo import LookupDemonstrations  # noqa: E402
from tests.integration.engine_servers import MAX_RUNNING, Server  # noqa: E402

TOLERANCE = 1e-4
"""Log-probs against transformers' in float32: batches of other shapes round differently."""

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 300, 301, 302, 17, 20], list(range(60, 100))]


@dataclass
class Client:
    session: aiohttp.ClientSession
    server: Server

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        async with self.session.post(f"{self.server.url}{path}", json=body) as answer:
            text = await answer.text()
            assert answer.status == status, text
            return await answer.json() if answer.content_type == "application/json" else text

    async def get(self, path: str, *, status: int = 200) -> Any:
        async with self.session.get(f"{self.server.url}{path}") as answer:
            assert answer.status == status, await answer.text()
            return await answer.json() if answer.content_type == "application/json" else await answer.text()

    async def generate(
        self,
        ids: Any,
        *,
        status: int = 200,
        rid: Any = None,
        logprob_start_len: Any = None,
        top_logprobs_num: Any = None,
        **sampling: Any,
    ) -> Any:
        body: dict[str, Any] = {
            "input_ids": ids,
            "return_logprob": True,
            "sampling_params": {"skip_special_tokens": False, **sampling},
        }
        if rid is not None:
            body["rid"] = rid
        if logprob_start_len is not None:
            body["logprob_start_len"] = logprob_start_len
        if top_logprobs_num is not None:
            body["top_logprobs_num"] = top_logprobs_num
        return await self.post("/generate", body, status=status)

    async def running(self, at_least: int, *, waiting: int = 0) -> None:
        """Until the server reports that many running and waiting requests."""

        async def poll() -> None:
            while True:
                load = (await self.get("/v1/loads?include=core"))["loads"][0]
                if load["num_running_reqs"] >= at_least and load["num_waiting_reqs"] >= waiting:
                    return
                await asyncio.sleep(0.01)

        await asyncio.wait_for(poll(), 30)


@pytest.fixture
async def client(server: Server) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Client(session, server)


@pytest.fixture(scope="module")
def tokenizer(policy_dir: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(policy_dir)


@pytest.fixture(scope="module")
def model(policy_dir: Path) -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(policy_dir).eval()


def log_softmax(model: Any, ids: list[int], temperature: float = 1.0) -> Any:
    """log_softmax(logits / temperature) after every token of ``ids``: [tokens, vocabulary]."""
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float() / temperature, dim=-1)


def expected_log_probs(model: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    table = log_softmax(model, prompt + output, temperature)
    return [float(table[len(prompt) - 1 + place, token]) for place, token in enumerate(output)]


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(log_softmax(model, ids)[-1].argmax()))
    return ids[len(prompt) :]


def task_prompt(tokenizer: Any) -> list[int]:
    """A prompt of the kind that the policy was warmed up on."""
    return tokenizer.apply_chat_template(
        LookupDemonstrations().prompt({"key": "bdf"}), add_generation_prompt=True, return_dict=True
    )["input_ids"]


def sampled(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and log-probs; the two places where ids stand must agree."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    ids = [pair[1] for pair in pairs]
    assert answer["output_ids"] == ids
    return ids, [pair[0] for pair in pairs]


def assert_close(given: list[float], expected: list[float], tolerance: float = TOLERANCE) -> None:
    assert len(given) == len(expected)
    assert max(abs(a - b) for a, b in zip(given, expected, strict=True)) <= tolerance


# -- what is sampled, and its log-probs ------------------------------------------------------------------------------


async def test_the_likeliest_tokens_are_told_with_their_log_probs(client: Client, model: Any) -> None:
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
async def test_log_probs_are_those_of_the_scaled_distribution(client: Client, model: Any, temperature: float) -> None:
    for prompt in PROMPTS:
        ids, log_probs = sampled(
            await client.generate(prompt, temperature=temperature, max_new_tokens=24, ignore_eos=True)
        )
        assert len(ids) == 24
        assert_close(log_probs, expected_log_probs(model, prompt, ids, temperature))


async def test_temperature_zero_is_greedy_and_reports_log_probs_at_temperature_one(client: Client, model: Any) -> None:
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
    # the last allowed token being the end token counts as length
    assert (await client.generate(prompt, temperature=0, max_new_tokens=1))["meta_info"]["finish_reason"][
        "type"
    ] == "length"
    ignored = await client.generate(prompt, temperature=0, max_new_tokens=9, ignore_eos=True)
    assert ignored["output_ids"] == greedy(model, prompt, 9)


async def test_special_tokens_are_left_out_of_the_text_by_default(client: Client, model: Any, tokenizer: Any) -> None:
    prompt = task_prompt(tokenizer) + tokenizer.encode(LookupDemonstrations().tool_call("bdf"))
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 9, "ignore_eos": True}}
    answer = await client.post("/generate", body)
    assert answer["output_ids"][0] == tokenizer.eos_token_id  # as in the test above: the call is complete
    assert answer["text"] == tokenizer.decode(answer["output_ids"], skip_special_tokens=True)
    assert "output_token_logprobs" not in answer["meta_info"]


# -- forms of input --------------------------------------------------------------------------------------------------


async def test_batches_and_parallel_samples(client: Client, model: Any) -> None:
    limits = [{"temperature": 0, "max_new_tokens": count, "ignore_eos": True} for count in (3, 5, 4)]
    answers = await client.post(
        "/generate",
        {
            "input_ids": PROMPTS,
            "sampling_params": limits,
            "return_logprob": [True, True, True],
            "rid": ["a-1", "a-2", "a-3"],
        },
    )
    assert [answer["meta_info"]["id"] for answer in answers] == ["a-1", "a-2", "a-3"]
    assert [answer["output_ids"] for answer in answers] == [
        greedy(model, prompt, count) for prompt, count in zip(PROMPTS, (3, 5, 4), strict=True)
    ]
    answers = await client.generate(PROMPTS[0], n=4, temperature=1, max_new_tokens=12, ignore_eos=True)
    assert len(answers) == 4
    assert len({answer["meta_info"]["id"] for answer in answers}) == 4
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    for answer in answers:
        ids, log_probs = sampled(answer)
        assert_close(log_probs, expected_log_probs(model, PROMPTS[0], ids))


async def test_text_is_encoded_by_the_tokenizer(client: Client, model: Any, tokenizer: Any) -> None:
    text = "<|im_start|>user\nWhat is stored"
    answer = await client.post(
        "/generate", {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}}
    )
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
        ({"input_ids": [7], "sampling_params": {"temperature": -1.0}}, "temperature must be"),
        ({"input_ids": [7], "sampling_params": {"top_p": 0.0}}, "top_p must be in (0, 1]"),
        ({"input_ids": [7], "sampling_params": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1"),
        ({"input_ids": [7], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens must be at least 0"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_a_message(
    client: Client, body: dict[str, Any], message: str
) -> None:
    answer = await client.post("/generate", body, status=400)
    assert message in answer["error"]["message"]


async def test_out_of_vocabulary_ids_are_refused(client: Client) -> None:
    if client.server.real:
        pytest.skip("SGLang does not check ids, and a newer one dies of them: the embedded engine refuses instead")
    for ids in ([5, 460], [5, -1]):
        answer = await client.post("/generate", {"input_ids": ids}, status=400)
        assert "vocab size" in answer["error"]["message"]
    assert len((await client.generate([5, 459], max_new_tokens=1))["output_ids"]) == 1


async def test_a_request_id_in_use_is_refused(client: Client) -> None:
    first = asyncio.create_task(
        client.generate(PROMPTS[0], rid="twice", temperature=1, max_new_tokens=4000, ignore_eos=True)
    )
    await client.running(1)
    answer = await client.generate(PROMPTS[0], rid="twice", max_new_tokens=1, status=400)
    assert "Duplicate request ID" in answer["error"]["message"]
    await client.post("/abort_request", {"rid": "twice"})
    assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"


# -- control ---------------------------------------------------------------------------------------------------------


async def test_an_aborted_running_request_keeps_what_it_has(client: Client, model: Any) -> None:
    task = asyncio.create_task(
        client.generate(PROMPTS[0], rid="run-1", temperature=1, max_new_tokens=4000, ignore_eos=True)
    )
    await client.running(1)
    await client.post("/abort_request", {"rid": "run-1"})
    answer = await task
    ids, log_probs = sampled(answer)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 1 <= len(ids) < 4000
    assert answer["meta_info"]["completion_tokens"] == len(ids)
    assert_close(
        log_probs, expected_log_probs(model, PROMPTS[0], ids), 3e-4
    )  # thousands of tokens: more rounding than in a short answer


async def test_requests_aborted_in_the_queue_have_no_ids(client: Client) -> None:
    tasks = [
        asyncio.create_task(
            client.generate(PROMPTS[0], rid=f"all-{n}", temperature=1, max_new_tokens=4000, ignore_eos=True)
        )
        for n in range(MAX_RUNNING + 3)
    ]
    await client.running(MAX_RUNNING, waiting=3)
    await client.post("/abort_request", {"abort_all": True})
    answers = await asyncio.gather(*tasks)
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} == {"abort"}
    queued = [answer for answer in answers if not answer["output_ids"]]
    assert len(queued) == 3
    for answer in queued:
        assert "prompt_tokens" not in answer["meta_info"]
        assert "cached_tokens" not in answer["meta_info"]


async def test_aborting_an_unknown_request_is_no_error(client: Client) -> None:
    await client.post("/abort_request", {"rid": "never-seen"})
    await client.post("/abort_request", {})
    assert len((await client.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True))["output_ids"]) == 2


async def test_pause_returns_partial_answers_and_holds_new_requests(client: Client) -> None:
    running = asyncio.create_task(client.generate(PROMPTS[0], temperature=1, max_new_tokens=4000, ignore_eos=True))
    await client.running(1)
    await client.post("/pause_generation", {})
    answer = await running
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["output_ids"]
    held = asyncio.create_task(client.generate(PROMPTS[0], temperature=0, max_new_tokens=4, ignore_eos=True))
    done, _ = await asyncio.wait({held}, timeout=0.5)
    assert not done
    await client.post("/continue_generation", {})
    assert len((await held)["output_ids"]) == 4


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_request_goes_on_where_it_stopped(client: Client, model: Any, mode: str) -> None:
    running = asyncio.create_task(client.generate(PROMPTS[0], temperature=1, max_new_tokens=1500, ignore_eos=True))
    await client.running(1)
    await client.post("/pause_generation", {"mode": mode})
    done, _ = await asyncio.wait({running}, timeout=0.5)
    assert not done
    await client.post("/continue_generation", {})
    ids, log_probs = sampled(await running)
    assert len(ids) == 1500
    assert_close(log_probs, expected_log_probs(model, PROMPTS[0], ids), 3e-4)


@pytest.fixture
def moved_policy(policy_dir: Path, tmp_path: Path) -> tuple[Path, Any]:
    """A copy of the policy with other weights, and its model."""
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
    before, _ = sampled(await client.generate(prompt, temperature=1, max_new_tokens=12, ignore_eos=True))
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
        # or the comparison above would say nothing
        assert (
            max(
                abs(a - b)
                for a, b in zip(
                    expected_log_probs(model, prompt, before), expected_log_probs(moved, prompt, before), strict=True
                )
            )
            > 100 * TOLERANCE
        )


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


async def test_flush_is_refused_while_something_runs(client: Client) -> None:
    running = asyncio.create_task(
        client.generate(PROMPTS[0], rid="flush", temperature=1, max_new_tokens=4000, ignore_eos=True)
    )
    await client.running(1)
    await client.post("/flush_cache", {}, status=400)
    await client.post("/abort_request", {"rid": "flush"})
    await running
    # SGLang's scheduler may still be putting the ended request away when its answer is already here
    await client.post("/flush_cache?timeout=10", {})


# -- text clients and information ------------------------------------------------------------------------------------


async def test_chat_completion_equals_generation_from_the_template(client: Client, model: Any, tokenizer: Any) -> None:
    messages = LookupDemonstrations().prompt({"key": "hjk"})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    expected = greedy(model, prompt, 10)
    answer = await client.post(
        "/v1/chat/completions",
        {
            "model": "policy",
            "messages": messages,
            "temperature": 0,
            "max_tokens": 10,
            "logprobs": True,
            "ignore_eos": True,
        },
    )
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert choice["finish_reason"] == "length"
    assert_close(
        [entry["logprob"] for entry in choice["logprobs"]["content"]], expected_log_probs(model, prompt, expected)
    )
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
        len(prompt),
        10,
        len(prompt) + 10,
    )


async def test_completion_takes_a_plain_prompt(client: Client, model: Any, tokenizer: Any) -> None:
    answer = await client.post(
        "/v1/completions",
        {"model": "policy", "prompt": "What is", "temperature": 0, "max_tokens": 5, "ignore_eos": True},
    )
    assert answer["choices"][0]["text"] == tokenizer.decode(
        greedy(model, tokenizer.encode("What is"), 5), skip_special_tokens=True
    )
    assert answer["usage"]["completion_tokens"] == 5


async def test_a_chat_without_messages_is_refused(client: Client) -> None:
    answer = await client.post("/v1/chat/completions", {"model": "policy", "messages": []}, status=400)
    assert answer["message"]


async def test_information(client: Client) -> None:
    assert Path((await client.get("/model_info"))["model_path"]) == client.server.policy
    assert (await client.get("/get_model_info"))["is_generation"] is True
    models = await client.get("/v1/models")
    assert models["data"][0]["max_model_len"] == 4096
    info = await client.get("/server_info")
    assert info["model_path"]
    assert info["version"]
    load = (await client.get("/v1/loads?include=core"))["loads"][0]
    assert load["num_running_reqs"] == 0
    assert load["num_waiting_reqs"] == 0
    assert load["max_running_requests"] == MAX_RUNNING
    await client.get("/health")
    await client.get("/health_generate")


async def test_workers_lists_itself_as_a_router_would(client: Client) -> None:
    if client.server.real:
        pytest.skip("/workers is the router's endpoint; a worker answers 404")
    answer = await client.get("/workers")
    assert answer["total"] == 1
    worker = answer["workers"][0]
    assert worker["url"] == client.server.url
    assert worker["is_healthy"] is True
    # what sglang-router 0.3.2 answers
    assert set(answer) == {"workers", "total", "stats"}
    fields = {
        "id",
        "url",
        "model_id",
        "priority",
        "cost",
        "worker_type",
        "is_healthy",
        "load",
        "connection_mode",
        "metadata",
        "disable_health_check",
    }
    assert set(worker) == fields
