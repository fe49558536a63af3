"""``groups.jsonl``, a line per group with its rollouts' outcomes, and ``rollouts.jsonl``, a line per kept rollout:
conversation, timeline, forks, and each token with the log-probs of engine and trainer and its advantage.

JSON lines, not Parquet: written lines survive a kill, and pandas, polars and ``datasets`` read them without a further
library. docs/report.md has a table of the fields.
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agl_slime import events
from agl_slime.data.credit import mask_of, runs_of
from agl_slime.data.results import reward_of, rollout_of
from agl_slime.errors import TraceError
from agl_slime.report.alarms import find_step_alarms
from agl_slime.report.files import IterationFile, RunDir, iter_jsonl, jsonable, size_of

if TYPE_CHECKING:
    from agl_slime.loop.trainer import TokenScores
    from agl_slime.types import Sample


Keep = Literal["all", "sampled", "none"]
MOST_TOKENS = 65_536  # of one Sample; the rest of a longer one is left out
MOST_MESSAGES, MOST_SAMPLES = 200, 8  # of a kept rollout
_MAX_PENDING = 16  # iterations after which a ready group is written although no trainer reported it


@dataclass
class _Group:
    """A finalized group until its outcome is known: its line, and its kept rollouts with their labels."""

    line: dict[str, Any]
    members: dict[str, tuple[Any, str]]
    trained: set[str] = field(default_factory=set)
    scores: dict[tuple[str, int], tuple[Any, Any]] = field(default_factory=dict)


class RolloutWriter:
    """Writes both files as iterations end. Groups are always written; rollouts are kept once ``tokenizer`` is set.

    A line has the ``iteration`` of the rollout's outcome, and as ``collected`` the iteration that sampled it.

    Args:
        keep: ``all`` rollouts, ``none``, or ``sampled`` ones: the best, the worst, a random and a failed one of each
            iteration (``choose_rollouts``), at most ``most_bytes`` in all (``SizeBudget``).
        warn: receives the text and the key of each alarm of an iteration.
    """

    note = "no rollout was kept"

    def __init__(
        self,
        run: RunDir,
        *,
        keep: Keep = "sampled",
        most_bytes: int = 256 * 2**20,
        seed: int = 0,
        warn: Callable[[str, str], None] = lambda text, key: None,
    ) -> None:
        self.path = run.rollouts
        self.tokenizer: Any = None
        self._keep, self._seed, self._warn = keep, seed, warn
        self._best = -math.inf
        self._pieces: Pieces | None = None
        self._groups_file, self._file = IterationFile(run.groups), IterationFile(run.rollouts)
        self._budget = SizeBudget(most_bytes - (run.rollouts.stat().st_size if run.rollouts.exists() else 0))
        self._environment = run.environment
        self._pending: dict[str, _Group] = {}
        self._group_of: dict[str, _Group] = {}
        self._last_iteration = 0

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.GroupsCollected):
            self._warn_of_alarms(self._collected(event.iteration, event.groups))
        elif isinstance(event, events.RunStarted):
            self._last_iteration = event.iteration
            if self._groups_file.path.exists():  # the run is resumed
                self._best = max(map(_best, iter_jsonl(self._groups_file.path)), default=self._best)
        elif isinstance(event, events.GroupsRestored):
            written = self._written_until(event.iteration)
            unwritten = [group for group in event.groups if written.isdisjoint(_ids(group))]
            self._collected(event.iteration, unwritten, restored=True)
        elif isinstance(event, events.BatchTrained):
            self._trained(event)
        elif isinstance(event, events.IterationFinished):
            self._last_iteration = event.iteration
            self._write(event.iteration, [group for group in self._pending.values() if self._has_outcome(group)])
        elif isinstance(event, events.RunFinished) and self._pending:  # of an unfinished iteration
            self._write(self._last_iteration + 1, list(self._pending.values()))

    def close(self) -> None:
        self._groups_file.close()
        self._file.close()

    def _written_until(self, iteration: int) -> set[str]:
        """The rollouts whose groups were written before the restart."""
        lines = iter_jsonl(self._groups_file.path) if self._groups_file.path.exists() else ()
        earlier = (line.get("rollouts") or () for line in lines if line["iteration"] <= iteration)
        return {rollout_id for ids in earlier for rollout_id in ids}

    def _warn_of_alarms(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._best = max([self._best, *map(_best, lines)])
        for alarm in find_step_alarms(lines, best=self._best):
            self._warn(f"{alarm.text}; try {alarm.advice}", f"{alarm.kind}:{alarm.about}")

    def _collected(self, iteration: int, groups: Sequence[Any], **fields: Any) -> list[dict[str, Any]]:
        lines = [{**describe_group(group, collected=iteration), **fields} for group in groups]
        members = {member.rollout_id: member for group in groups for member in group.members}
        labels: dict[str, str] = {}
        if self.tokenizer is not None and self._keep == "all":
            labels = dict.fromkeys(members, "all")
        elif self.tokenizer is not None and self._keep == "sampled" and self._budget.allows(iteration):
            rewards = {rollout_id: member.reward for rollout_id, member in members.items()}
            labels = choose_rollouts(rewards, iteration=iteration, seed=self._seed)
        for result, line in zip(groups, lines, strict=True):
            ids = _ids(result)
            group = _Group(dict(line), {name: (members[name], labels[name]) for name in ids if name in labels})
            self._pending[result.group_id] = group
            self._group_of.update(dict.fromkeys(ids, group))
        return lines

    def _trained(self, event: events.BatchTrained) -> None:
        for number, sample in enumerate(event.samples):
            rollout_id = str(rollout_of(sample))
            if (group := self._group_of.get(rollout_id)) is not None:
                group.trained.add(rollout_id)
                if rollout_id in group.members and event.log_probs:
                    scores = event.log_probs[number], event.advantages[number]
                    group.scores[rollout_id, int(sample.metadata.get("segment", 0))] = scores

    def _has_outcome(self, group: _Group) -> bool:
        overdue = self._last_iteration - group.line["collected"] >= _MAX_PENDING
        return not group.line["ready"] or bool(group.trained) or overdue

    def _write(self, iteration: int, groups: Sequence[_Group]) -> None:
        kept_lines: dict[str, dict[str, Any]] = {}
        for group in groups:
            line = group.line
            del self._pending[line["group_id"]]
            outcomes = dict(zip(line["rollouts"], line["outcomes"], strict=True))
            outcomes |= dict.fromkeys(outcomes.keys() & group.trained, "trained")
            line["outcomes"] = list(outcomes.values())
            for rollout_id in outcomes:
                self._group_of.pop(rollout_id, None)
            for rollout_id, (member, label) in group.members.items():
                head = {"label": label, "outcome": outcomes[rollout_id]}
                trace = self._environment / f"{rollout_id}.json"
                if trace.is_file():
                    head["trace"] = f"{self._environment.name}/{trace.name}"
                kept_lines[rollout_id] = jsonable({**head, **self._describe(member, group)})
        records = list(kept_lines.values())
        if records and self._keep == "sampled" and not self._budget.take(size_of(iteration, records)):
            kept_lines, records = {}, []
        # rollouts first: after a kill between the two no group refers to a missing rollout
        if records:
            self._file.append(iteration, records)
        lines = [{**group.line, "kept": [name for name in group.members if name in kept_lines]} for group in groups]
        self._groups_file.append(iteration, lines)

    def _describe(self, member: Any, group: _Group) -> dict[str, Any]:
        if self._pieces is None:
            self._pieces = Pieces(self.tokenizer)

        def scores(sample: Sample, number: int) -> tuple[Any, Any] | None:
            return group.scores.get((member.rollout_id, int(sample.metadata.get("segment", number))))

        return describe_member(member, group.line, self._pieces, scores)


def describe_member(
    member: Any, line: Mapping[str, Any], pieces: Pieces, scores: Callable[[Sample, int], tuple[Any, Any] | None]
) -> dict[str, Any]:
    """A rollout as a line of ``rollouts.jsonl``, without label and outcome. ``line`` is its group's; ``scores(sample,
    number)`` returns the trainer's figures of a Sample (see ``describe_tokens``)."""
    conversation = member.conversation
    samples = [
        describe_tokens(sample, pieces, scores=scores(sample, number))
        for number, sample in enumerate(member.samples[:MOST_SAMPLES])
    ]
    return {
        "collected": line["collected"],
        "rollout_id": member.rollout_id,
        "group_id": line["group_id"],
        "instance_id": member.instance_id,
        "source": source_of(member),
        "reason": member.failure or ("" if line["ready"] else line["code"]),
        "message": member.failure_message or ("" if line["ready"] else line["reason"]),
        "reward": member.reward,
        "rewards": dict(member.rewards),
        "stop_reason": conversation.stop_reason,
        "tokens": member.sampled_tokens,
        "task": member.task,
        "messages": list(conversation.messages[:MOST_MESSAGES]),
        "tools": member.samples[0].metadata.get("tools") if member.samples else None,
        "timeline": member.timeline,
        "turns": list(conversation.turns[:MOST_MESSAGES]),
        "samples": samples,
        "left_out": {"samples": max(len(member.samples) - MOST_SAMPLES, 0)},
    }


