"""Whole episodes, run by verifiers itself with a scripted model: a request as JSON on standard input, and what became
of each episode as JSON on standard output."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from tests.programs.environments.model import serving


def said_by(answers: list[str], right: str | None) -> Any:
    """The answers in turn, over and over; RIGHT stands for the right one."""
    at = iter(range(10**9))

    def script(body: dict[str, Any]) -> str:
        return answers[next(at) % len(answers)].replace("RIGHT", right or "")

    return script


async def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    from agl_slime.environments.tasksets import env_block

    block = env_block(request["name"]) or {}
    block["taskset"] |= request.get("taskset", {})
    env = load_environment(resolve_env_config(block | request.get("env", {})))
    os.environ["SCRIPTED_KEY"] = "none"
    found = []
    async with env.serving():
        for task in env.taskset.take(request.get("tasks", 1)):
            right = None
            if block["taskset"]["id"].endswith("reasoning_gym"):
                from agl_slime.environments.tasksets.reasoning_gym import entry_of

                right = entry_of(task.data)[1]["answer"]
            async with serving(said_by(request["answers"], right)) as (address, asked):
                client = EvalClientConfig(base_url=address, api_key_var="SCRIPTED_KEY")
                episode = await env.run_episode(task, ModelContext(model="scripted", client=client))
            found.append(
                {
                    "ok": episode.ok,
                    "errors": [e.message for e in [*episode.errors, *(e for t in episode.traces for e in t.errors)]],
                    "traces": [
                        {
                            "agent": t.agent.name,
                            "trainable": t.agent.trainable,
                            "rewards": {name: reward.score for name, reward in t.rewards.items() if reward is not None},
                            "metrics": dict(t.metrics),
                            "turns": t.num_turns,
                            "info": dict(t.info),
                        }
                        for t in episode.traces
                    ],
                    "asked": asked,
                }
            )
    return found


if __name__ == "__main__":
    out = sys.stdout
    sys.stdout = sys.stderr  # libraries print
    print(json.dumps(asyncio.run(run(json.load(sys.stdin))), default=str), file=out)
