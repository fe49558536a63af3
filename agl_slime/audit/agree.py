"""What the files of a run say of each other: every file claims something of rollouts, tasks and iterations, and of each
the first claim and any later one are compared."""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np

from agl_slime.audit.records import (
    SHAPES,
    Line,
    began_with,
    broken_chain,
    broken_seal,
    read_database,
    read_lines,
    read_object,
)
from agl_slime.errors import ConfigError

_METRICS, _TRAINED, _GROUPS, _ROLLOUTS = SHAPES
_LEDGER, _SUMMARY = "ledger.sqlite", "summary.json"
_STRAGGLERS = ("group_timeout", "group_dropped")
_BEGUN_TOO_LATE = ("cancelled", "group_finalized")  # again, just when its group came to its end without it
_CUT_OFF = ("restarted", "run_ended")
_REMEMBERED = 100_000  # ended rollouts that the ledger knows by id
_QUERIES = (
    "SELECT rollout_id, instance_id, state, outcome, reason, closed_no FROM ledger_rollouts",
    "SELECT kind, reason, n FROM ledger_counts WHERE n <> 0 AND kind <> 'closed_no'",
    "SELECT instance_id, closed_no FROM ledger_finished",
    "SELECT step FROM ledger_checkpoints",
)


@dataclass
class Audit:
    """``findings``: sentences that name file and line, none where all files agree. ``counts``: what was looked at.
    ``finished``: the run came to its end; of one that did not, the last iteration may be in some files only."""

    findings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    finished: bool = False


def audit(path: str | os.PathLike[str]) -> Audit:
    """Read the directory of a run that nobody writes to. Raises ``ConfigError`` where there is no run."""
    run = Path(path)
    if not any((run / name).exists() for name in (*SHAPES, _LEDGER, _SUMMARY)):
        raise ConfigError(f"{run} holds no run: give the --output-dir of one")
    return _Run(run).look()


