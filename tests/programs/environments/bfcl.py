"""bfcl's tasks played with its own right calls, and with others: python -m tests.programs.environments.bfcl."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

TASKS = {"multi_turn_base": 6, "multi_turn_miss_func": 4, "multi_turn_miss_param": 4, "multi_turn_long_context": 3}
HOSTILE = [
    "[open(file={path!r}, mode='w')]",
    "[cd(folder=open(file={path!r}, mode='w'))]",
    "[cd(folder=1 + open({path!r}, 'w'))]",
    "[cd(folder=lambda: open({path!r}, 'w'))]",
    "[cd(folder=[open(x, 'w') for x in [{path!r}]])]",
    "[json.codecs.open(filename={path!r}, mode='w')]",
    "[cd(folder=9**9**9**9)]",
    "[cd(folder='a' * 999999999999)]",
]


async def play(name: str, script: Any, count: int) -> list[dict[str, Any]]:
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from agl_slime.environments.tasksets import env_block
    from agl_slime.environments.tasksets.bfcl import backend, entries
    from tests.programs.environments.model import serving

    os.environ["SCRIPTED_KEY"] = "none"
    env = load_environment(resolve_env_config(env_block(f"bfcl:{name}")))
    found = []
    async with env.serving():
        for task in env.taskset.take(count):
            says = iter(script(entries(task.data.category)[task.data.name][1]))
            async with serving(lambda body, says=says: next(says, "I have done that.")) as (address, asked):
                client = EvalClientConfig(base_url=address, api_key_var="SCRIPTED_KEY")
                episode = await env.run_episode(task, ModelContext(model="scripted", client=client))
            (trace,) = episode.traces or [None]
            found.append(
                {
                    "name": task.data.name,
                    "errors": [e.message for e in [*episode.errors, *(trace.errors if trace else [])]],
                    "rewards": {key: one.score for key, one in trace.rewards.items() if one is not None},
                    "turns": trace.num_turns,
                    "why": trace.info.get("error_type"),
                    "asked": asked[-1]["messages"],
                    "left": sum(key.startswith("agl_") for key in vars(backend)),
                }
            )
    return found


def right(turns: list[list[str]]) -> Any:
    for turn in turns:
        said = ", ".join(turn).replace("sort('", "sort(file_name='")  # it reads named arguments alone
        yield from ([f"[{said}]"] if turn else [])
        yield "That is all."


async def run() -> dict[str, Any]:
    found: dict[str, Any] = {"right": {}, "wrong": {}}
    for category, count in TASKS.items():
        found["right"][category] = await play(category, right, count)
    short = "multi_turn_base"
    found["wrong"]["nothing"] = await play(short, lambda turns: [], 1)
    found["wrong"]["first turn only"] = await play(short, lambda turns: right(turns[:1]), 1)
    found["wrong"]["malformed"] = await play(short, lambda turns: ["[cd(", "]]", "mkdir dir", "{}"], 1)
    found["wrong"]["no such function"] = await play(short, lambda turns: ["[fly_to(place='x')]"], 1)
    found["wrong"]["for ever"] = await play(short, lambda turns: ["[pwd()]"] * 100, 1)
    mark = Path(sys.argv[1])
    for number, text in enumerate(HOSTILE):
        said = text.format(path=str(mark))
        found["wrong"][f"hostile {number}"] = await play(short, lambda turns, said=said: [said], 1)
    found["written"] = mark.exists()
    return found


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    print(json.dumps(asyncio.run(run())), file=out)
