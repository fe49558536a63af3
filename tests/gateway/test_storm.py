"""Many clients of a few rollouts at once, over all four protocols: streamed and not, given up in the middle, sent
again, refused. Whatever they do, each sampled token is trained at most once and is the engine's, nothing is a 500, no
answer goes to two requests, and the attempt closes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.resumable import Progress
from agl_slime.errors import EngineServerError
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl import LLM
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.turn import Turn
from tests.gateway.protocols import PROTOCOLS, assistant, body_of, delta_of, text_of, user
from tests.gateway.test_audit import FixedAccess, RandomEngine
from tests.harness.gateway import trained_once, writer
from tests.harness.vocabularies import chat_tokenizer

RETRY = {"x-stainless-retry-count": "1"}


class StormyEngine(RandomEngine):
    """Reports its answers token by token, fails now and then, and keeps a log of its samples."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        super().__init__(tokenizer, rng, thinks=False, opened=False)
        self.log: list[tuple[tuple[int, ...], Generation]] = []
        self.running = 0

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, **options: Any) -> Generation:
        if self.rng.random() < 0.05:
            raise EngineServerError("full")
        done = await super().generate(input_ids, sampling)
        self.log.append((tuple(input_ids), done))
        report = options.get("on_progress")
        self.running += 1
        try:
            for n in range(1, len(done.output_ids)):
                await asyncio.sleep(self.rng.choice((0, 0, 0.001)))
                if report is not None:
                    text = self.tokenizer.decode(done.output_ids[:n], skip_special_tokens=False)
                    ids: Any = {"output_ids": done.output_ids[:n], "log_probs": done.log_probs[:n], "text": text}
                    part = Generation(**ids, finish_reason="abort")
                    report(Progress(text, lambda part=part: part))
        finally:
            self.running -= 1
        return done

    async def aclose(self) -> None:
        pass


class Client:
    """One conversation with the model, in one protocol, by a user who is easily distracted."""

    def __init__(self, http: aiohttp.ClientSession, endpoint: str, rng: random.Random) -> None:
        self.http, self.endpoint, self.rng = http, endpoint, rng
        self.path = rng.choice(tuple(PROTOCOLS))
        self.messages: list[dict[str, Any]] = []
        self.whole: list[str] = []  # answers that were read to their ends

    async def step(self) -> None:
        rng = self.rng
        self.messages.append(user(f"{rng.randrange(1 << 40):x}?"))
        body = body_of(self.path, self.messages, stream=rng.random() < 0.6)
        kind = rng.random()
        if kind < 0.15:  # the same at once, as agents that take the best of several
            answers = await asyncio.gather(*(self.ask(body, patience=99, limit=99_999) for _ in range(3)))
        else:
            patience, limit = (99, 99_999) if kind < 0.6 else (rng.uniform(0.001, 0.02), rng.randrange(1, 9))
            answers = [await self.ask(body, patience=patience, limit=limit)]
        if answer := rng.choice(answers).strip():
            self.messages.append(assistant(answer))
        else:
            self.messages.pop()

    async def ask(self, body: dict[str, Any], *, patience: float, limit: int) -> str:
        """The text that was read; the request is sent again when it is refused or takes too long."""
        headers: dict[str, str] = {}
        for _ in range(5_000):
            try:
                text = await asyncio.wait_for(self.read(body, headers, limit), patience)
            except TimeoutError:
                text, patience = None, 99
            if text is not None:
                return text
            headers = RETRY
            await asyncio.sleep(self.rng.uniform(0.005, 0.05))
        raise AssertionError("refused for ever")

    async def read(self, body: dict[str, Any], headers: dict[str, str], limit: int) -> str | None:
        async with self.http.post(f"{self.endpoint}/{self.path}", json=body, headers=headers) as answer:
            assert answer.status in (200, 429), (answer.status, await answer.text())
            if answer.status == 429:
                return None
            if not body["stream"]:
                self.whole.append(text_of(self.path, await answer.json()))
                return self.whole[-1]
            text, events = "", 0
            async for line in answer.content:
                if line.startswith(b"data: ") and b"[DONE]" not in line:
                    text, events = text + delta_of(json.loads(line[6:])), events + 1
                if events >= limit:
                    answer.close()
                    return text
            self.whole.append(text)
            return text


def check(turns: Sequence[Turn], engine: StormyEngine) -> None:
    """Each turn is a sample of the engine for its prompt, or the beginning of one; no sample is two turns."""
    unused = list(engine.log)
    for turn in sorted(turns, key=lambda turn: turn.finish_reason == "abort"):
        prompt, ids = tuple(turn.prompt_ids.tolist()), tuple(turn.response_ids.tolist())
        assert turn.log_probs is not None
        sample = prompt, ids, tuple(turn.log_probs.tolist())
        size = len(ids) if turn.finish_reason == "abort" else None
        samples = [(sent, done.output_ids[:size], done.log_probs[:size]) for sent, done in unused]
        assert sample in samples, f"{ids} was not sampled after {prompt}"
        del unused[samples.index(sample)]


async def storm(seed: int, *, rollouts: int, clients: int, steps: int) -> int:
    rng = random.Random(seed)
    tokenizer = chat_tokenizer("qwen", "chatml")
    engine = StormyEngine(tokenizer, rng)
    llm = LLM(endpoint="http://127.0.0.1:9", model="m", sampling_parameters={"max_new_tokens": 4096})
    settings = GatewaySettings(max_in_flight=4, branches=rng.choice(("used", "all", "last")))
    with Gateway(settings, access=FixedAccess(tokenizer, engine)) as gateway:
        spans: list[list[Any]] = [[] for _ in range(rollouts)]
        opened = [gateway.open(f"ro-{n}", "at", {"main_llm": llm}, writer(target)) for n, target in enumerate(spans)]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            people = [
                Client(http, served["main_llm"].endpoint, random.Random(rng.random()))  # type: ignore[union-attr]
                for _, served in opened
                for _ in range(clients)
            ]

            async def run(client: Client) -> None:
                for _ in range(steps):
                    await client.step()

            await asyncio.wait_for(asyncio.gather(*map(run, people)), 300)
            last = [asyncio.ensure_future(client.step()) for client in people]  # pending when the attempts close
            await asyncio.sleep(0.01)
            for attempt, _ in opened:
                assert attempt is not None
                await asyncio.wait_for(gateway.close(attempt), 4)
                assert attempt.closed
                assert not attempt._pending
            for task in last:
                task.cancel()
            await asyncio.gather(*last, return_exceptions=True)
        assert engine.running == 0
        answers = [text.strip() for client in people for text in client.whole]
        assert len(set(answers)) == len(answers), "an answer went to two requests"
        turns = [decode_turns(written) for written in spans]
        for rollout in turns:
            trained_once(rollout, merge_turns(rollout))
        check([turn for rollout in turns for turn in rollout], engine)
    return sum(map(len, turns))


async def test_each_sampled_token_is_trained_at_most_once_whatever_clients_do() -> None:
    for seed in range(2):
        assert await storm(seed, rollouts=3, clients=5, steps=6) > 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
async def test_the_same_for_longer(seed: int) -> None:
    assert await storm(1000 + seed, rollouts=4, clients=4, steps=15) > 200
