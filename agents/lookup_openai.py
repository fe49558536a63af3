"""The lookup agent with the ``openai`` client: nothing of it knows that it is trained.

python train.py --agent agents/lookup_openai.py:lookup
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

import agentlightning as agl
from openai import AsyncOpenAI

from agl_slime.demo.formats import LookupDemonstrations

TABLE = LookupDemonstrations()
# one client for all rollouts: each that is made costs 65 ms
client = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none")


@agl.rollout
async def lookup(task: dict[str, Any], llm: agl.LLM) -> float:
    ask = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions.create
    messages: list[Any] = TABLE.prompt(task)
    said = (await ask(model=llm.model, messages=messages)).choices[0].message
    if call := re.search(r"<tool_call>(.*?)</tool_call>", said.content or "", re.DOTALL):
        messages += [
            said.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": "1", "content": look(task, call[1])},
        ]
        said = (await ask(model=llm.model, messages=messages)).choices[0].message
    return 1.0 if TABLE.is_correct(task, said.content or "") else 0.0


def look(task: dict[str, Any], call: str) -> str:
    try:
        return TABLE.observation(task, json.loads(call)["arguments"]["key"])
    except (ValueError, KeyError, TypeError):
        return "not found"


def make_task(rng: random.Random) -> dict[str, Any]:
    return TABLE.make_task(rng)


# where the tasks come from, and what the tiny policy learns its format from; or pass --tasks and --model-path
vars(lookup).update(make_task=make_task, demonstrations=TABLE)
