"""bfcl's tasks played with its own right calls, and with others: python -m tests.programs.environments.bfcl."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.programs.environments.model import environment, episode_of, messages_of, print_result, scores_of, serving

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


async def play(name: str, script: Any, count: int = 1) -> list[dict[str, Any]]:
    from agl_slime.environments.tasksets import env_block
    from agl_slime.environments.tasksets.bfcl import backend, entries

    env = environment(env_block(f"bfcl:{name}"))
    episodes = []
    async with env.serving():
        for task in env.taskset.take(count):
            replies = iter(script(entries(task.data.category)[task.data.name][1]))
            async with serving(lambda body, replies=replies: next(replies, "I have done that.")) as (address, requests):
                episode = await episode_of(env, task, address)
            (trace,) = episode.traces or [None]
            episodes.append(
                {
                    "name": task.data.name,
                    "errors": messages_of(episode),
                    "rewards": scores_of(trace),
                    "turns": trace.num_turns,
                    "reason": trace.info.get("error_type"),
                    "messages": requests[-1]["messages"],
                    "instances": sum(key.startswith("agl_") for key in vars(backend)),
                }
            )
    return episodes


def right(turns: list[list[str]]) -> Any:
    for turn in turns:
        calls = ", ".join(turn).replace("sort('", "sort(file_name='")  # it reads named arguments alone
        yield from ([f"[{calls}]"] if turn else [])
        yield "That is all."


async def run() -> dict[str, Any]:
    mark, short = Path(sys.argv[1]), "multi_turn_base"
    scripts: dict[str, Any] = {
        "nothing": lambda turns: [],
        "first turn only": lambda turns: right(turns[:1]),
        "malformed": lambda turns: ["[cd(", "]]", "mkdir dir", "{}"],
        "no such function": lambda turns: ["[fly_to(place='x')]"],
        "for ever": lambda turns: ["[pwd()]"] * 100,
    }
    for number, text in enumerate(HOSTILE):
        scripts[f"hostile {number}"] = lambda turns, text=text: [text.format(path=str(mark))]
    return {
        "right": {category: await play(category, right, count) for category, count in TASKS.items()},
        "wrong": {name: await play(short, script) for name, script in scripts.items()},
        "written": mark.exists(),
    }


if __name__ == "__main__":
    print_result(run)