def _best(line: Mapping[str, Any]) -> float:
    return max((reward for reward in line.get("rewards") or () if reward is not None), default=-math.inf)


def _ids(group: Any) -> list[str]:
    return [member.rollout_id for member in group.members]


def source_of(member: Any) -> str | None:
    metadata = member.samples[0].metadata if member.samples else getattr(member.request, "metadata", None) or {}
    return metadata.get("source_name")


def describe_group(result: Any, *, collected: int) -> dict[str, Any]:
    """A group as a line of ``groups.jsonl`` before training: its members as columns of equal length. ``outcomes`` are
    the ledger's words, and ``ready`` for a member to train on."""
    members = result.members
    answers = [tuple(map(_sampled_ids, member.samples)) for member in members if member.samples]
    outcome_if_ok = "ready" if result.ready else "filtered"
    versions = dict.fromkeys(version for member in members for s in member.samples for version in s.weight_versions)
    return {
        "collected": collected,
        "group_id": result.group_id,
        "instance_id": result.instance_id,
        "source": next((source for member in members if (source := source_of(member)) is not None), None),
        "ready": result.ready,
        "code": result.code,
        "reason": result.reason,
        "weight_versions": [str(version) for version in versions],
        "rollouts": [member.rollout_id for member in members],
        "rewards": [member.reward for member in members],
        "outcomes": [outcome_if_ok if member.ok else member.outcome_if_failed.value for member in members],
        "reasons": [member.failure or "" for member in members],
        "tokens": [member.sampled_tokens for member in members],
        "turns": [member.turns for member in members],
        "samples": [len(member.samples) for member in members],
        "sealed": [[digest_sample(sample) for sample in member.samples] for member in members],
        "truncated": sum(any(s.status.value == "truncated" for s in member.samples) for member in members),
        "alike": len(answers) > 1 and len(set(answers)) == 1,
        "tools": _tools_of(members),
    }


