"""Directories of runs as the package writes them, made without a model."""

import base64
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.events import BatchTrained, GroupsCollected, IterationFinished, RunFinished
from agl_slime.report.files import RunDir, open_run_dir, write_alive
from agl_slime.report.metrics import MetricsWriter
from agl_slime.report.rollouts import RolloutWriter
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.turn import Trajectory, Turn
from agl_slime.types import Sample

HOSTILE = '<img src=x onerror="document.title=\'hacked\'"></script><script>document.title="hacked"</script>\u2028'
EMOJI = "🦦" * 262_144  # a megabyte as UTF-8
TOKENIZER = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))


def floats(text: str) -> np.ndarray:
    """Log-probs or advantages of a kept rollout."""
    return np.frombuffer(base64.b64decode(text), "<f4")


def a_turn(prompt: str, answer: str, messages: Sequence[dict[str, Any]], **fields: Any) -> Turn:
    return Turn(
        prompt_ids=list(map(ord, prompt)), response_ids=list(map(ord, answer)), text=answer, messages=tuple(messages),
        latency_s=0.5, **fields,
    )  # fmt: skip


def a_sample(rollout_id: str, prompt: str, pieces: Sequence[tuple[str, int]], version: int, **metadata: Any) -> Sample:
    """A Sample of pieces, each a text and its mask; the next weight version samples the second half."""
    response = "".join(text for text, _ in pieces)
    mask = [bit for text, bit in pieces for _ in text]
    half = len(response) // 2
    spans = [[str(version), 0, half], [str(version + 1), half, len(response)]]
    return Sample(
        tokens=list(map(ord, prompt + response)),
        response_length=len(response),
        loss_mask=mask,
        rollout_log_probs=[-0.3 * bit for bit in mask],
        status=Sample.Status.COMPLETED,
        weight_versions=[str(version), str(version + 1)],
        metadata={"agl_rollout_id": rollout_id, "weight_spans": spans, "source_name": "maths", "segment": 0} | metadata,
    )


def a_member(number: int, iteration: int, *, tool_result: str = "42", group: str = "g") -> MemberResult:
    """Every fifth rollout failed, every third forks."""
    rollout_id = f"ro-{iteration}-{number}"
    messages = [{"role": "system", "content": "Use the tool."}, {"role": "user", "content": f"What is {number}?"}]
    timeline = {"enqueued": 1.7e9, "started": 0.1, "ended": 2.0, "calls": [[0.2, 0.9], [1.2, 1.9]]}
    fields: dict[str, Any] = {"rollout_id": rollout_id, "group_id": group, "task": {"n": number}, "timeline": timeline}
    if number % 5 == 4:
        return MemberResult(failure="timeout", failure_message="took longer than 600 s", **fields)
    first = a_turn("ask", "call", messages)
    call = {"function": {"name": "lookup", "arguments": "{}"}}
    tool = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tool.append({"role": "tool", "name": "lookup", "content": tool_result})
    second = a_turn("askcalltool", "done", tool, base_turn=0, kept_tokens=7)
    turns, samples = [first, second], [a_sample(rollout_id, "ask", [("call", 1), ("tool", 0), ("done", 1)], iteration)]
    if number % 3 == 2:
        turns.append(a_turn("asc", "again", messages, base_turn=0, kept_tokens=2, fork=ForkReason.EDITED_HISTORY))
        samples.append(a_sample(rollout_id, "asc", [("again", 1)], iteration, segment=1, fork_reason="edited_history"))
    talk = Trajectory(rollout_id=rollout_id, attempt_id="a", task=None, turns=tuple(turns), stop_reason="stop")
    reward = float(number % 2)
    return MemberResult(
        samples=tuple(samples), reward=reward, rewards={"primary": reward, "style": 0.5}, sampled_tokens=8, turns=2,
        trajectory=talk, instance_id=str(number // 4), **fields,
    )  # fmt: skip


class AWriter:
    """Writes a run, an iteration at a time: two trained groups and a dropped one."""

    def __init__(self, path: Path) -> None:
        self.run: RunDir = open_run_dir(path, agent="tests:Agent", settings={"num_iterations": 9}, overwrite=True)
        self._rollouts = RolloutWriter(self.run, keep="all")
        self._rollouts.tokenizer = TOKENIZER
        self._metrics = MetricsWriter(self.run.metrics, warn=lambda *_: None)
        write_alive(self.run)

    def iteration(self, iteration: int, *, tool_result: str = "42", **more: float) -> None:
        rng = random.Random(iteration)
        groups, samples = [], []
        for number in range(3):
            members = tuple(
                a_member(4 * number + i, iteration, tool_result=tool_result, group=f"g{number}") for i in range(4)
            )
            dropped = number == 2
            result = GroupResult(
                group_id=f"{iteration}-{number}", mode="train", size=4, members=members, ready=not dropped,
                code="zero_variance" if dropped else "", reason="all rewards are the same" if dropped else "",
            )  # fmt: skip
            groups.append(result)
            samples += [] if dropped else [sample for member in result.succeeded for sample in member.samples]
        n = [sum(sample.loss_mask or ()) for sample in samples]
        scores = [np.array([-0.3 + rng.gauss(0, 0.01) for _ in range(k)], "f4") for k in n]
        self._rollouts.handle(GroupsCollected(iteration=iteration, groups=groups))
        batch = BatchTrained(
            iteration=iteration, samples=samples, log_probs=scores, advantages=[np.full(k, 0.5, "f4") for k in n]
        )
        self._rollouts.handle(batch)
        metrics = {
            **more,
            "rollout/reward_mean": 0.1 * iteration,
            "train/entropy": 1 / iteration,
            "perf/collect_s": 2.0,
        }
        event = IterationFinished(iteration=iteration, metrics=metrics)
        self._metrics.handle(event)
        self._rollouts.handle(event)

    def finish(self, reason: str = "finished") -> None:
        self._rollouts.handle(RunFinished(reason=reason))
        self._rollouts.close()
        self._metrics.close()
        self.run.alive.unlink()
        self.run.summary.write_text(f'{{"reason": "{reason}"}}\n')


def write_run(path: Path, *, iterations: int = 3, tool_result: str = "42") -> Path:
    writer = AWriter(path)
    for iteration in range(1, iterations + 1):
        writer.iteration(iteration, tool_result=tool_result)
    writer.finish()
    return path