class _Run:
    def __init__(self, path: Path) -> None:
        self.path, self.result, self.noted = path, Audit(), set[int]()
        self.claims: dict[tuple[str, str], tuple[str, Any]] = {}
        self.lines = {name: self._read(name) for name in SHAPES}
        self.versions = {at.record["iteration"]: str(at.record["weights/version"]) for _, at in self.lines[_METRICS]}
        self.pushed = began_with(at.record for _, at in self.lines[_METRICS])  # after which iteration
        for iteration, version in sorted(self.versions.items()):
            self.pushed.setdefault(version, iteration)
        self.last = max(self.versions, default=0)
        slimes = any("train/slime_rollout_id" in at.record for _, at in self.lines[_METRICS])
        self.first = min(self.versions, default=1) if slimes else 1  # slime goes on from another run's checkpoint
        self.trained = {one for _, line in self.lines[_TRAINED] for one in line.record["rollouts"]}
        self.groups = {one for _, line in self.lines[_GROUPS] for one in line.record["rollouts"]}
        self.kept = {line.record["rollout_id"] for _, line in self.lines[_ROLLOUTS]}
        self.batches: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for _, line in self.lines[_TRAINED]:
            self.batches[line.record["iteration"]].append(line.record)
        self.collected: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for _, line in self.lines[_GROUPS]:
            if not line.record.get("restored"):
                self.collected[line.record["collected"]].append(line.record)
        self.ends: defaultdict[str, list[int]] = defaultdict(list)
        self.rows: dict[str, tuple[Any, ...]] = {}

    def look(self) -> Audit:
        ledger = self._ledger() if (self.path / _LEDGER).exists() else {}
        self._summary(ledger)
        looks = {_TRAINED: self._trained, _GROUPS: self._group, _ROLLOUTS: self._rollout, _METRICS: self._metrics}
        for name, look in looks.items():
            for where, line in self.lines[name]:
                look(where, line.record)
        self._iterations()
        if self.rows:
            self._ends()
        for directory in sorted((self.path / "checkpoints").glob("step_*")):
            if directory.is_dir() and directory.name.removeprefix("step_").isdecimal():
                self._checkpoint(directory)
        counts = {"iterations": len(self.versions), "rollouts": len(self.groups), "kept whole": len(self.kept)}
        counts["tokens trained"] = sum(one[2] for _, line in self.lines[_TRAINED] for one in line.record["samples"])
        self.result.counts = counts
        return self.result

    def _say(self, where: str, text: str) -> None:
        self.result.findings.append(f"{where}: {text}")

    def _claim(self, where: str, subject: str, **values: Any) -> None:
        for name, value in values.items():
            place, known = self.claims.setdefault((subject, name), (where, value))
            if not _same(value, known):
                self._say(where, f"{name} of {subject} is {value!r}, and {known!r} by {place}")

    def _once(self, where: str, subject: str, what: str) -> None:
        if (place := self.claims.setdefault((subject, what), (where, None))[0]) != where:
            self._say(where, f"{subject} is {what} a second time, after {place}")

    def _read(self, name: str) -> list[tuple[str, Line]]:
        path, found, last = self.path / name, [], 0
        if not (path.exists() or path.is_symlink()):
            return []
        try:
            for number, text in broken_chain(path):
                self._say(f"{name} line {number}", text)
            for line in read_lines(path, whole=True):
                if line.wrong:
                    self._say(f"{name} line {line.number}", line.wrong)
                    continue
                where, iteration = f"{name} line {line.number}", line.record["iteration"]
                if iteration < last:
                    self._say(where, f"iteration {iteration} comes after iteration {last}")
                found.append((where, line))
                last = iteration
        except ValueError as error:
            self._say(name, str(error))
        return found

    def _ledger(self) -> Mapping[str, int]:
        try:
            rows, counts, finished, noted = read_database(self.path / _LEDGER, *_QUERIES)
        except ValueError as error:
            self._say(_LEDGER, str(error))
            return {}
        self.rows, self.noted = {row[0]: row for row in rows}, {step for (step,) in noted}
        for name, task, state, outcome, reason, _ in rows:
            if state == 2 and outcome is not None:
                self._claim(_LEDGER, f"rollout {name}", outcome=outcome, reason=reason, task=task)
        for task, closed in finished:
            self.ends[task].append(closed)
        told = {f"{kind} {reason}".strip(): n for kind, reason, n in counts}
        here = Counter(("open", "ready")[row[2]] if row[2] < 2 else f"closed:{row[3]} {row[4]}".strip() for row in rows)
        self._claim(f"{_LEDGER} counts", "the ledger", opened=told.pop("opened", 0))
        self._claim(f"{_LEDGER} counts", "the ledger", opened=sum(told.values()))
        if sum(told.values()) <= _REMEMBERED and dict(here) != told:
            wrong = sorted(kind for kind in {*told, *here} if told.get(kind, 0) != here[kind])
            self._say(_LEDGER, f"its counts are not those of its rows: {', '.join(wrong)}")
        totals = Counter(opened=sum(told.values()))
        for kind, n in told.items():
            totals[kind.partition(" ")[0].removeprefix("closed:")] += n
        return totals

    def _summary(self, ledger: Mapping[str, int]) -> None:
        summary: dict[str, Any] = {}
        try:
            if (self.path / _SUMMARY).exists():
                summary = read_object(self.path / _SUMMARY)
        except ValueError as error:
            self._say(_SUMMARY, str(error))
        self.result.finished = summary.get("reason") == "finished" and not (self.path / "running.json").exists()
        if self.result.finished:
            self._claim(_METRICS, "the run", iterations=self.last - self.first + 1, ledger=+Counter(ledger))
            if ledger:
                self._claim(_SUMMARY, "the run", ledger=+Counter(summary.get("ledger") or {}))
            self._claim(_SUMMARY, "the run", iterations=summary.get("iterations"))

    def _pushed(self, where: str, iteration: int, versions: Iterable[str]) -> None:
        for version in sorted(version for version in versions if self.pushed.get(version, iteration) >= iteration):
            self._say(where, f"weights of version {version} were not pushed before iteration {iteration}")

    def _trained(self, where: str, record: dict[str, Any]) -> None:
        iteration, sealed = record["iteration"], defaultdict(list)
        if record["instance_id"] is not None:
            self._once(where, f"task {record['instance_id']}", "trained on")
        for name, digest, n, versions in record["samples"]:
            sealed[name].append([digest, n, versions])
            self._pushed(where, iteration, versions)
            if versions and sum(versions.values()) != n:
                self._say(where, f"the versions of rollout {name} are those of other than {n} tokens")
            if [digest for digest, *_ in sealed[name]].count(digest) > 1:
                self._say(where, f"the same tokens of rollout {name} are trained on twice")
        for name in {*sealed, *record["rollouts"]}:
            about = f"rollout {name}"
            self._once(where, about, "trained on")
            self._claim(where, about, reward=record["rollouts"].get(name), task=record["instance_id"], reason="")
            self._claim(where, about, outcome="trained", iteration=iteration, sealed=sealed[name])
            if name not in self.groups and (self.result.finished or iteration < self.last):
                self._say(where, f"groups.jsonl does not know {about}")
        if iteration not in self.versions and (self.result.finished or iteration != self.last + 1):
            self._say(where, f"metrics.jsonl has no iteration {iteration}")

    def _group(self, where: str, record: dict[str, Any]) -> None:
        self._once(where, f"group {record['group_id']}", "finalized")
        if record["instance_id"] is not None:
            self._once(where, f"task {record['instance_id']}", "finalized")
        self._pushed(where, record["iteration"], record["weight_versions"])
        columns = ("rollouts", "rewards", "outcomes", "reasons", "tokens", "turns", "samples", "sealed")
        if len({len(record[name]) for name in columns}) > 1 or record["ready"] == bool(record["code"]):
            self._say(where, "its fields cannot be so together: lists of members, ready and code")
            return
        for name, reward, outcome, why, tokens, turns, n, sealed in zip(*(record[c] for c in columns), strict=True):
            about = f"rollout {name}"
            self._once(where, about, "in a group")
            reason = why or (record["code"] if outcome == "filtered" else "")
            self._claim(where, about, reward=reward, task=record["instance_id"], outcome=outcome, reason=reason)
            self._claim(where, about, iteration=record["iteration"], collected=record["collected"], sealed=sealed)
            self._claim(where, about, tokens=tokens, turns=turns, group=record["group_id"])
            if n != len(sealed) or sum(one[1] for one in sealed) > tokens:
                self._say(where, f"{about} has {n} samples and {tokens} tokens, and {sealed} to train on")
            if not {version for one in sealed for version in one[2]} <= set(record["weight_versions"]):
                self._say(where, f"{about} was sampled by other versions than its group")
            if outcome == "trained" and name not in self.trained and (self.path / _TRAINED).exists():
                self._say(where, f"{about} is trained, and trained.jsonl does not know it")
            if self.rows and name not in self.rows and len(self.rows) < _REMEMBERED:
                self._say(where, f"the ledger does not know {about}")
            if (name in record["kept"]) != (name in self.kept):
                self._say(where, f"{about} is kept by one of groups.jsonl and rollouts.jsonl only")
        if not set(record["kept"]) <= set(record["rollouts"]):
            self._say(where, "it keeps rollouts that are none of its own")

    def _rollout(self, where: str, record: dict[str, Any]) -> None:
        about = f"rollout {record['rollout_id']}"
        self._once(where, about, "kept")
        same = ("iteration", "collected", "outcome", "reward", "tokens", "reason")
        self._claim(where, about, **{name: record[name] for name in same})
        self._claim(where, about, task=record["instance_id"], group=record["group_id"])
        try:
            samples = [_sample(sample) for sample in record["samples"]]
        except ValueError as error:
            self._say(where, f"a Sample of {about} {error}")
            return
        for sample in record["samples"]:
            self._pushed(where, record["iteration"], [version for version, *_ in sample["weight_versions"]])
        whole = not record["left_out"]["samples"] and not any(sample["left_out"] for sample in record["samples"])
        if whole:
            self._claim(where, about, sealed=samples)
        if sum(one[1] for one in samples) > record["tokens"]:
            self._say(where, f"more tokens of {about} are under the loss mask than were sampled")
        sampled = sum(turn["tokens"] for turn in record["turns"])
        if record["turns"] and whole and sampled != record["tokens"]:
            self._say(where, f"the turns of {about} have {sampled} tokens, and it has {record['tokens']}")

    def _metrics(self, where: str, record: dict[str, Any]) -> None:
        iteration = record["iteration"]
        about = f"iteration {iteration}"
        self._once(where, about, "finished")
        self._claim(where, about, **{name: record.get(name) for name in ("rollout/reward_mean", "weights/version")})
        samples = [sample for line in self.batches[iteration] for sample in line["samples"]]
        tokens = sum(sample[2] for sample in samples)
        found = {"train/tokens_trained": tokens, "rollout/tokens_under_mask": tokens, "train/samples": len(samples)}
        found["train/rollouts"] = sum(len(line["rollouts"]) for line in self.batches[iteration])
        before = self.versions.get(iteration - 1, "0")
        policy = int(before) if before.isdecimal() else 0
        ages = [policy - int(version) for one in samples for version in one[3] if version.isdecimal()]
        found |= {"rollout/staleness_max": max(ages)} if ages else {}
        found = found if (self.path / _TRAINED).exists() else {}
        if (self.path / _GROUPS).exists():
            found |= _sums(self.collected[iteration])
        named = {name for name in record if name.startswith(("rollout/failed/", "rollout/dropped/"))}
        for name in sorted({*found, *named}):
            if not _same(record.get(name) or 0, found.get(name) or 0):
                self._say(where, f"{name} is {record.get(name)!r}, and {found.get(name)!r} by the groups trained on")

    def _iterations(self) -> None:
        version = "0"
        for iteration in range(self.first, self.last + 1):
            if iteration not in self.versions:
                self._say(_METRICS, f"there is no line of iteration {iteration}")
            elif (self.path / _TRAINED).exists():
                version = str(iteration) if self.batches[iteration] else version
                self._claim(_TRAINED, f"iteration {iteration}", **{"weights/version": version})

    def _ends(self) -> None:
        """Each task has one end in the ledger, and it is in the files."""
        of_task: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for row in self.rows.values():
            of_task[row[1]].append(row)
        groups = {line.record["instance_id"]: line.record for _, line in self.lines[_GROUPS]}
        # of a run that was killed: what ended before the groups of the last iteration but two were trained on. The next
        # batch is collected while one is trained on, and what is dropped after that is told of with the one after it.
        newest = max((group["iteration"] for group in groups.values()), default=0)
        told = {one for group in groups.values() if group["iteration"] < newest - 1 for one in group["rollouts"]}
        written = max((row[5] or 0 for name, row in self.rows.items() if name in told), default=0)
        last = max((int(task) for task in self.ends if task.isdecimal()), default=-1)
        for task in sorted({*of_task, *self.ends, *groups} - {None}):
            rows, ends, group = of_task[task], self.ends[task], groups.get(task)
            cut_off = any(row[4] in _CUT_OFF or row[2] < 2 for row in rows)
            # begun ahead, cut off by a restart, and not needed again before the run came to its end
            ahead = cut_off and group is None and task.isdecimal() and int(task) > last
            due = (self.result.finished and not ahead) or not cut_off
            if len(ends) > 1 or (not ends and due and (rows or group)):
                self._say(_LEDGER, f"task {task} has {len(ends)} ends")
            closed = {row[5] for row in rows if row[3] in ("trained", "filtered", "stale")}
            if ends and closed and closed != {*ends}:
                self._say(_LEDGER, f"task {task} ended as number {ends}, its rollouts as {sorted(closed)}")
            if not ends or (not self.result.finished and min(ends) >= written):
                continue
            if group is None:
                self._say(_LEDGER, f"task {task} has an end, and groups.jsonl has no line of it")
            # of a group that was ready before a restart, only the members to train on are known, and not its name
            known = ("failed", "cancelled") if group is not None and group["group_id"] in group["rollouts"] else ()
            missing = [] if cut_off else [row for row in rows if row[0] not in self.groups and row[3] not in known]
            for name in (row[0] for row in missing if row[3:5] != _BEGUN_TOO_LATE):
                self._say(_LEDGER, f"rollout {name} of task {task} is not in groups.jsonl")
        for name, row in self.rows.items():
            if row[3] == "trained" and name not in self.trained and (self.result.finished or row[5] <= written):
                self._say(_LEDGER, f"rollout {name} is trained, and trained.jsonl does not know it")

    def _checkpoint(self, directory: Path) -> None:
        where, step = f"checkpoints/{directory.name}", int(directory.name.removeprefix("step_"))
        for part in (directory, directory / "trainer"):
            for name, text in broken_seal(part):
                self._say(f"{where}/{(part / name).relative_to(directory)}", text)
        if self.rows and step not in self.noted:
            self._say(_LEDGER, f"it has not noted the checkpoint of step {step}")
        try:
            loop, source = read_object(directory / "loop.json"), read_object(directory / "data_source.json")
            means, ready = loop["reward_means"], [one for members in source["members"] for one in members]
            self._claim(f"{where}/loop.json", where, iteration=step)
            self._claim(f"{where}/loop.json", where, iteration=loop["iteration"])
            if step:
                self._claim(f"{where}/loop.json", f"iteration {step}", **{"weights/version": loop["version"]})
            for iteration, mean in enumerate(means, 1):
                self._claim(f"{where}/loop.json", f"iteration {iteration}", **{"rollout/reward_mean": mean})
            for name in ready:
                if self.claims.get((f"rollout {name}", "iteration"), ("", step + 1))[1] <= step:
                    self._say(f"{where}/data_source.json", f"rollout {name} is ready, and was trained on before")
        except (ValueError, KeyError, TypeError) as error:
            self._say(where, f"its states cannot be read: {error}")


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    return one == other


