"""Questions about the tasksets, each answered as JSON: python -m tests.programs.environments.tasksets NAME."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from typing import Any

from tests.programs.environments.model import environment, episode_of, print_result, serving

ANSWERS = {
    "right": "So: <answer>RIGHT</answer>",
    "right, after a wrong one": "<answer>0 0 0</answer> no, <answer>\n RIGHT </answer>",
    "wrong": "<answer>surely not this</answer>",
    "malformed": "<answer>[[{'</answer>",
    "empty": "<answer></answer>",
    "no tags": "RIGHT",
    "nothing": "",
}
QUICK = """
    ab base_conversion binary_matrix boxnet caesar_cipher chain_sum coin_flip count_primes countdown
    family_relationships game_of_life gcd gsm_symbolic jugs knights_knaves leg_counting letter_counting list_functions
    maze mini_sudoku number_sorting palindrome_generation pool_matrix prime_factorization propositional_logic
    rotate_matrix simple_equations spell_backward syllogism time_intervals tower_of_hanoi word_sorting
"""


def taskset(datasets: dict[str, float], **options: Any) -> Any:
    from agl_slime.environments.tasksets.reasoning_gym import ReasoningGymConfig, ReasoningGymTaskset

    return ReasoningGymTaskset(ReasoningGymConfig(id="agl_reasoning_gym", datasets=datasets, **options))


async def scores() -> list[Any]:
    """[dataset, answer, our score or error, the library's], each of ours out of a whole episode."""
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    from agl_slime.environments.tasksets import env_block

    rows = []
    reply = [""]
    async with serving(lambda body: reply[0]) as (address, _):
        for name in QUICK.split():
            env = environment(env_block(f"reasoning-gym:{name}"))
            async with env.serving():
                (task,) = env.taskset.take(1)
                library = reasoning_gym.create_dataset(name, **json.loads(task.data.options))
                entry = task.data.entry or library[task.data.position]
                for kind, answer in ANSWERS.items():
                    reply[0] = answer.replace("RIGHT", str(entry["answer"]))
                    try:
                        theirs: Any = float(library.score_answer(extract_answer(reply[0]), entry))
                    except Exception as error:
                        theirs = str(error)
                    episode = await episode_of(env, task, address)
                    (trace,) = episode.traces
                    ours: Any = trace.reward if trace.ok else trace.errors[-1].message
                    rows.append([name, kind, ours, theirs])
    return rows


def splits() -> dict[str, list[Any]]:
    """The questions of each split, twice over for the first seed."""
    both = {"chain_sum": 1.0, "coin_flip": 1.0}
    return {
        f"{split} {seed} {time}": [t.data.prompt for t in taskset(both, split=split, seed=seed, size=60)]
        for split in ("train", "eval")
        for seed in (0, 1, 2)
        for time in ((0, 1) if seed == 0 else (0,))
    }


def weights() -> dict[str, int]:
    return Counter(t.data.dataset for t in taskset({"chain_sum": 3, "leg_counting": 1}, size=400))


def levels() -> list[Any]:
    rising = list(taskset({"chain_sum": 1}, size=6, level=0, to_level=2))
    return [[t.data.level, len(t.data.prompt.split("problem: ")[-1])] for t in rising]


def few() -> int:
    """The size of a taskset of 500 over a dataset that has fewer questions."""
    options = {"gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 3}}
    return len(list(taskset({"gcd": 1}, size=500, options=options)))


def refused() -> list[str]:
    from agl_slime.environments.tasksets import env_block

    sentences = []
    for attempt in (
        lambda: list(taskset({"chain_summ": 1})),
        lambda: list(taskset({"chain_sum": 1}, instructions="loud")),
        lambda: list(taskset({"chain_sum": 1}, level=99)),
        lambda: env_block("reasoning-gym:"),
        lambda: env_block("reasoning-gym:chain_sum=much"),
        lambda: game("NoSuchGame-v0", 0),
        lambda: game("GuessTheNumber-v0", 0),
    ):
        try:
            attempt()
            sentences.append("taken")
        except Exception as error:
            sentences.append(str(error))
    return sentences


def game(name: str, seed: int) -> Any:
    from agl_slime.environments.tasksets.textarena import Game

    return Game(name, seed, {})


def games() -> dict[str, Any]:
    """The observations of two games of one seed and one of another, stepped alternately, and of one of the first seed
    by itself; and whether the process's own random state is untouched."""
    from agl_slime.environments.tasksets.textarena import random_move

    def play(tables: list[Any]) -> list[list[str]]:
        draws = [random.Random(5) for _ in tables]
        news: list[list[str]] = [[] for _ in tables]
        done = [False] * len(tables)
        while not all(done):
            for i, table in enumerate(tables):
                if not done[i]:
                    _, text = table.observe()
                    news[i].append(text)
                    done[i] = table.step(random_move(text, draws[i]))
        return news

    alone = play([game("PigDice-v0-50", 3)])
    random.seed(1)
    state = random.getstate()
    together = play([game("PigDice-v0-50", 3), game("PigDice-v0-50", 4), game("PigDice-v0-50", 3)])
    return {"alone": alone[0], "together": together, "untouched": random.getstate() == state}


def opponents() -> list[bool]:
    """Whether the fixed opponent's first move in a game of cards is one."""
    from agl_slime.environments.tasksets.textarena import random_move

    legal = []
    for seed in range(20):
        table, draw = game("KuhnPoker-v0", seed), random.Random(seed)
        opens, news = table.observe()
        done = table.step(random_move(news, draw))
        legal.append(not done and table.observe()[0] != opens)
    return legal


if __name__ == "__main__":
    print_result(globals()[sys.argv[1]])
