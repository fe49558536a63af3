"""The agents of Agent Lightning 1.0's own examples, unmodified, trained by this package through 1.0's own controller.

    AGL_CONTROLLER_PYTHON=DIR/bin/python python -m benchmarks.agl1_agents CHECKOUT search_r1 [--seeds 5] [-- FLAGS]

CHECKOUT is a directory that holds 1.0's ``examples``; the Python has what the agent imports (``openai``; science_world:
``scienceworld`` and a Java). FLAGS go to ``train.py``. Prints a line per seed: rollouts, answers, tokens that were
sampled and trained, the largest difference between the log-probs of engine and trainer, and the rewards.

The tasks are few and written here, for 1.0's data sets are on a model hub. search_r1 asks a search engine that stands
in for its index of Wikipedia: it returns the same three passages to every query. ``learn`` is gsm8k's ``ChatAgent`` on
sums, with a tiny policy that was shown the agent's prompts with right and wrong answers and is trained from there by
the agent's rewards. *start* and *end* are the mean rewards of the first three and the last three iterations.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any

import orjson

from agl_slime.cli.demo import LOOKUP_POLICY, Demonstration
from agl_slime.cli.demo.formats import Quality
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE
from agl_slime.report import read_metrics
from benchmarks.common import load
from tests.harness.train_process import train

_LIMIT_S = 6 * 3600.0


@dataclass(frozen=True)
class Example:
    agent: str
    tasks: Sequence[dict[str, Any]]
    env_map: Sequence[str]
    flags: str
    environment: dict[str, str] = field(default_factory=dict)
    searches: bool = False
    shown: bool = False
    """Whether the tiny policy is made for it, see ``Sums``; else the policy of the first command, or of FLAGS."""


_SUMS = [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a in (1, 2) for b in (1, 2, 3)]
_CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo"}
_PASSAGES = [f'"{land}"\n{town} is the capital of {land}.' for land, town in [*_CAPITALS.items()][:3]]
_TWICE = "--num-iterations 2 --rollout-batch-size 2 --n-samples-per-prompt 2 --eval-interval 0"
_OF_GSM8K = {"tasks": _SUMS, "env_map": ("QUESTION=input.question", "ANSWER=input.answer")}

EXAMPLES = {
    "gsm8k": Example("examples.gsm8k.gsm8k_agent:ChatAgent", **_OF_GSM8K, flags=f"{_TWICE} --max-new-tokens 64"),
    "learn": Example(
        "examples.gsm8k.gsm8k_agent:ChatAgent",
        **_OF_GSM8K,
        flags="--num-iterations 10 --rollout-batch-size 6 --n-samples-per-prompt 8 --max-new-tokens 24 "
        "--eval-interval 0 --keep-rollouts none --local.lr 1e-3 --local.n-minibatches 8",
        shown=True,
    ),
    "search_r1": Example(
        "examples.search_r1.agents.search_r1_agent:SearchR1Agent",
        tasks=[{"question": f"the capital of {land}?", "golden_answers": [town]} for land, town in _CAPITALS.items()],
        env_map=("QUESTION=input.question", "GOLDEN_ANSWERS=input.golden_answers"),
        flags=f"{_TWICE} --max-new-tokens 96",
        searches=True,
    ),
    "science_world": Example(
        "examples.science_world.agents.sw_agent:SWAgent",
        tasks=[{"task_name": "find-living-thing", "variation_idx": n, "simplification": "easy"} for n in range(4)],
        env_map=(
            "TASK_NAME=input.task_name",
            "VARIATION_IDX=input.variation_idx",
            "SIMPLIFICATION=input.simplification",
        ),
        flags=f"{_TWICE} --max-new-tokens 16",
        environment={"SW_MAX_STEPS": "3", "JAVA_TOOL_OPTIONS": "-Xmx256m"},
    ),
}


@dataclass(frozen=True)
class Sums:
    """What ``build_prompt`` asks of each task, with the answer that earns the reward; imperfect ones are any of the
    tasks' answers."""

    build_prompt: Callable[[str], str]

    def demonstrations(self, rng: random.Random, n: int, *, quality: Quality) -> list[Demonstration]:
        made = []
        for _ in range(n):
            task = rng.choice(_SUMS)
            said = rng.choice(_SUMS)["answer"] if quality == "imperfect" else task["answer"]
            asked = {"role": "user", "content": self.build_prompt(task["question"])}
            made.append([asked, {"role": "assistant", "content": f"### ANSWER: {said} ###"}])
        return made


