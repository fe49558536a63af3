"""Batched rollouts with tools: 16 trajectories, one sampling call per turn for all live ones.

    python examples/multi_turn.py                                           # a tiny policy on an embedded engine
    python examples/multi_turn.py --url http://127.0.0.1:30000 --model DIR  # a running SGLang and its checkpoint

Prints one trajectory with its trained tokens marked, and a summary of all.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from agl_slime.agent.tools import ToolManager
from agl_slime.buffer.batched.multi_turn import IGNORED_LABEL, MultiTurnRollout, SGLangSampler, trajectory_to_samples
from agl_slime.cli.demo.formats import LookupDemonstrations
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.tokens.loading import load_tokenizer

DEMONSTRATIONS = LookupDemonstrations()


class LookupTable:
    """The table of one task; a class, since each rollout needs its own."""

    schema = {
        "name": DEMONSTRATIONS.tool_name,
        "description": "Look up what is stored under a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    }

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task

    def __call__(self, key: str) -> str:
        return DEMONSTRATIONS.observation(self._task, key)


@contextmanager
def an_engine(url: str | None, model: Path | None) -> Iterator[tuple[str, Path]]:
    """``url`` and ``model``, or a tiny policy on an embedded engine."""
    if url is not None and model is not None:
        yield url, model
        return
    from agl_slime.cli.demo import LOOKUP_POLICY
    from agl_slime.engine import EmbeddedEngine

    with EmbeddedEngine(LOOKUP_POLICY) as engine:
        yield engine.url, LOOKUP_POLICY


def marked(trajectory: dict[str, Any], tokenizer: Any) -> str:
    """The text of a trajectory with its trained tokens in green."""
    pieces: list[tuple[bool, list[int]]] = []
    for token, label in zip(trajectory["input_ids"], trajectory["labels"], strict=True):
        trained = label != IGNORED_LABEL
        if not pieces or pieces[-1][0] != trained:
            pieces.append((trained, []))
        pieces[-1][1].append(token)
    texts = [(trained, tokenizer.decode(ids).replace("[", "\\[")) for trained, ids in pieces]
    return "".join(f"[green]{text}[/green]" if trained else text for trained, text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running SGLang server")
    parser.add_argument("--model", type=Path, help="the checkpoint that it serves")
    options = parser.parse_args()
    if (options.url is None) != (options.model is None):
        parser.error("--url and --model go together")
    console = Console()
    rng = random.Random(0)
    with an_engine(options.url, options.model) as (url, model):
        tokenizer = load_tokenizer(model)
        tasks = [DEMONSTRATIONS.make_task(rng) for _ in range(16)]
        rollout = MultiTurnRollout(
            sampler=SGLangSampler(base_url=url, tokenizer=tokenizer),
            template=tokenizer,
            tool_manager=lambda trajectory: ToolManager([LookupTable], task=trajectory["task"]),
            sampling_params=SamplingParams(temperature=1.0, max_new_tokens=48),
            max_turns=3,
        )
        # the system message explains calls to the policy, so the schemas are left out of the prompt
        results = rollout([{"messages": DEMONSTRATIONS.prompt(task), "task": task, "tools": []} for task in tasks])
    for trajectory in results:
        trajectory["reward"] = float(
            DEMONSTRATIONS.is_correct(trajectory["task"], trajectory["messages"][-1]["content"])
        )
    console.print(marked(max(results, key=lambda trajectory: (trajectory["reward"], trajectory["turns"])), tokenizer))
    samples = [
        sample
        for trajectory in results
        for sample in trajectory_to_samples(trajectory, reward=trajectory["reward"], tokenizer=tokenizer)
    ]
    ends = dict(Counter(trajectory["end_reason"] for trajectory in results))
    calls = sum(trajectory["tools_called"]["calls"].get("lookup", 0) for trajectory in results)
    reward = sum(trajectory["reward"] for trajectory in results) / len(results)
    console.print(
        f"{len(results)} trajectories, {len(samples)} Samples, {calls} calls, reward {reward:.2f}, ends {ends}"
    )


if __name__ == "__main__":
    main()
