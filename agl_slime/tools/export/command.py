"""``agl-slime export``: kept rollouts of a run as training data: conversations, preference pairs, tokens."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import tyro

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.report.files import RunDir, dump, iter_jsonl
from agl_slime.support.files import unwritable_as_error, whole_directory, whole_file
from agl_slime.support.flags import parse_flags
from agl_slime.support.terminal import print_line
from agl_slime.tools.audit.figures import recompute_digest
from agl_slime.tools.kept_rollouts import kept_rollouts, read_tokens

Format = Literal["sft", "dpo", "messages", "parquet", "hf-dataset"]
Messages = Sequence[Mapping[str, Any]]


def main(arguments: Sequence[str]) -> None:
    path, n = parse_flags(export_run, prog="agl-slime export", arguments=arguments)
    print_line(f"{path}: {n} rows")


def export_run(
    run_dir: tyro.conf.Positional[Path],
    to: Format,
    output: Path | None = None,
    best: int = 1,
    min_reward: float | None = None,
    min_gap: float = 0.0,
) -> tuple[Path, int]:
    """Write a run's kept rollouts (train with --keep-rollouts all) as data for other trainers.

    Args:
        run_dir: The directory of a run.
        to: sft (conversations of the best), dpo (pairs of the best and the worst), messages (all), parquet or
            hf-dataset (all, with tokens, loss mask and log-probs).
        output: The file or directory to write; export-FORMAT in the directory of the run by default.
        best: For sft, the number of rollouts of each group.
        min_reward: Least reward for sft, and of the chosen side of a dpo pair.
        min_gap: For dpo, the rewards of a pair differ by more than this.
    """
    if best < 1:
        raise ConfigError(f"--best {best}: must be at least 1")
    rollouts = list(kept_rollouts(run_dir))
    rows: list[dict[str, Any]]
    if to == "sft":
        rewards = {str(line.get("group_id")): line.get("rewards") or () for line in iter_jsonl(RunDir(run_dir).groups)}
        rows = list(sft_rows(rollouts, best=best, min_reward=min_reward, rewards=rewards))
    elif to == "dpo":
        rows = list(dpo_rows(rollouts, min_reward=min_reward, min_gap=min_gap))
    elif to == "messages":
        rows = [{"messages": list(each["messages"]), **_about(each)} for each in rollouts if each["messages"]]
    else:
        try:
            rows = [row for rollout in rollouts for row in token_rows(rollout)]
        except ValueError as error:
            fix = "`agl-slime audit` finds all that is damaged"
            raise ConfigError(f"{RunDir(run_dir).rollouts}: {error}; {fix}") from error
    if not rows:
        fix = "train with --keep-rollouts all to keep whole groups" if to in ("sft", "dpo") else "it kept none"
        raise ConfigError(f"{run_dir}: of {len(rollouts)} kept rollouts none makes a row of {to}; {fix}")
    suffix = {"parquet": ".parquet", "hf-dataset": ""}.get(to, ".jsonl")
    target = output or run_dir / f"export-{to}{suffix}"
    with unwritable_as_error("--output", target):
        if to in ("parquet", "hf-dataset"):
            _write_table(target, rows, to)
        else:
            with whole_file(target) as file:
                file.writelines(map(dump, rows))
    return target, len(rows)


def sft_rows(
    rollouts: Sequence[Mapping[str, Any]],
    *,
    best: int,
    min_reward: float | None,
    rewards: Mapping[str, Sequence[float | None]],
) -> Iterator[dict[str, Any]]:
    """The ``best`` of each group by reward, from ``min_reward`` on, as TRL's SFTTrainer reads conversations.
    ``rewards`` belong to whole groups, of which only some rollouts may be kept."""
    for group in _groups(rollouts):
        of_group = [reward for reward in rewards.get(str(group[0]["group_id"]), ()) if reward is not None]
        least = min(sorted(of_group, reverse=True)[:best], default=-math.inf)
        for rollout in sorted(group, key=lambda each: -each["reward"])[:best]:
            if rollout["reward"] >= max(least, -math.inf if min_reward is None else min_reward):
                yield {"messages": list(rollout["messages"])}


def dpo_rows(
    rollouts: Sequence[Mapping[str, Any]], *, min_reward: float | None, min_gap: float
) -> Iterator[dict[str, Any]]:
    """The best and the worst of each group with different rewards, as TRL's DPOTrainer reads pairs: ``prompt`` is their
    common prefix up to the first answer that differs."""
    for group in _groups(rollouts):
        better, worse = max(group, key=lambda each: each["reward"]), min(group, key=lambda each: each["reward"])
        gap = better["reward"] - worse["reward"]
        if gap <= max(0.0, min_gap) or (min_reward is not None and better["reward"] < min_reward):
            continue
        chosen, rejected = list(better["messages"]), list(worse["messages"])
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))))
        answers = [index for index in range(same + 1) if _answers(chosen, index) and _answers(rejected, index)]
        if answers:  # else one conversation is a prefix of the other: there is no choice
            start = answers[-1]
            yield {"prompt": chosen[:start], "chosen": chosen[start:], "rejected": rejected[start:]}


def token_rows(rollout: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row per Sample: ``input_ids`` with ``prompt_length``, and ``loss_mask`` and ``log_probs`` of the response (NaN
    where the engine sampled nothing). Raises ``ValueError`` for columns that do not fit each other."""
    for number, sample in enumerate(rollout["samples"], 1):
        try:
            recompute_digest(sample)
        except (KeyError, ValueError) as error:
            why = f"lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"Sample {number} of rollout {rollout.get('rollout_id')} {why}") from error
        tokens = read_tokens(sample)
        yield {
            "messages": json.dumps(rollout["messages"]),  # contents may be texts or lists, which a column may not mix
            **_about(rollout),
            "segment": sample["segment"],
            "prompt_length": tokens.prompt_length,
            "input_ids": tokens.ids.tolist(),
            "loss_mask": tokens.mask.astype(int).tolist(),
            "log_probs": tokens.engine.tolist(),
            "token_source": sample["token_source"],
            "tokens_left_out": sample["left_out"],
        }


def _about(rollout: Mapping[str, Any]) -> dict[str, Any]:
    names = ("rollout_id", "group_id", "iteration", "reward", "outcome", "reason", "stop_reason")
    return {**{name: rollout.get(name) for name in names}, "task": json.dumps(rollout.get("task"))}


def _groups(rollouts: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rollouts with a conversation and a reward, by group."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for rollout in rollouts:
        if rollout["messages"] and isinstance(rollout.get("reward"), (int, float)):
            groups.setdefault(str(rollout.get("group_id")), []).append(rollout)
    return list(groups.values())


def _answers(messages: Messages, index: int) -> bool:
    return 0 < index < len(messages) and messages[index].get("role") == "assistant"


def _write_table(target: Path, rows: list[dict[str, Any]], to: Format) -> None:
    try:
        if to == "parquet":
            import pyarrow
            import pyarrow.parquet

            with whole_file(target) as file:
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
            return
        import datasets
    except ImportError as error:
        needed = "pyarrow" if to == "parquet" else "datasets"
        raise MissingDependencyError(f"--to {to} needs {needed}: pip install {needed}") from error
    with whole_directory(target) as fresh:
        datasets.Dataset.from_list(rows).save_to_disk(str(fresh))
