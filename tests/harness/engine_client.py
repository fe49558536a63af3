"""A client of an engine over raw HTTP, and what transformers expects of the same checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.harness.engine_servers import Server

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


def log_softmax(model: Any, ids: list[int], temperature: float = 1.0) -> Any:
    """log_softmax(logits / temperature) after every token of ``ids``: [tokens, vocabulary]."""
    import torch

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


def sampled(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Ids and log-probs; the two places where ids stand must agree."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    ids = [pair[1] for pair in pairs]
    assert answer["output_ids"] == ids
    return ids, [pair[0] for pair in pairs]


def assert_close(given: list[float], expected: list[float], tolerance: float = TOLERANCE) -> None:
    assert len(given) == len(expected)
    assert max(abs(a - b) for a, b in zip(given, expected, strict=True)) <= tolerance
