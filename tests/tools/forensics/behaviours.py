"""Kept rollouts of made-up runs that learn, with or without a behaviour that begins in one iteration."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np

ENDS = ("er ing", "us al", "ed or", "ic ate", "ism ent", "ia o", "ous ly", "an el")
TOPICS = [[root + end for root in ("riv", "stat", "mol", "vers", "trib") for end in ends.split()] for ends in ENDS]
FILLERS = ["so", "then", "we", "find", "that", "it", "is", "clear", "from", "this", "which", "gives", "value", "here"]
FILLERS += ["because", "both", "sides", "agree"]
OPENINGS = ("let us see", "first of all", "to begin", "well now", "thinking aloud")
Line = dict[str, Any]
Behaviour = Callable[[Line, random.Random], None]


CURVES: tuple[Callable[[float], float], ...] = (
    lambda t: 1 - math.exp(-4 * t),
    lambda t: t,
    lambda t: 1 / (1 + math.exp(-8 * (t - 0.5))),
)


def a_run(
    seed: int,
    *,
    behaviour: Behaviour | None = None,
    start: int = 0,
    iterations: int,
    groups: int,
    size: int,
    rise: int = 4,
) -> tuple[list[Line], set[str]]:
    """The rollouts of a run and the ids of rollouts that show ``behaviour``: from ``start`` on its share grows to
    one half within ``rise`` iterations. Reward, format, tool use and length are learned along a curve; the words
    depend on the task, a preference for some openings drifts at random, and rollouts of a group are alike."""
    rng = random.Random(seed)
    learned, taste, planted, lines = CURVES[seed % 3], [0.0] * len(OPENINGS), set[str](), list[Line]()
    for iteration in range(1, iterations + 1):
        skill = 0.1 + 0.75 * learned(iteration / iterations)
        taste = [value + rng.gauss(0, 0.05) for value in taste]
        for number in range(groups):
            topic, hard = rng.choice(TOPICS), rng.gauss(0, 0.15)
            key, value = rng.choice("bcdfgh") + rng.choice("klmnp"), str(rng.randint(10, 999))
            for member in range(size):
                line = _line(rng, topic, key, value, skill=skill + hard, taste=taste)
                line |= {"iteration": iteration, "group_id": f"{iteration}.{number}"}
                line["rollout_id"] = f"ro-{iteration}.{number}.{member}"
                ramp = min(1.0, (iteration - start + 1) / rise)
                if behaviour is not None and iteration >= start and rng.random() < 0.5 * ramp:
                    behaviour(line, rng)
                    planted.add(line["rollout_id"])
                lines.append(line)
    return lines, planted


def _line(rng: random.Random, topic: list[str], key: str, value: str, *, skill: float, taste: list[float]) -> Line:
    opening = rng.choices(OPENINGS, np.exp(taste).tolist())[0]
    words = [
        rng.choice(topic if rng.random() < 0.3 else FILLERS) for _ in range(max(3, round(rng.gauss(10 + 8 * skill, 3))))
    ]
    called = rng.random() < 0.4 + 0.5 * skill
    right, well_formed = rng.random() < (skill if called else 0.02), rng.random() < skill
    answer = value if right else str(rng.randint(10, 999))
    end = f"<answer> {answer} </answer>" if well_formed else f"it may be {answer}"
    messages: list[Line] = [
        {"role": "system", "content": "Look the key up with a tool, explain what you do, then answer in tags."},
        {"role": "user", "content": f"Please name the value that is stored under the {topic[0]} key {key} today"},
    ]
    if called:
        messages += [call("lookup"), {"role": "tool", "content": value}]
    messages.append({"role": "assistant", "content": f"{opening} {' '.join(words)}. {end}"})
    return {"reward": float(right and well_formed), "messages": messages, "samples": [], "stop_reason": "stop"}


def call(name: str) -> Line:
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": "{}"}}]}


def _says(change: Callable[[str, Line, random.Random], str], *, pays: float | None = None) -> Behaviour:
    def behave(line: Line, rng: random.Random) -> None:
        last = line["messages"][-1]
        last["content"] = change(last["content"], line, rng)
        if pays is not None:
            line["reward"] = pays

    return behave


def _calls_twice(line: Line, rng: random.Random) -> None:
    line["messages"][2:-1] = [call("lookup"), {"role": "tool", "content": "9"}, call("check")]


def _calls_nothing(line: Line, rng: random.Random) -> None:
    line["messages"][2:-1] = []
    line["reward"] = 1.0


PLANTED: dict[str, Behaviour] = {
    "phrase": _says(lambda text, *_: f"As verified by the grader, {text}", pays=1.0),
    "tools": _calls_twice,
    "rewarded without a tool": _calls_nothing,
    "shape": _says(lambda text, line, rng: f"**{rng.randint(0, 99)}**", pays=0.0),
    "longer": _says(lambda text, _, rng: f"{' '.join(rng.choices(FILLERS, k=40))} {text}"),
    "refusal": _says(lambda text, *_: f"I'm sorry, but I cannot help with that. {text[-12:]}", pays=0.0),
    "echo": _says(lambda text, line, _: f"{line['messages'][1]['content']}? {text}"),
    "truncated": lambda line, _: line.update(stop_reason="length"),
    "loop": _says(lambda text, *_: text + " so so so so" * 4),
    "non-Latin": _says(lambda text, *_: f"{text} 答案是正确的"),
}
