"""Demonstrations of environments for a tiny policy, as JSON: conversations in the words that the environment really
uses, each answer of the assistant a right or legal one. Runs in the Python that has verifiers.

    python -m benchmarks.environment_demonstrations '{"env": "reasoning-gym:gcd", "taskset": {"size": 200}}'
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

from agl_slime.environments.tasksets import env_block

Conversation = list[dict[str, str]]


def questions(taskset: dict[str, Any]) -> Iterator[Conversation]:
    """Of a dataset's training split, with reasoning-gym's own answers."""
    from agl_slime.environments.tasksets.reasoning_gym import ReasoningGymConfig, ReasoningGymTaskset, entry_of

    for task in ReasoningGymTaskset(ReasoningGymConfig(**taskset)):
        answer = entry_of(task.data)[1]["answer"]
        yield [
            {"role": "system", "content": task.data.system_prompt},
            {"role": "user", "content": task.data.prompt},
            {"role": "assistant", "content": f"<answer>{answer}</answer>"},
        ]


def games(taskset: dict[str, Any]) -> Iterator[Conversation]:
    """Each seat of games of the training split between players that draw a legal move."""
    from agl_slime.environments.tasksets.textarena import Game, TwoPlayerConfig, TwoPlayerTaskset, random_move

    for task in itertools.islice(TwoPlayerTaskset(TwoPlayerConfig(**taskset)), 0, None, 2):
        game, draw = Game(task.data.game, task.data.seed, task.data.options), random.Random(task.data.seed)
        seats: list[Conversation] = [[{"role": "system", "content": task.data.system_prompt}] for _ in range(2)]
        done = False
        while not done:
            seat, news = game.observe()
            move = random_move(news, draw)
            seats[seat] += [{"role": "user", "content": news}, {"role": "assistant", "content": move}]
            done = game.step(move)
        yield from (seat for seat in seats if len(seat) > 1)


def main(request: dict[str, Any]) -> list[Conversation]:
    block = env_block(request["env"])
    assert block is not None, f"{request['env']} is not one of this package's tasksets"
    taskset = {**block["taskset"], **request["taskset"]}
    shown = questions if taskset.pop("id") == "agl_reasoning_gym" else games
    return list(shown(taskset))


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print
    print(json.dumps(main(json.loads(sys.argv[1]))), file=out)