def digest_sample(sample: Sample) -> list[Any]:
    """The training data of a Sample for groups.jsonl and trained.jsonl: a digest of ids, loss mask and the engine's
    log-probs under it; the number of tokens under the mask, in all and by weight version."""
    mask, versions = mask_of(sample), Counter[str]()
    for version, start, end in (sample.metadata or {}).get("weight_spans") or ():
        versions[str(version)] += int(mask[start:end].sum())
    log_probs = np.asarray(sample.rollout_log_probs or (), dtype="<f4")
    columns = np.asarray(sample.tokens, dtype="<i4"), mask, log_probs[mask] if len(log_probs) else log_probs
    digest = hashlib.blake2b(b"".join(column.tobytes() for column in columns), digest_size=8).hexdigest()
    return [digest, int(mask.sum()), {version: n for version, n in versions.items() if n}]


def describe_batch(groups: Sequence[Sequence[Sample]], scores: TokenScores | None = None) -> list[dict[str, Any]]:
    """The groups of a batch as lines of ``trained.jsonl``: the task's number, the rollouts with their rewards, and each
    Sample's rollout and digest; with ``scores`` also a digest of the trainer's log-probs and advantages."""
    digests = None if scores is None else iter(map(_digest_of_scores, scores.log_probs, scores.advantages))
    lines = []
    for group in groups:
        line = {
            "instance_id": group[0].metadata.get("instance_id"),
            "rollouts": {str(rollout_of(sample)): reward_of(sample) for sample in group},
            "samples": [[str(rollout_of(sample)), *digest_sample(sample)] for sample in group],
        }
        lines.append(line if digests is None else {**line, "scores": [*islice(digests, len(group))]})
    return lines


