"""strands-sglang, an agent framework's own client of SGLang's /generate, on the embedded engine.

pip install strands-sglang          # 0.4.3 on Python 3.11, 0.6.2 from 3.12 on; beside torch
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from agl_slime.cli.demo import LookupDemonstrations
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.tokens.loading import load_tokenizer

pytestmark = pytest.mark.clients

_MISSING = "pip install strands-sglang, beside torch"


def test_a_strands_agent_has_the_engines_ids_and_log_probs(policy_dir: Path, embedded_engine: str) -> None:
    strands = pytest.importorskip("strands", reason=_MISSING)
    theirs = pytest.importorskip("strands_sglang", reason=_MISSING)
    pytest.importorskip("torch", reason="the embedded engine needs torch")

    def lookup(key: str) -> str:
        """Look up what is stored under a key."""
        return "58"

    async def run() -> list[int]:
        tokenizer = load_tokenizer(policy_dir)
        async with theirs.SGLangClient(base_url=embedded_engine, max_retries=0) as client:
            model = theirs.SGLangModel(
                client=client, tokenizer=tokenizer, sampling_params={"temperature": 0.0, "max_new_tokens": 40}
            )
            system, question = (message["content"] for message in LookupDemonstrations().prompt({"key": "vz"}))
            agent = strands.Agent(
                model=model, system_prompt=system, tools=[strands.tool(lookup)], callback_handler=None
            )
            await agent.invoke_async(question)
        rollout = model.rollout
        assert len(rollout.token_ids) == len(rollout.loss_mask) == len(rollout.logprobs)
        trained = [n for n, mask in enumerate(rollout.loss_mask) if mask]
        assert all(math.isfinite(rollout.logprobs[n]) for n in trained)
        first, last = trained[0], next(n for n in trained if n + 1 not in trained)
        async with SGLangClient(base_url=embedded_engine) as client:
            params = SamplingParams(temperature=0.0, max_new_tokens=40)
            generation = await client.generate(rollout.token_ids[:first], params)
        assert list(generation.output_ids) == rollout.token_ids[first : last + 1]
        assert generation.log_probs == pytest.approx(rollout.logprobs[first : last + 1], abs=1e-5)
        return trained

    assert asyncio.run(run())