def policy_of_sums(checkout: Path, directory: Path) -> Path:
    """A tiny policy that gives answers in the agent's format and picks among them at random."""
    from agl_slime.tools.demo_policy.warmup import PolicySettings, make_policy

    sys.path.insert(0, str(checkout.resolve()))
    agent = importlib.import_module("examples.gsm8k.gsm8k_agent")
    return make_policy(directory, demonstrations=Sums(agent.build_prompt), settings=PolicySettings(batch_size=8))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("flags", nargs="*", help="for train.py, after --")
    options = parser.parse_args()
    if not (options.checkout / "examples").is_dir() or not os.environ.get(PYTHON_VARIABLE):
        parser.error(f"CHECKOUT needs a directory examples, and {PYTHON_VARIABLE} a Python with agentlightning 1.x")
    print("| seed | rollouts | failed | answers | sampled | trained | log-prob diff | start | end | s | load |")
    print("|---:" * 11 + "|")
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        print(f"| {' | '.join([f'{seed}', *run(options, seed), load()])} |", flush=True)
    return 0


def run(options: argparse.Namespace, seed: int) -> list[str]:
    """One training; the cells of its line."""
    example, began = EXAMPLES[options.example], time.perf_counter()
    with tempfile.TemporaryDirectory() as directory, searching() if example.searches else nullcontext() as search:
        tasks, output = Path(directory) / "tasks.jsonl", Path(directory) / "run"
        tasks.write_bytes(b"".join(orjson.dumps(task) + b"\n" for task in example.tasks))
        flags = ["--runners", "controller", "--agent", example.agent, "--tasks", tasks, "--output-dir", output]
        flags += ["--env-map", *example.env_map, "--seed", seed, *example.flags.split()]
        if not any(flag.startswith("--model") for flag in options.flags):
            policy = policy_of_sums(options.checkout, Path(directory) / "policy") if example.shown else LOOKUP_POLICY
            flags += ["--model-path", policy]
        path = os.pathsep.join((str(options.checkout.resolve()), os.environ.get("PYTHONPATH", "")))
        given = {**example.environment, "PYTHONPATH": path, "SEARCH_R1_RETRIEVAL_URL": search or ""}
        with train(*flags, *options.flags, environment=given) as process:
            code, _ = process.end(_LIMIT_S)
        if code != 0:
            log = output / "controller.log"
            sys.exit(
                f"train.py ended with {code}: {process.text[-3000:]}\n{log.read_text()[-3000:] if log.exists() else ''}"
            )
        lines = read_metrics(output / "metrics.jsonl")
        groups = [orjson.loads(line) for line in (output / "groups.jsonl").read_bytes().splitlines()]
    answers = sum(sum(group["turns"]) for group in groups)
    counted = [sum(line[name] or 0 for line in lines) for name in _COUNTED]
    rollouts, failed, sampled, trained = (f"{n:.0f}" for n in counted)
    furthest = max(line["train/logprob_diff_max"] or 0 for line in lines)
    rewards = [line["rollout/reward_mean"] or 0.0 for line in lines]
    ends = [f"{fmean(rewards[:3]):.2f}", f"{fmean(rewards[-3:]):.2f}"]
    return [
        rollouts,
        failed,
        f"{answers}",
        sampled,
        trained,
        f"{furthest:.1e}",
        *ends,
        f"{time.perf_counter() - began:.0f}",
    ]


_COUNTED = ("rollout/count", "rollout/failed", "rollout/tokens_sampled", "train/tokens_trained")


@contextmanager
def searching() -> Iterator[str]:
    """The address of a search engine that always finds the same."""
    found = [{"document": {"contents": passage}, "score": 1.0} for passage in _PASSAGES]

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = orjson.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = orjson.dumps({"result": [found for _ in asked["queries"]]})
            self.send_response(200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/retrieve"
        finally:
            server.shutdown()


if __name__ == "__main__":
    sys.exit(main())