def _digest_of_scores(*figures: Any) -> str:
    content = b"".join(np.asarray(values, dtype="<f4").tobytes() for values in figures)
    return hashlib.blake2b(content, digest_size=8).hexdigest() if content else ""


def _sampled_ids(sample: Sample) -> bytes:
    response = np.asarray(sample.tokens[len(sample.tokens) - sample.response_length :], dtype=np.int64)
    return (response if sample.loss_mask is None else response[np.asarray(sample.loss_mask, dtype=bool)]).tobytes()


def _tools_of(members: Iterable[Any]) -> dict[str, Any] | None:
    """The tool counts of a group: rollouts with the tool on offer, calls, malformed calls with an example, and failed
    calls with an error text by tool; ``None`` without tools."""
    records = [member.samples[0].metadata.get("tools") for member in members if member.samples]
    records = [record for record in records if isinstance(record, Mapping)]
    offered = Counter(name for record in records for name in record.get("offered", ()))
    calls = sum((Counter(record.get("calls", {})) for record in records), Counter())
    malformed = sum(int(record.get("malformed", 0)) for record in records)
    failed = sum((Counter(record.get("failed", {})) for record in records), Counter())
    failures = {name: text for record in reversed(records) for name, text in record.get("failures", {}).items()}
    details = {"failed": dict(failed), "failures": failures} if failed else {}
    details |= {"example": text} if (text := next((r["example"] for r in records if r.get("example")), "")) else {}
    return {"offered": dict(offered), "calls": dict(calls), "malformed": malformed, **details} if records else None


def describe_tokens(sample: Sample, pieces: Pieces, *, scores: tuple[Any, Any] | None = None) -> dict[str, Any]:
    """A Sample token by token. ``tokens`` (ids) and ``pieces`` (their texts) cover prompt and response; other arrays
    begin at the first response token. Raises ``TraceError`` when mask, response and ``scores`` (the trainer's log-probs
    and advantages of the tokens under the mask) differ in length."""
    tokens, length = sample.tokens[:MOST_TOKENS], sample.response_length
    mask = mask_of(sample)
    metadata, start = sample.metadata or {}, len(sample.tokens) - length
    masked = np.flatnonzero(mask)
    if len(mask) != length or (scores is not None and len(scores[0]) != len(masked)):
        scored = "none" if scores is None else len(scores[0])
        raise TraceError(f"loss_mask has {len(mask)} entries, the response {length} tokens, the trainer {scored}")
    n_shown = max(len(tokens) - start, 0)
    log_probs, advantages = np.full((2, length), np.nan, dtype=np.float32)
    if scores is not None:
        log_probs[masked], advantages[masked] = scores
    engine = np.asarray(sample.rollout_log_probs or [np.nan] * length, dtype=np.float32)
    engine = np.where(mask, engine, np.float32(np.nan))
    return {
        "segment": metadata.get("segment", 0),
        "fork": metadata.get("fork_reason"),
        "stop_reason": str(metadata.get("stop_reason") or sample.status.value),
        "token_source": str(metadata.get("token_source") or "engine"),
        "prompt_length": min(start, len(tokens)),
        "tokens": pack(tokens, "<i4"),
        "pieces": pieces(tokens),
        "trained": [*map(list, runs_of(mask[:n_shown]))],
        "engine_log_probs": pack(engine[:n_shown]),
        "trainer_log_probs": pack(log_probs[:n_shown]),
        "advantages": pack(advantages[:n_shown]),
        "weight_versions": metadata.get("weight_spans", []),
        "turn_spans": metadata.get("turn_spans", []),
        "left_out": len(sample.tokens) - len(tokens),
    }