def _sample(sample: dict[str, Any]) -> list[Any]:
    """Digest, trained tokens and their versions; ``ValueError`` where columns do not stand beside each other."""
    tokens = np.frombuffer(base64.b64decode(sample["tokens"], validate=True), "<i4")
    length = len(tokens) - sample["prompt_length"]
    columns = [sample[name] for name in ("engine_log_probs", "trainer_log_probs", "advantages")]
    engine, *rest = (np.frombuffer(base64.b64decode(text, validate=True), "<f4") for text in columns)
    spans = [*sample["trained"], *sample["turn_spans"], *(span[1:] for span in sample["weight_versions"])]
    fits = all(len(span) == 2 and 0 <= span[0] <= span[1] <= length + sample["left_out"] for span in spans)
    if not fits or {len(engine), *map(len, rest)} != {length} or len(sample["pieces"]) != len(tokens):
        raise ValueError("has tokens, pieces, spans and figures of different lengths")
    mask = np.zeros(length, dtype=bool)
    for start, end in sample["trained"]:
        mask[start:end] = True
    if any(not np.isnan(column[~mask]).all() for column in (engine, *rest)):
        raise ValueError("has figures outside of the loss mask")
    log_probs = engine[mask]
    if np.isnan(log_probs).all():
        log_probs = log_probs[:0]
    content = tokens.tobytes() + mask.tobytes() + log_probs.tobytes()
    versions = Counter[str]()
    for version, start, end in sample["weight_versions"]:
        versions[version] += int(mask[start:end].sum())
    return [hashlib.blake2b(content, digest_size=8).hexdigest(), int(mask.sum()), +versions]


