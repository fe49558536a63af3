"""The lookup agent with the ``openai`` client, without any code for training.

python train.py --agent agents/lookup_openai.py:lookup
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import agentlightning as agl
from openai import AsyncOpenAI

from agl_slime.cli.demo.formats import LookupDemonstrations

demonstrations = LookupDemonstrations()  # the tiny policy learns its format from them
# one client for all rollouts: making one takes 65 ms
client = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none")


@agl.rollout
async def lookup(task: dict[str, Any], llm: agl.LLM) -> float:
    ask = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions.create
    messages: list[Any] = demonstrations.prompt(task)
    answer = (await ask(model=llm.model, messages=messages)).choices[0].message
    if call := re.search(r"<tool_call>(.*?)</tool_call>", answer.content or "", re.DOTALL):
        messages += [
            answer.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": "1", "content": look_up(task, call[1])},
        ]
        answer = (await ask(model=llm.model, messages=messages)).choices[0].message
    return 1.0 if demonstrations.is_correct(task, answer.content or "") else 0.0


def look_up(task: dict[str, Any], call: str) -> str:
    try:
        return demonstrations.observation(task, json.loads(call)["arguments"]["key"])
    except (ValueError, KeyError, TypeError):
        return "not found"


def make_task(rng: random.Random) -> dict[str, Any]:
    return demonstrations.make_task(rng)
