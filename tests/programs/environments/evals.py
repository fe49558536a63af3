"""verifiers' own `vf-eval` with a scripted model, and its episodes: a list of [name, arguments, tasks] as JSON on
standard input, and a directory of packages as argument. `reply` is the model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.programs.environments import tiny
from tests.programs.environments.model import print_result, serving

MARK = "<|im_start|>"


def reply(conversation: str) -> str:
    """Right, wrong, in another form than the prompt's, malformed, or nothing, by the figures of the last question."""
    last = conversation.rsplit(f"{MARK}user\n", 1)[1].split("<|im_end|>")[0]
    kind = sum(map(int, re.findall(r"\d", last))) % 5
    if "role-playing a USER" in conversation:
        asks = re.search(r"What is \d+ \+ 1\?", conversation)
        assert asks is not None
        return asks.group() if "How can I help" in last else "###DONE###"
    if sums := re.search(r"problem: ([\d +-]+) =", last):
        right = str(sum(int(part.replace(" ", "")) for part in re.findall(r"[+-]? ?\d+", sums.group(1))))
    elif primes := re.search(r"[Ff]actor\D*(\d+)", last):
        right = " × ".join(map(str, _factors(int(primes.group(1)))))
    elif cells := re.findall(r"\[(\d)\]", last):
        return "I pass" if kind == 3 else f"I take [{cells[-1]}]"
    else:
        return tiny.answer(last)
    wrong = ["<answer>[[{'</answer>", "<answer>17 oranges</answer>", "", f"It is {right}"]
    return [f"So <answer>{right}</answer>", *wrong][kind]


def _factors(number: int) -> list[int]:
    for factor in range(2, number):
        if number % factor == 0:
            return [factor, *_factors(number // factor)]
    return [number]


def conversation(body: dict[str, Any]) -> str:
    """The request in the template of the tests' tokenizer."""
    return "".join(f"{MARK}{m['role']}\n{m['content']}<|im_end|>\n" for m in body["messages"])


async def evaluate(address: str, arguments: list[str], tasks: int) -> list[dict[str, Any]]:
    ours = arguments[0].startswith("agl_")
    program = ["-m", "agl_slime.environments.tasksets"] if ours else [str(Path(sys.executable).with_name("vf-eval"))]
    with tempfile.TemporaryDirectory() as out:
        model = ["-m", "scripted", "--client.base-url", address, "--client.api-key-var", "SCRIPTED_KEY"]
        output = ["--no-push", "--no-rich", "-o", out, "--run.name", "run"]
        command = [sys.executable, *program, *arguments, "-n", str(tasks), *model, *output]
        process = await asyncio.create_subprocess_exec(*command, stdout=sys.stderr)
        assert await process.wait() == 0, command
        return [json.loads(line) for line in (Path(out) / "run" / "traces.jsonl").read_text().splitlines()]


async def run(cases: list[Any]) -> dict[str, Any]:
    os.environ |= {"SCRIPTED_KEY": "none", "PYTHONPATH": os.pathsep.join((os.environ["PYTHONPATH"], sys.argv[1]))}
    async with serving(lambda body: reply(conversation(body))) as (address, _):
        return {name: await evaluate(address, arguments, tasks) for name, arguments, tasks in cases}


if __name__ == "__main__":
    print_result(run, json.load(sys.stdin))