def _sums(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """What metrics.jsonl says of the groups that an iteration has collected."""
    columns = ("rewards", "outcomes", "reasons", "tokens", "turns", "samples")
    rows = [(group["ready"], zip(*(group[name] for name in columns), strict=False)) for group in groups]
    members = [(ready, *row) for ready, of_group in rows for row in of_group]
    rewards = [reward for _, reward, *_ in members if reward is not None]
    whole = [(ready and not why, tokens) for ready, _, _, why, tokens, *_ in members if why not in _STRAGGLERS]
    lengths = {True: [n for into, n in whole if into], False: [n for into, n in whole if not into]}
    why = Counter(reason for *_, reason, _, _, _ in members if reason and reason not in _STRAGGLERS)
    same = [group for group in groups if group["ready"] and len({*group["rewards"]} - {None}) == 1]
    found: dict[str, Any] = {f"rollout/failed/{reason}": n for reason, n in why.items()}
    found |= {f"rollout/dropped/{c}": n for c, n in Counter(g["code"] for g in groups if not g["ready"]).items()}
    found |= {"rollout/count": len(members), "rollout/failed": why.total()}
    found |= {"rollout/reward_mean": fmean(rewards), "rollout/reward_std": pstdev(rewards)} if rewards else {}
    found |= {"rollout/reward_min": min(rewards, default=0), "rollout/reward_max": max(rewards, default=0)}
    found |= {
        "rollout/groups_ready": sum(group["ready"] for group in groups),
        "rollout/groups_zero_variance": len(same),
    }
    found["rollout/groups_dropped"] = sum(not group["ready"] for group in groups)
    found["rollout/tokens_sampled"] = sum(lengths[True])
    found["rollout/cancelled_stragglers"] = len(members) - len(whole)
    found["rollout/turns_mean"] = fmean(turns for *_, turns, _ in members) if members else 0
    found["rollout/response_tokens_mean"] = fmean(n for _, n in whole) if whole else 0
    found["rollout/response_tokens_mean_trained"] = fmean(lengths[True]) if lengths[True] else 0
    found["rollout/response_tokens_mean_dropped"] = fmean(lengths[False]) if lengths[False] else 0
    found["trace/forks"] = sum(max(n - 1, 0) for ready, _, _, why, _, _, n in members if ready and not why)
    return found
