"""Whole episodes, run by verifiers itself with a scripted model: a request as JSON on standard input, and the episodes
as JSON on standard output."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

from tests.programs.environments.model import environment, episode_of, messages_of, print_result, scores_of, serving


def replies(answers: list[str], right: str | None) -> Any:
    """The answers in order, over and over; RIGHT stands for the right one."""
    numbers = itertools.count()
    return lambda body: answers[next(numbers) % len(answers)].replace("RIGHT", right or "")


async def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    from agl_slime.environments.tasksets import env_block

    block = env_block(request["name"]) or {}
    block["taskset"] |= request.get("taskset", {})
    env = environment(block | request.get("env", {}))
    episodes = []
    async with env.serving():
        for task in env.taskset.take(request.get("tasks", 1)):
            right = None
            if block["taskset"]["id"].endswith("reasoning_gym"):
                from agl_slime.environments.tasksets.reasoning_gym import entry_of

                right = entry_of(task.data)[1]["answer"]
            async with serving(replies(request["answers"], right)) as (address, requests):
                episode = await episode_of(env, task, address)
            traces = [
                {
                    "agent": trace.agent.name,
                    "trainable": trace.agent.trainable,
                    "rewards": scores_of(trace),
                    "metrics": dict(trace.metrics),
                    "turns": trace.num_turns,
                }
                for trace in episode.traces
            ]
            errors = messages_of(episode)
            episodes.append({"ok": episode.ok, "errors": errors, "traces": traces, "requests": requests})
    return episodes


if __name__ == "__main__":
    print_result(run, json.load(sys.stdin))
