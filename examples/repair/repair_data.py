"""Functions with one planted fault each, tests that show it, and hidden tests.

    python examples/repair/repair_data.py DIRECTORY [small|foreign]

writes tasks as train.jsonl and held_out.jsonl (of other functions), and demonstrations.jsonl: with ``foreign`` those of
``mini_agent.repair_small``.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from repair_agent import RepairAgent, SmallRepairAgent, Workspace

# The annotations decide on the arguments of tests.
TRAIN = """
def clamp(value: int, low: int, high: int):
    if value < low:
        return low
    return high if value > high else value

def count_vowels(text: str):
    return sum(1 for letter in text if letter in "aeiou")

def running_sums(numbers: list):
    total, sums = 0, []
    for number in numbers:
        total = total + number
        sums.append(total)
    return sums

def without_repeats(numbers: list):
    kept = []
    for number in numbers:
        if number not in kept:
            kept.append(number)
    return kept

def is_palindrome(text: str):
    return text == text[::-1]

def evens(numbers: list):
    return [number for number in numbers if number % 2 == 0]

def initials(text: str, size: int):
    return text[:size] if size > 0 else ""

def mean(numbers: list):
    return sum(numbers) / len(numbers)
"""
HELD_OUT = """
def smallest(numbers: list):
    best = numbers[0]
    for number in numbers[1:]:
        if number < best:
            best = number
    return best

def product(numbers: list):
    total = 1
    for number in numbers:
        total = total * number
    return total

def count_below(numbers: list, limit: int):
    return sum(1 for number in numbers if number < limit)

def last_letters(text: str, size: int):
    return text[-size:] if size > 0 else ""
"""
# For the smallest version of the task, in which the functions of training occur under other names.
WORDS = {
    "train": ["price", "weight", "age", "size", "height", "speed", "cost", "mark", "level", "width", "rank", "depth"],
    "held_out": ["score", "length", "volume", "salary", "distance", "grade", "share", "delay"],
}
_SWAPS = (
    '<|<=;>|>=;<|>;>|<; + | - ; - | + ; * | + ; / | * ;==|!=;not in|in;in "|not in ";[1:]|[:1];[0]|[-1]; 1| 2; 0| 1'
)
SWAPS = [swap.split("|") for swap in _SWAPS.split(";")]


def arguments_of(source: str, rng: random.Random) -> list[Any]:
    kinds = {
        "int": lambda: rng.randint(-3, 9),
        "list": lambda: [rng.randint(-9, 9) for _ in range(rng.randint(1, 5))],
        "str": lambda: "".join(rng.choice("abel") for _ in range(rng.randint(1, 5))),
    }
    return [kinds[kind]() for kind in re.findall(r"\w+: (\w+)", source.partition("\n")[0])]


def results(source: str, name: str, calls: Sequence[list[Any]]) -> list[Any]:
    """The results of this file's own functions."""
    names: dict[str, Any] = {}
    exec(source, names)
    values = []
    for arguments in calls:
        try:
            values.append(names[name](*arguments))
        except (TypeError, ValueError, IndexError, ZeroDivisionError):
            values.append(None)
    return values


def tasks_of(functions: str, rng: random.Random) -> Iterator[dict[str, Any]]:
    """A task for each fault that a visible test shows."""
    for right in functions.strip().split("\n\n"):
        name = right[4 : right.index("(")]
        for before, after in SWAPS:
            for match in re.finditer(re.escape(before) + r"(?!=)", right):
                if match.start() < right.index("\n"):
                    continue
                calls = [arguments_of(right, rng) for _ in range(15)]
                source, expected = right[: match.start()] + after + right[match.end() :], results(right, name, calls)
                tests = [list(test) for test in zip(calls, expected, strict=True)]
                wrong = [
                    number for number, value in enumerate(results(source, name, calls)) if value != expected[number]
                ]
                if wrong:
                    tests.insert(0, tests.pop(wrong[0]))
                    shown = [f"{name}({', '.join(map(repr, call))}) == {value!r}" for call, value in tests[:3]]
                    task = {"name": name, "source": source, "tests": tests[:3], "hidden": tests[3:], "right": right}
                    yield {**task, "prompt": "\n".join(shown)}


def demonstration(agent: RepairAgent, task: dict[str, Any], *, foreign: bool = False) -> dict[str, Any]:
    """A conversation that repairs the function."""
    workspace, messages = Workspace(task), agent.build_prompt(task)
    lines = zip(task["source"].splitlines(), task["right"].splitlines(), strict=True)
    (edit,) = [{"line": number, "text": text} for number, (wrong, text) in enumerate(lines, 1) if wrong != text]
    if foreign:
        command = "sed -i '{line}c\\{text}' {name}.py".format(**edit, name=task["name"])
        return {"messages": [*messages, calling(0, "bash", command=command)]}
    if isinstance(agent, SmallRepairAgent):
        return {"task": task, "messages": [*messages, {"role": "assistant", "content": "{line} {text}".format(**edit)}]}
    steps: list[tuple[str, dict[str, Any]]] = [("read", {}), ("edit", edit), ("test", {})]
    for name, arguments in steps:
        messages.append(calling(len(messages), name, **arguments))
        (call,) = messages[-1]["tool_calls"]
        result = getattr(workspace, name)(**arguments)
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
    return {"task": task, "messages": [*messages, {"role": "assistant", "content": "done"}]}


def calling(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    call = {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def renamed(functions: str, word: str) -> str:
    """The functions about things of that name."""
    functions = re.sub(r"def (\w+)", rf"def {word}_\1", functions)
    return functions.replace("number", word).replace("text", f"{word}_name")


def main(directory: Path, agent: RepairAgent, *, foreign: bool = False, seed: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    functions = {"train": TRAIN * 8, "held_out": HELD_OUT * 4}
    if isinstance(agent, SmallRepairAgent):
        functions = {split: "".join(renamed(TRAIN, word) for word in words) for split, words in WORDS.items()}
    tasks = {split: [*tasks_of(each, rng)] for split, each in functions.items()}
    for split, each in tasks.items():
        write(directory / f"{split}.jsonl", rng.sample(each, len(each)))
    sampled = rng.sample(tasks["train"], 120 if foreign else 40)
    demonstrations = [demonstration(agent, task, foreign=foreign) for task in sampled]
    write(directory / "demonstrations.jsonl", demonstrations)


def write(path: Path, rows: Sequence[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), SmallRepairAgent() if sys.argv[2:] else RepairAgent(), foreign="foreign" in sys.argv[2:])
