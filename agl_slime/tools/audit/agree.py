"""Consistency of a run's files: each file makes claims about rollouts, tasks and iterations, and every later claim is
compared with the first one."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from agl_slime.errors import ConfigError
from agl_slime.report.records import SHAPES, Line, read_lines, read_object
from agl_slime.tools.audit.figures import group_metrics, recompute_digest, same, scores_of, start_versions
from agl_slime.tools.audit.readers import broken_lines, changed_files, read_database
from agl_slime.tools.audit.weights import missing_checkpoints, model_findings, steps_of

MOST_TURNS = 200  # of a kept rollout
_METRICS, _TRAINED, _GROUPS, _ROLLOUTS = SHAPES
_LEDGER, _SUMMARY = "ledger.sqlite", "summary.json"
_CLOSED = 2  # a state in the ledger; below it a rollout is open or ready
_LATE_RETRY = ("cancelled", "group_finalized")  # outcome and reason of a retry that began as its group was finalized
_CUT_OFF = ("restarted", "run_ended")
_LEDGER_CAPACITY = 100_000  # closed rollouts whose ids the ledger keeps
_QUERIES = (
    "SELECT rollout_id, instance_id, state, outcome, reason, closed_no FROM ledger_rollouts",
    "SELECT kind, reason, n FROM ledger_counts WHERE n <> 0 AND kind <> 'closed_no'",
    "SELECT instance_id, closed_no FROM ledger_finished",
    "SELECT step FROM ledger_checkpoints",
)


@dataclass
class Audit:
    """The result of an audit. ``findings`` are sentences with file and line, none where all files agree. ``counts``
    are the audited items. Of a run that is not ``finished`` the last iteration may be in some files only."""

    findings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    finished: bool = False


def audit(path: str | os.PathLike[str]) -> Audit:
    """Audit the directory of a run that no process writes to. Raises ``ConfigError`` where there is no run."""
    run = Path(path)
    if not any((run / name).exists() for name in (*SHAPES, _LEDGER, _SUMMARY)):
        raise ConfigError(f"{run} holds no run: give the --output-dir of one")
    return _Auditor(run).run()


class _Row(NamedTuple):
    """A rollout in the ledger; ``number`` counts closed tasks and rollouts in order."""

    rollout: str
    task: str | None
    state: int
    outcome: str | None
    reason: str | None
    number: int | None


class _Auditor:
    def __init__(self, path: Path) -> None:
        self.path, self.result = path, Audit()
        self.settings: dict[str, Any] = {}
        with suppress(ValueError):
            self.settings = read_object(path / "config.json")
        self.incomplete: dict[str, int] = {}  # number of a last line without an end, by file
        self.claims: dict[tuple[str, str], tuple[str, Any]] = {}
        self.lines = {name: self._read(name) for name in SHAPES}
        self.versions = {
            line.record["iteration"]: str(line.record["weights/version"]) for _, line in self.lines[_METRICS]
        }
        self.pushed_in = start_versions(line.record for _, line in self.lines[_METRICS])  # iteration by weight version
        for iteration, version in sorted(self.versions.items()):
            self.pushed_in.setdefault(version, iteration)
        self.last = max(self.versions, default=0)
        # slime may continue from a checkpoint that a run in another directory saved
        slime = any("train/slime_rollout_id" in line.record for _, line in self.lines[_METRICS])
        self.first = min(self.versions, default=1) if slime else 1
        self.trained = {rollout for _, line in self.lines[_TRAINED] for rollout in line.record["rollouts"]}
        self.grouped = {rollout for _, line in self.lines[_GROUPS] for rollout in line.record["rollouts"]}
        self.kept_ids = {line.record["rollout_id"] for _, line in self.lines[_ROLLOUTS]}
        self.batches: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for _, line in self.lines[_TRAINED]:
            self.batches[line.record["iteration"]].append(line.record)
        self.collected: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for _, line in self.lines[_GROUPS]:
            if not line.record.get("restored"):
                self.collected[line.record["collected"]].append(line.record)
        self.differences: defaultdict[int, list[float]] = defaultdict(list)
        self.scored: Counter[int] = Counter()  # trained rollouts that are kept without gaps, by iteration
        self.ends: defaultdict[str | None, list[int]] = defaultdict(list)
        self.rows: dict[str, _Row] = {}
        self.noted: set[int] = set()  # checkpoints by the ledger

    def run(self) -> Audit:
        checkpoints = steps_of(self.path / "checkpoints")
        ledger = self._check_ledger() if (self.path / _LEDGER).exists() else {}
        if not ledger and (checkpoints or self.settings.get("trainer") == "local"):
            self._report(_LEDGER, "is missing or empty, so that no task's end is known")
        self._check_summary(ledger)
        for name, number in self.incomplete.items() if self.result.finished else ():
            self._report(f"{name} line {number}", "is incomplete, although the run has finished")
        checks = {
            _TRAINED: self._check_trained,
            _GROUPS: self._check_group,
            _ROLLOUTS: self._check_rollout,
            _METRICS: self._check_metrics,
        }
        for name, check in checks.items():
            for location, line in self.lines[name]:
                check(location, line.record)
        self._check_iterations()
        if self.rows:
            self._check_ends()
        for _, directory in sorted(checkpoints.items()):
            self._check_checkpoint(directory)
        end: dict[str, Any] = {"finished": self.result.finished, "last": self.last}
        for step in missing_checkpoints(checkpoints, self.noted, **end):
            self._report("checkpoints", f"iteration {step} is missing, which the ledger has noted")
        metrics = {line.record["iteration"]: line.record for _, line in self.lines[_METRICS]}
        for location, text in model_findings(self.path, checkpoints, metrics, **end):
            self._report(location, text)
        counts = {"iterations": len(self.versions), "rollouts": len(self.grouped), "kept whole": len(self.kept_ids)}
        tokens = sum(sample[2] for _, line in self.lines[_TRAINED] for sample in line.record["samples"])
        self.result.counts = {**counts, "tokens trained": tokens}
        return self.result

    def _report(self, location: str, text: str) -> None:
        self.result.findings.append(f"{location}: {text}")

    def _claim(self, location: str, subject: str, **values: Any) -> None:
        """Note the values that a file has of a subject; report each that differs from an earlier claim's."""
        for name, value in values.items():
            place, first = self.claims.setdefault((subject, name), (location, value))
            if not same(value, first):
                self._report(location, f"{name} of {subject} is {value!r}, and {first!r} by {place}")

    def _once(self, location: str, subject: str, event: str) -> None:
        """Note an event of a subject; report it when another line has it, too."""
        if (place := self.claims.setdefault((subject, event), (location, None))[0]) != location:
            self._report(location, f"{subject} is {event} a second time, after {place}")

    def _read(self, name: str) -> list[tuple[str, Line]]:
        path, lines, last = self.path / name, [], 0
        if not (path.exists() or path.is_symlink()):
            return []
        try:
            for number, text in broken_lines(path):
                self._report(f"{name} line {number}", text)
            for line in read_lines(path, strict=True):
                location = f"{name} line {line.number}"
                if line.error:
                    self._report(location, line.error)
                    continue
                if (iteration := line.record["iteration"]) < last:
                    self._report(location, f"iteration {iteration} comes after iteration {last}")
                lines.append((location, line))
                last = iteration
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                if file.read() not in (b"", b"\n"):
                    self.incomplete[name] = len(lines) + 1
        except ValueError as error:
            self._report(name, str(error))
        return lines

    def _policy(self, iteration: int) -> int:
        """The number of the weights that an iteration trains."""
        version = self.versions.get(iteration - 1, "0")
        return int(version) if version.isdecimal() else 0

    def _check_ledger(self) -> Mapping[str, int]:
        """Read the ledger; returns its counts by outcome."""
        try:
            found_rows, counts, finished, noted = read_database(self.path / _LEDGER, *_QUERIES)
        except ValueError as error:
            self._report(_LEDGER, str(error))
            return {}
        rows = [_Row(*row) for row in found_rows]
        self.rows, self.noted = {row.rollout: row for row in rows}, {step for (step,) in noted}
        for row in rows:
            if row.state == _CLOSED and row.outcome is not None:
                self._claim(_LEDGER, f"rollout {row.rollout}", outcome=row.outcome, reason=row.reason, task=row.task)
        for task, number in finished:
            self.ends[task].append(number)
        recorded = {f"{kind} {reason}".strip(): n for kind, reason, n in counts}
        counted = Counter(
            ("open", "ready")[row.state] if row.state < _CLOSED else f"closed:{row.outcome} {row.reason}".strip()
            for row in rows
        )
        self._claim(f"{_LEDGER} counts", "the ledger", opened=recorded.pop("opened", 0))
        total = sum(recorded.values())
        self._claim(f"{_LEDGER} counts", "the ledger", opened=total)
        if total <= _LEDGER_CAPACITY and dict(counted) != recorded:
            wrong = sorted(kind for kind in {*recorded, *counted} if recorded.get(kind, 0) != counted[kind])
            self._report(_LEDGER, f"its counts differ from its rows: {', '.join(wrong)}")
        outcomes = Counter(opened=total)
        for kind, n in recorded.items():
            outcomes[kind.partition(" ")[0].removeprefix("closed:")] += n
        return outcomes

    def _check_summary(self, ledger: Mapping[str, int]) -> None:
        summary: dict[str, Any] = {}
        try:
            if (self.path / _SUMMARY).exists():
                summary = read_object(self.path / _SUMMARY)
        except ValueError as error:
            self._report(_SUMMARY, str(error))
        self.result.finished = summary.get("reason") == "finished" and not (self.path / "running.json").exists()
        if self.result.finished:
            self._claim(_METRICS, "the run", iterations=self.last - self.first + 1, ledger=+Counter(ledger))
            if ledger:
                self._claim(_SUMMARY, "the run", ledger=+Counter(summary.get("ledger") or {}))
            self._claim(_SUMMARY, "the run", iterations=summary.get("iterations"))

    def _check_pushed(self, location: str, iteration: int, versions: Iterable[str]) -> None:
        for version in sorted(version for version in versions if self.pushed_in.get(version, iteration) >= iteration):
            self._report(location, f"weights of version {version} were not pushed before iteration {iteration}")

    def _check_trained(self, location: str, record: dict[str, Any]) -> None:
        iteration, digests = record["iteration"], defaultdict(list)
        if record["instance_id"] is not None:
            self._once(location, f"task {record['instance_id']}", "trained on")
        scores = record.get("scores")
        if scores is not None and (not isinstance(scores, list) or len(scores) != len(record["samples"])):
            self._report(location, "the number of the trainer's digests differs from that of the Samples")
            scores = None
        for name, digest, n, versions in record["samples"]:
            digests[name].append([digest, n, versions])
            self._check_pushed(location, iteration, versions)
            numbers = [int(version) for version in versions if version.isdecimal()]
            behind, limit = self._policy(iteration) - min(numbers, default=0), self.settings.get("max_staleness")
            if numbers and isinstance(limit, int) and behind > limit:
                text = f"tokens of rollout {name} are {behind} versions old, and max_staleness is {limit}"
                self._report(location, text)
            if versions and sum(versions.values()) != n:
                self._report(location, f"the weight versions of rollout {name} do not add up to its {n} tokens")
        for name in {*digests, *record["rollouts"]}:
            about = f"rollout {name}"
            self._once(location, about, "trained on")
            self._claim(location, about, reward=record["rollouts"].get(name), task=record["instance_id"], reason="")
            self._claim(location, about, outcome="trained", iteration=iteration, sealed=digests[name])
            if scores is not None:
                pairs = zip(record["samples"], scores, strict=True)
                self._claim(location, about, scores=[digest for sample, digest in pairs if sample[0] == name])
            if name not in self.grouped and (self.result.finished or iteration < self.last):
                self._report(location, f"{about} is not in groups.jsonl")
        if iteration not in self.versions and (self.result.finished or iteration != self.last + 1):
            self._report(location, f"iteration {iteration} is not in metrics.jsonl")

    def _check_group(self, location: str, record: dict[str, Any]) -> None:
        self._once(location, f"group {record['group_id']}", "finalized")
        if record["instance_id"] is not None:
            self._once(location, f"task {record['instance_id']}", "finalized")
        self._check_pushed(location, record["iteration"], record["weight_versions"])
        columns = ("rollouts", "rewards", "outcomes", "reasons", "tokens", "turns", "samples", "sealed")
        if len({len(record[name]) for name in columns}) > 1 or record["ready"] == bool(record["code"]):
            self._report(location, "its lists of members, ready and code contradict each other")
            return
        if not record["ready"] and record["iteration"] != record["collected"]:
            self._report(location, f"group {record['group_id']} was dropped in another iteration than collected")
        for member in zip(*(record[name] for name in columns), strict=True):
            self._check_member(location, record, member)
        if not set(record["kept"]) <= set(record["rollouts"]):
            self._report(location, "it keeps rollouts of other groups")

    def _check_member(self, location: str, group: dict[str, Any], member: tuple[Any, ...]) -> None:
        name, reward, outcome, reason, tokens, turns, n_samples, digests = member
        about = f"rollout {name}"
        self._once(location, about, "in a group")
        reason = reason or (group["code"] if outcome == "filtered" else "")
        self._claim(location, about, reward=reward, task=group["instance_id"], outcome=outcome, reason=reason)
        self._claim(location, about, iteration=group["iteration"], collected=group["collected"], sealed=digests)
        self._claim(location, about, tokens=tokens, turns=turns, group=group["group_id"], samples=n_samples)
        if any(versions and sum(versions.values()) != size for _, size, versions in digests):
            self._report(location, f"the weight versions of {about} do not add up to its tokens")
        if n_samples != len(digests) or sum(digest[1] for digest in digests) > tokens:
            self._report(location, f"{about} has {n_samples} samples and {tokens} tokens, and {digests} to train on")
        if not {version for digest in digests for version in digest[2]} <= set(group["weight_versions"]):
            self._report(location, f"{about} was sampled by other weight versions than its group")
        if reward is None and outcome in ("trained", "filtered"):
            self._report(location, f"{about} succeeded without a reward")
        if outcome == "trained" and name not in self.trained and (self.path / _TRAINED).exists():
            self._report(location, f"{about} is trained, and is not in trained.jsonl")
        if self.rows and name not in self.rows and len(self.rows) < _LEDGER_CAPACITY:
            self._report(location, f"{about} is not in the ledger")
        if (name in group["kept"]) != (name in self.kept_ids):
            self._report(location, f"{about} is kept by one of groups.jsonl and rollouts.jsonl only")

    def _check_rollout(self, location: str, record: dict[str, Any]) -> None:
        about = f"rollout {record['rollout_id']}"
        self._once(location, about, "kept")
        fields = ("iteration", "collected", "outcome", "reward", "tokens", "reason")
        self._claim(location, about, **{name: record[name] for name in fields})
        self._claim(location, about, task=record["instance_id"], group=record["group_id"])
        self._claim(location, about, samples=len(record["samples"]) + record["left_out"]["samples"])
        if record["messages"] and len(record["turns"]) < MOST_TURNS:
            self._claim(location, about, turns=len(record["turns"]))
        if record["rewards"] and not any(same(value, record["reward"]) for value in record["rewards"].values()):
            self._report(location, f"the reward of {about} is none of its rewards")
        try:
            digests = [recompute_digest(sample) for sample in record["samples"]]
        except ValueError as error:
            self._report(location, f"a Sample of {about} {error}")
            return
        for sample in record["samples"]:
            self._check_pushed(location, record["iteration"], [version for version, *_ in sample["weight_versions"]])
        complete = not record["left_out"]["samples"] and not any(sample["left_out"] for sample in record["samples"])
        if complete:
            self._claim(location, about, sealed=digests)
        self._check_scores(location, record, complete=complete)
        if sum(digest[1] for digest in digests) > record["tokens"]:
            self._report(location, f"more tokens of {about} are under the loss mask than were sampled")
        sampled = sum(turn["tokens"] for turn in record["turns"])
        if record["turns"] and complete and sampled != record["tokens"]:
            self._report(location, f"the turns of {about} have {sampled} tokens, and the rollout {record['tokens']}")

    def _check_scores(self, location: str, record: dict[str, Any], *, complete: bool) -> None:
        """The trainer's figures of a kept rollout, which only trained rollouts have."""
        about, trained = f"rollout {record['rollout_id']}", record["outcome"] == "trained"
        scores = [scores_of(sample) for sample in record["samples"]]
        if not trained and any(score.present for score in scores):
            self._report(location, f"{about} has log-probs of the trainer, and was not trained")
        elif complete and trained and (about, "scores") in self.claims:
            self._claim(location, about, scores=[score.digest for score in scores])
        if any(score.present and not score.complete for score in scores):
            self._report(location, f"{about} has log-probs or advantages of the trainer for some trained tokens only")
        self.differences[record["iteration"]] += [score.difference for score in scores if score.present]
        self.scored[record["iteration"]] += complete and trained

    def _check_metrics(self, location: str, record: dict[str, Any]) -> None:
        iteration = record["iteration"]
        about = f"iteration {iteration}"
        self._once(location, about, "finished")
        self._claim(location, about, **{name: record.get(name) for name in ("rollout/reward_mean", "weights/version")})
        expected = self._batch_metrics(iteration) if (self.path / _TRAINED).exists() else {}
        if (self.path / _GROUPS).exists():
            expected |= group_metrics(self.collected[iteration])
        by_reason = {name for name in record if name.startswith(("rollout/failed/", "rollout/dropped/"))}
        for name in sorted({*expected, *by_reason}):
            if not same(record.get(name) or 0, expected.get(name) or 0):
                text = f"{name} is {record.get(name)!r}, and {expected.get(name)!r} by the trained groups"
                self._report(location, text)
        most, recorded = max(self.differences[iteration], default=0.0), record.get("train/logprob_diff_max")
        all_kept = self.scored[iteration] and self.scored[iteration] == expected.get("train/rollouts")
        if all_kept and isinstance(recorded, int | float) and recorded > most * (1 + 1e-4) + 1e-6:
            text = f"train/logprob_diff_max is {recorded!r}, and {most!r} at most by the trained tokens"
            self._report(location, text)

    def _batch_metrics(self, iteration: int) -> dict[str, float]:
        """The metrics of an iteration by its lines of trained.jsonl."""
        samples = [sample for line in self.batches[iteration] for sample in line["samples"]]
        tokens = sum(sample[2] for sample in samples)
        metrics: dict[str, float] = {
            "train/tokens_trained": tokens,
            "rollout/tokens_under_mask": tokens,
            "train/samples": len(samples),
            "train/rollouts": sum(len(line["rollouts"]) for line in self.batches[iteration]),
        }
        policy, ages = self._policy(iteration), Counter[int]()
        for version, n in ((version, n) for sample in samples for version, n in sample[3].items()):
            if version.isdecimal():
                ages[policy - int(version)] += n
        if ages:
            metrics["rollout/staleness_max"] = max(ages)
        if tokens and sum(ages.values()) == tokens:
            metrics["rollout/staleness_mean"] = sum(age * n for age, n in ages.items()) / tokens
        return metrics

    def _check_iterations(self) -> None:
        version = "0"
        for iteration in range(self.first, self.last + 1):
            if iteration not in self.versions:
                self._report(_METRICS, f"there is no line of iteration {iteration}")
            elif (self.path / _TRAINED).exists():
                if self.batches[iteration]:
                    version = str(int(version) + 1)
                self._claim(_TRAINED, f"iteration {iteration}", **{"weights/version": version})

    def _check_ends(self) -> None:
        """Each task has one end in the ledger, and the files agree with it."""
        by_task: defaultdict[str | None, list[_Row]] = defaultdict(list)
        for row in self.rows.values():
            by_task[row.task].append(row)
        groups = {line.record["instance_id"]: line.record for _, line in self.lines[_GROUPS]}
        written = self._written_until(groups.values())
        last = max((int(task) for task in self.ends if task is not None and task.isdecimal()), default=-1)
        for task in sorted({*by_task, *self.ends, *groups} - {None}):
            self._check_task(task, by_task[task], groups.get(task), written=written, last=last)
        for row in self.rows.values():
            due = self.result.finished or (row.number or 0) <= written
            if row.outcome == "trained" and row.rollout not in self.trained and due:
                self._report(_LEDGER, f"rollout {row.rollout} is trained, and is not in trained.jsonl")

    def _written_until(self, groups: Iterable[Mapping[str, Any]]) -> int:
        """The last number of the ledger whose group is in the files even after a kill. The next batch is collected
        during training, and its dropped groups are written one iteration later."""
        groups = list(groups)
        newest = max((group["iteration"] for group in groups), default=0)
        earlier = {rollout for group in groups if group["iteration"] < newest - 1 for rollout in group["rollouts"]}
        return max((row.number or 0 for name, row in self.rows.items() if name in earlier), default=0)

    def _check_task(
        self, task: str, rows: list[_Row], group: dict[str, Any] | None, *, written: int, last: int
    ) -> None:
        ends = self.ends[task]
        cut_off = any(row.reason in _CUT_OFF or row.state < _CLOSED for row in rows)
        # begun ahead, cut off by a restart, and not needed again before the run ended
        ahead = cut_off and group is None and task.isdecimal() and int(task) > last
        due = not cut_off or (self.result.finished and not ahead)
        if len(ends) > 1 or (not ends and due and (rows or group)):
            self._report(_LEDGER, f"task {task} has {len(ends)} ends")
        numbers = {row.number for row in rows if row.outcome in ("trained", "filtered", "stale")}
        if ends and numbers and numbers != {*ends}:
            closed = sorted(numbers, key=lambda number: number or 0)
            self._report(_LEDGER, f"task {task} ended as number {ends}, its rollouts as {closed}")
        if not ends or (not self.result.finished and min(ends) >= written):
            return
        if group is None:
            self._report(_LEDGER, f"task {task} has an end, and no line in groups.jsonl")
        # a group restored after a restart has only the members to train on, and is named after one of them
        restored = group is not None and group["group_id"] in group["rollouts"]
        unlisted = ("failed", "cancelled") if restored else ()
        for row in () if cut_off else rows:
            listed = row.rollout in self.grouped or row.outcome in unlisted
            if not listed and (row.outcome, row.reason) != _LATE_RETRY:
                self._report(_LEDGER, f"rollout {row.rollout} of task {task} is not in groups.jsonl")

    def _check_checkpoint(self, directory: Path) -> None:
        location, step = f"checkpoints/{directory.name}", int(directory.name.removeprefix("step_"))
        for part in (directory, directory / "trainer"):
            for name, text in changed_files(part):
                self._report(f"{location}/{(part / name).relative_to(directory)}", text)
        if self.rows and step not in self.noted:
            self._report(_LEDGER, f"it has not noted the checkpoint of step {step}")
        try:
            loop, source = read_object(directory / "loop.json"), read_object(directory / "data_source.json")
            means, ready = loop["reward_means"], [member for members in source["members"] for member in members]
            self._claim(f"{location}/loop.json", location, iteration=step)
            self._claim(f"{location}/loop.json", location, iteration=loop["iteration"])
            if step:
                self._claim(f"{location}/loop.json", f"iteration {step}", **{"weights/version": loop["version"]})
            for iteration, mean in enumerate(means, 1):
                self._claim(f"{location}/loop.json", f"iteration {iteration}", **{"rollout/reward_mean": mean})
            for name in ready:
                if self.claims.get((f"rollout {name}", "iteration"), ("", step + 1))[1] <= step:
                    self._report(f"{location}/data_source.json", f"rollout {name} is ready, and was trained on before")
        except (ValueError, KeyError, TypeError) as error:
            self._report(location, f"its states cannot be read: {error}")