def pack(values: Any, kind: str = "<f4") -> str:
    """Numbers as base64 of little-endian ``kind``; ``numpy.frombuffer(base64.b64decode(text), kind)`` reads it."""
    return base64.b64encode(np.asarray(values, dtype=kind).tobytes()).decode("ascii")


def choose_rollouts(rewards: Mapping[str, float | None], *, iteration: int, seed: int = 0) -> dict[str, str]:
    """Rollout id → ``"best"``, ``"worst"``, ``"random"`` or ``"failed"`` (the first one without a reward).

    The random one depends on ``seed``, ``iteration`` and the order of ``rewards`` only.
    """
    scored = {rollout_id: reward for rollout_id, reward in rewards.items() if reward is not None}
    chosen: dict[str, str] = {}
    if scored:
        chosen[max(scored, key=scored.__getitem__)] = "best"
        chosen.setdefault(min(scored, key=scored.__getitem__), "worst")
        if unlabelled := [rollout_id for rollout_id in scored if rollout_id not in chosen]:
            chosen[random.Random(f"{seed}:{iteration}").choice(unlabelled)] = "random"
    chosen.update([(rollout_id, "failed") for rollout_id in rewards if rollout_id not in scored][:1])
    return chosen


class SizeBudget:
    """Bytes that may still be written. Each time half of the rest is used, the stride between recorded iterations
    doubles, so that a long run is covered to its end."""

    def __init__(self, n_bytes: int) -> None:
        self._left, self._stride = n_bytes, 1
        self._next_halving = n_bytes // 2

    def allows(self, iteration: int) -> bool:
        """Whether this iteration is recorded."""
        return self._left > 0 and iteration % self._stride == 0

    def take(self, n_bytes: int) -> bool:
        """Use ``n_bytes``; False when they exceed the rest. Then the stride doubles: a smaller record may still fit."""
        if n_bytes > self._left:
            self._stride *= 2
            return False
        self._left -= n_bytes
        while self._left < self._next_halving:
            self._next_halving //= 2
            self._stride *= 2
        return True


_INCOMPLETE = "�"
_MAX_CACHED = 300_000
_MAX_TOKENS_PER_CHARACTER = 8


class Pieces:
    """Texts of single tokens, which join to the decoded whole. A character of several tokens belongs to the last."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._texts: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One text per id."""
        ids = list(ids)
        if len(self._texts) > _MAX_CACHED:
            self._texts.clear()
        for token in set(ids).difference(self._texts):
            self._texts[token] = self._decode([token])
        alone = [self._texts[token] for token in ids]
        whole = self._decode(ids)
        return alone if "".join(alone) == whole else self._in_context(ids)

    def _in_context(self, ids: list[int]) -> list[str]:
        """One text per id, the end that it adds to the text of the tokens just before it."""
        pieces, start, read = [], 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[start:end])
            if text.endswith(_INCOMPLETE) and end < len(ids) and end - read < _MAX_TOKENS_PER_CHARACTER:
                pieces.append("")
                continue
            pieces.append(text[len(self._decode(ids[start:read])) :])
            start, read = read, end
        return pieces
