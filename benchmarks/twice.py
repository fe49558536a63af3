"""The lookup agent with the ``openai`` client, which asks for each first answer twice and throws the first one away:
what ``--branches`` is compared with.

    python -m benchmarks.learning --seeds 6 --agent benchmarks/twice.py:twice -- --num-iterations 10 --branches used
"""

from __future__ import annotations

import random
import re
from typing import Any

import agentlightning as agl
from openai import AsyncOpenAI

from agl_slime.cli.demo.formats import LookupDemonstrations

demonstrations = LookupDemonstrations()  # the tiny policy learns its format from them
client = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none")


@agl.rollout
async def twice(task: dict[str, Any], llm: agl.LLM) -> float:
    ask = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions.create
    messages: list[Any] = demonstrations.prompt(task)
    await ask(model=llm.model, messages=messages)
    said = (await ask(model=llm.model, messages=messages)).choices[0].message
    if call := re.search(r'<tool_call>.*"key":\s*"([^"]*)".*</tool_call>', said.content or "", re.DOTALL):
        found = demonstrations.observation(task, call[1])
        messages += [said.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "1", "content": found}]
        said = (await ask(model=llm.model, messages=messages)).choices[0].message
    return 1.0 if demonstrations.is_correct(task, said.content or "") else 0.0


def make_task(rng: random.Random) -> dict[str, Any]:
    return demonstrations.make_task(rng)
