"""A client of an engine over raw HTTP, and the reference log-probs of transformers for the same checkpoint."""

import asyncio
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.harness.engine_servers import Server

TOLERANCE = 1e-4
"""Log-probs against transformers' in float32: batches of other shapes round differently."""

_REQUEST_FIELDS = {"rid", "logprob_start_len", "top_logprobs_num"}

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 300, 301, 302, 17, 20], list(range(60, 100))]


@dataclass
class Client:
    session: aiohttp.ClientSession
    server: Server

    async def request(self, method: str, path: str, *, status: int = 200, **options: Any) -> Any:
        async with self.session.request(method, f"{self.server.url}{path}", **options) as answer:
            text = await answer.text()
            assert answer.status == status, text
            return await answer.json() if answer.content_type == "application/json" else text

    async def post(self, path: str, body: Any, *, status: int = 200) -> Any:
        return await self.request("POST", path, status=status, json=body)

    async def get(self, path: str, *, status: int = 200) -> Any:
        return await self.request("GET", path, status=status)

    async def generate(self, ids: Any, *, status: int = 200, **options: Any) -> Any:
        """``options`` are sampling parameters, and ``rid`` and log-prob options of the request itself."""
        request = {name: options.pop(name) for name in _REQUEST_FIELDS & options.keys()}
        sampling = {"skip_special_tokens": False, **options}
        body = {"input_ids": ids, "return_logprob": True, "sampling_params": sampling, **request}
        return await self.post("/generate", body, status=status)

    async def running(self, at_least: int, *, waiting: int = 0) -> None:
        """Wait until the server reports ``at_least`` running and ``waiting`` queued requests."""
        async with asyncio.timeout(30):
            while True:
                load = (await self.get("/v1/loads?include=core"))["loads"][0]
                if load["num_running_reqs"] >= at_least and load["num_waiting_reqs"] >= waiting:
                    return
                await asyncio.sleep(0.01)


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
    """Ids and log-probs; both fields with ids must agree."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    ids = [pair[1] for pair in pairs]
    assert answer["output_ids"] == ids
    return ids, [pair[0] for pair in pairs]


def assert_close(values: list[float], expected: list[float], tolerance: float = TOLERANCE) -> None:
    assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) <= tolerance
