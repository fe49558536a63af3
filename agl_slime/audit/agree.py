"""What the files of a run say of each other: every file claims something of rollouts, tasks and iterations, and of each
the first claim and any later one are compared."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_slime.audit.figures import began_with, same, scores_of, sealed_again, sums_of
from agl_slime.audit.records import SHAPES, Line, broken_chain, broken_seal, read_database, read_lines, read_object
from agl_slime.audit.weights import missing_checkpoints, model_findings, steps_of
from agl_slime.errors import ConfigError

_METRICS, _TRAINED, _GROUPS, _ROLLOUTS = SHAPES
_LEDGER, _SUMMARY = "ledger.sqlite", "summary.json"
_AS_ITS_GROUP_ENDED = ("cancelled", "group_finalized")  # a failed rollout was begun again just then
_CUT_OFF = ("restarted", "run_ended")
MOST_TURNS = 200  # of a rollout that is kept
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
        self.path, self.result = path, Audit()
        self.torn: dict[str, int] = {}  # the line that a file ends in the middle of
        self.claims: dict[tuple[str, str], tuple[str, Any]] = {}
        self.lines = {name: self._read(name) for name in SHAPES}
        self.versions = {at.record["iteration"]: str(at.record["weights/version"]) for _, at in self.lines[_METRICS]}
        self.pushed = began_with(at.record for _, at in self.lines[_METRICS])  # after which iteration
        for iteration, version in sorted(self.versions.items()):
            self.pushed.setdefault(version, iteration)
        self.last = max(self.versions, default=0)
        # slime goes on from a checkpoint of its own, which a run in another directory may have saved
        slimes = any("train/slime_rollout_id" in at.record for _, at in self.lines[_METRICS])
        self.first = min(self.versions, default=1) if slimes else 1
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
        self.differences: defaultdict[int, list[float]] = defaultdict(list)
        self.scored: Counter[int] = Counter()  # trained rollouts that are kept whole
        self.ends: defaultdict[str, list[int]] = defaultdict(list)
        self.rows: dict[str, tuple[Any, ...]] = {}
        self.noted: set[int] = set()

    def look(self) -> Audit:
        checkpoints = steps_of(self.path / "checkpoints")
        ledger = self._ledger() if (self.path / _LEDGER).exists() else {}
        if not ledger and (checkpoints or self._setting("trainer") == "local"):
            self._say(_LEDGER, "is missing or empty, so that the end of no task is known")
        self._summary(ledger)
        for name, number in self.torn.items() if self.result.finished else ():
            self._say(f"{name} line {number}", "is no whole line, and the run has finished")
        looks = {_TRAINED: self._trained, _GROUPS: self._group, _ROLLOUTS: self._rollout, _METRICS: self._metrics}
        for name, look in looks.items():
            for where, line in self.lines[name]:
                look(where, line.record)
        self._iterations()
        if self.rows:
            self._ends()
        for _, directory in sorted(checkpoints.items()):
            self._checkpoint(directory)
        end: dict[str, Any] = {"finished": self.result.finished, "last": self.last}
        for step in missing_checkpoints(checkpoints, self.noted, **end):
            self._say("checkpoints", f"that of iteration {step} is missing, which the ledger has noted")
        metrics = {line.record["iteration"]: line.record for _, line in self.lines[_METRICS]}
        for where, text in model_findings(self.path, checkpoints, metrics, **end):
            self._say(where, text)
        counts = {"iterations": len(self.versions), "rollouts": len(self.groups), "kept whole": len(self.kept)}
        tokens = sum(one[2] for _, line in self.lines[_TRAINED] for one in line.record["samples"])
        self.result.counts = {**counts, "tokens trained": tokens}
        return self.result

    def _say(self, where: str, text: str) -> None:
        self.result.findings.append(f"{where}: {text}")

    def _claim(self, where: str, subject: str, **values: Any) -> None:
        for name, value in values.items():
            place, known = self.claims.setdefault((subject, name), (where, value))
            if not same(value, known):
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
            with path.open("rb") as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    self.torn[name] = len(found) + 1
        except ValueError as error:
            self._say(name, str(error))
        return found

    def _setting(self, *names: str) -> Any:
        """What config.json says of a setting; ``None`` where it does not."""
        try:
            value: Any = read_object(self.path / "config.json")
        except ValueError:
            return None
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        return value

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
        digests = record.get("scores")
        if digests is not None and (not isinstance(digests, list) or len(digests) != len(record["samples"])):
            self._say(where, "it has digests of the trainer's figures for other than its Samples")
            digests = None
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
            if digests is not None:
                own = zip(record["samples"], digests, strict=True)
                self._claim(where, about, scores=[digest for sample, digest in own if sample[0] == name])
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
            if any(versions and sum(versions.values()) != size for _, size, versions in sealed):
                self._say(where, f"the versions of {about} are those of other tokens than it has to train on")
            self._claim(where, about, samples=n)
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
        alike = ("iteration", "collected", "outcome", "reward", "tokens", "reason")
        self._claim(where, about, **{name: record[name] for name in alike})
        self._claim(where, about, task=record["instance_id"], group=record["group_id"])
        self._claim(where, about, samples=len(record["samples"]) + record["left_out"]["samples"])
        if record["messages"] and len(record["turns"]) < MOST_TURNS:
            self._claim(where, about, turns=len(record["turns"]))
        if not same(record["rewards"].get("primary", record["reward"]), record["reward"]):
            self._say(where, f"the primary one of the rewards of {about} is not its reward")
        try:
            samples = [sealed_again(sample) for sample in record["samples"]]
        except ValueError as error:
            self._say(where, f"a Sample of {about} {error}")
            return
        for sample in record["samples"]:
            self._pushed(where, record["iteration"], [version for version, *_ in sample["weight_versions"]])
        whole = not record["left_out"]["samples"] and not any(sample["left_out"] for sample in record["samples"])
        if whole:
            self._claim(where, about, sealed=samples)
        figures = [scores_of(sample) for sample in record["samples"]]
        if record["outcome"] != "trained" and any(figure.told for figure in figures):
            self._say(where, f"{about} has log-probs of the trainer, and was not trained")
        elif whole and record["outcome"] == "trained" and (about, "scores") in self.claims:
            self._claim(where, about, scores=[figure.digest for figure in figures])
        if any(figure.told and not figure.whole for figure in figures):
            self._say(where, f"{about} has log-probs or advantages of the trainer for some of its trained tokens only")
        self.differences[record["iteration"]] += [figure.difference for figure in figures if figure.told]
        self.scored[record["iteration"]] += whole and record["outcome"] == "trained"
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
        found: dict[str, float] = {
            "train/tokens_trained": tokens,
            "rollout/tokens_under_mask": tokens,
            "train/samples": len(samples),
        }
        found["train/rollouts"] = sum(len(line["rollouts"]) for line in self.batches[iteration])
        before = self.versions.get(iteration - 1, "0")
        policy = int(before) if before.isdecimal() else 0
        ages = {(policy - int(version)): 0 for one in samples for version in one[3] if version.isdecimal()}
        for version, n in ((version, n) for one in samples for version, n in one[3].items() if version.isdecimal()):
            ages[policy - int(version)] += n
        found |= {"rollout/staleness_max": max(ages)} if ages else {}
        if tokens and sum(ages.values()) == tokens:
            found["rollout/staleness_mean"] = sum(age * n for age, n in ages.items()) / tokens
        found = found if (self.path / _TRAINED).exists() else {}
        if (self.path / _GROUPS).exists():
            found |= sums_of(self.collected[iteration])
        named = {name for name in record if name.startswith(("rollout/failed/", "rollout/dropped/"))}
        for name in sorted({*found, *named}):
            if not same(record.get(name) or 0, found.get(name) or 0):
                self._say(where, f"{name} is {record.get(name)!r}, and {found.get(name)!r} by the groups trained on")

        most = max(self.differences[iteration], default=0.0)
        told = record.get("train/logprob_diff_max")
        kept_all = self.scored[iteration] and self.scored[iteration] == found.get("train/rollouts")
        if kept_all and isinstance(told, int | float) and told > most * (1 + 1e-4) + 1e-6:
            self._say(
                where, f"train/logprob_diff_max is {told!r}, and {most!r} at most by the tokens that were trained"
            )

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
            for name in (row[0] for row in missing if row[3:5] != _AS_ITS_GROUP_ENDED):
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
