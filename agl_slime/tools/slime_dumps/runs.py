"""slime's own runs: dumps of ``--dump-details`` or ``--save-debug-rollout-data``, converted to metrics.jsonl,
groups.jsonl and rollouts.jsonl in a temporary directory of this process."""

from __future__ import annotations

import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agl_slime import metric_names as names
from agl_slime.data.credit import mask_of
from agl_slime.data.results import GroupResult, MemberResult, Outcome
from agl_slime.errors import ConfigError
from agl_slime.events import IterationFinished
from agl_slime.loop.metrics import collect_metrics, eval_metrics
from agl_slime.report.files import IterationFile, RunDir, cut, jsonable
from agl_slime.report.metrics import MetricsWriter
from agl_slime.report.rollouts import Pieces, SizeBudget, choose_rollouts, describe_group, describe_member
from agl_slime.tools.slime_dumps.files import (
    DumpedSample,
    TrainedRow,
    is_train_dump,
    key_of,
    load,
    optimizer_steps,
    samples_of,
    trained_rows,
)

_FOLDERS = ("", "rollout_data", "train_data")
# {rollout_id}.pt with any prefix of the path template; before 624b824 train data ended in _rank
_NAME = re.compile(r"(?!global_dataset_state_dict)(?:.*?\D)??(eval_)?(\d+)(?:_\d+)?\.pt")
_ALL_BYTES, _MOST_BYTES = 64 * 2**20, 256 * 2**20  # of dumps whose rollouts are all kept; of kept rollouts
_UNFINISHED = {"aborted": Outcome.CANCELLED, "failed": Outcome.FAILED, "pending": Outcome.FAILED}
_NO_SETTINGS = "slime's files have no settings, times or loss: these are not shown."
_NO_TRAIN = (
    "There is no train data (--dump-details writes it): trained rollouts and the trainer's log-probs are unknown."
)
_NO_TOKENIZER = "There is no tokenizer.json next to the files: tokens are shown as ids (--tokenizer names a directory)."


class SlimeRuns:
    """Finds the runs that slime dumped (``agl_slime.report.read.Convert``), so that all readers of a path share its
    converted files. ``tokenizer`` as in ``SlimeRun``."""

    def __init__(self, tokenizer: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._runs: dict[Path, SlimeRun] = {}

    def __call__(self, path: Path) -> SlimeRun | None:
        if path not in self._runs and dump_files(path):
            self._runs[path] = SlimeRun(path, self._tokenizer)
        return self._runs.get(path)


def dump_files(path: Path) -> dict[int, dict[Path, bool]]:
    """The files at ``path`` by rollout id; True for files of an evaluation."""
    files: dict[int, dict[Path, bool]] = defaultdict(dict)
    for folder in (path / name for name in _FOLDERS):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (name := _NAME.fullmatch(file.name)) and len(name[2]) < 16:
                files[int(name[2])][file] = name[1] is not None
    return dict(sorted(files.items()))


def is_dump(path: Path) -> bool:
    """Whether ``path`` has dumps of slime's and is not the directory of a run of ours."""
    return not RunDir(path).config.exists() and bool(dump_files(path))


@dataclass(frozen=True, kw_only=True)
class DumpedStep:
    """The dumps of a rollout id. ``rows`` are the trainer's, by the ``id`` of the Sample; ``groups`` were
    sampled for training, ``evals`` for an evaluation."""

    number: int
    samples: Sequence[DumpedSample]
    """For training, in slime's order."""
    rows: Mapping[int, TrainedRow]
    has_train_data: bool
    optimizer_steps: int
    """0 if the files do not say."""
    groups: Sequence[GroupResult]
    evals: Sequence[GroupResult]
    conversations: Mapping[str, Sequence[Mapping[str, str]]]
    """Messages by rollout."""


class SlimeRun:
    """The run that slime dumped at ``path``. ``update`` converts new files into the directory ``run``. ``tokenizer`` is
    a directory with a ``tokenizer.json``."""

    def __init__(self, path: Path, tokenizer: Path | None = None) -> None:
        self.path = path
        self._directory = tempfile.TemporaryDirectory(prefix="agl-slime-report-")
        self.run = RunDir(Path(self._directory.name))
        self.rewritten = 0
        """How often earlier lines were replaced."""
        self._files: dict[int, dict[Path, tuple[int, int]]] = {}
        self._errors: dict[Path, str] = {}
        self._trained: set[int] = set()
        self._metrics = MetricsWriter(self.run.metrics, warn=lambda text, key: None)
        self._groups, self._rollouts = IterationFile(self.run.groups), IterationFile(self.run.rollouts)
        self._budget = SizeBudget(_MOST_BYTES)
        self._lock = threading.Lock()
        self._tokenizer = _tokenizer(path / "tokenizer" if tokenizer is None else tokenizer)
        self._pieces = Pieces(self._tokenizer or _AS_IDS)

    def absent(self) -> list[str]:
        """Sentences about missing data."""
        missing = {_NO_SETTINGS: True, _NO_TRAIN: not self._trained, _NO_TOKENIZER: self._tokenizer is None}
        return [text for text, applies in missing.items() if applies]

    def damage(self) -> list[str]:
        """Sentences about unreadable files and Samples."""
        return [f"{path.relative_to(self.path)} {error}." for path, error in self._errors.items()]

    def update(self) -> None:
        """Convert new files. A changed or additional file of an earlier rollout id is converted with all later ids."""
        with self._lock:
            dumps = dump_files(self.path)
            now = {number: {file: _identity(file) for file in files} for number, files in dumps.items()}
            new = [number for number in now if now[number] != self._files.get(number)]
            if new and any(number >= new[0] for number in self._files):
                self.rewritten += 1
                for file in (self._metrics, self._groups, self._rollouts):
                    file.close()
                cut(new[0] - 1, self.run.metrics, self.run.groups, self.run.rollouts)
            for number in now if new else ():
                if number >= new[0]:
                    self._files[number] = now[number]
                    self._read(number, dumps[number])

    def step(self, number: int) -> DumpedStep:
        """The dump of the rollout id ``number``. Raises ``ConfigError`` if there is none, or a file cannot be read."""
        dumps = dump_files(self.path)
        if number not in dumps:
            present = f"{min(dumps, default=0)} to {max(dumps, default=-1)}"
            raise ConfigError(f"{self.path} has no rollout id {number}, only {present}")
        step = self._load(number, dumps[number])
        if damaged := [file for file, evaluation in dumps[number].items() if file in self._errors and not evaluation]:
            raise ConfigError(f"{damaged[0]} {self._errors[damaged[0]]}")
        return step

    def describe(self, step: DumpedStep, rollouts: Iterable[str]) -> dict[str, dict[str, Any]]:
        """These ``rollouts`` of ``step`` by id, as lines of ``rollouts.jsonl``."""
        groups = self._lines(step, dict.fromkeys(rollouts, "all"))
        return {record["rollout_id"]: record for _, lines in groups for record in lines}

    def _load(self, number: int, files: Mapping[Path, bool]) -> DumpedStep:
        dumped: dict[bool, list[DumpedSample]] = {False: [], True: []}
        rows: dict[bytes, list[TrainedRow]] = defaultdict(list)
        self._trained.discard(number)
        steps = 0
        for path, evaluation in files.items():
            self._errors.pop(path, None)
            try:
                value = load(path)
                if is_train_dump(value):
                    for key, row in trained_rows(value):
                        rows[key].append(row)
                    self._trained.add(number)
                    steps = max(steps, optimizer_steps(value))
                    continue
                read = list(samples_of(value))
            except ValueError as error:
                self._errors[path] = f"is left out: it {error}"
                continue
            dumped[evaluation] += [dump for dump in read if not isinstance(dump, str)]
            if bad := [(position, dump) for position, dump in enumerate(read) if isinstance(dump, str)]:
                self._errors[path] = f"has {len(bad)} Samples that are left out; number {bad[0][0]} {bad[0][1]}"
        scores = {id(dump.sample): row for dump in dumped[False] if (row := _take(rows, dump)) is not None}
        conversations: dict[str, list[dict[str, str]]] = {}
        groups = [self._group(number, name, part, scores, conversations) for name, part in _groups(dumped[False])]
        evals = [self._group(number, name, part, {}, {}) for name, part in _groups(dumped[True])]
        return DumpedStep(
            number=number,
            samples=dumped[False],
            rows=scores,
            has_train_data=number in self._trained,
            optimizer_steps=steps,
            groups=groups,
            evals=evals,
            conversations=conversations,
        )

    def _read(self, number: int, files: Mapping[Path, bool]) -> None:
        step = self._load(number, files)
        evaluated = [member for group in step.evals for member in group.members]
        metrics = collect_metrics(step.groups, collect_s=0) if step.groups else {}
        metrics |= _train_metrics(list(step.rows.values())) | (eval_metrics(evaluated) if evaluated else {})
        self._write(step)
        self._metrics.handle(IterationFinished(iteration=number, metrics=metrics))

    def _group(
        self,
        number: int,
        group: str,
        dumped: Sequence[DumpedSample],
        rows: Mapping[int, TrainedRow],
        conversations: dict[str, list[dict[str, str]]],
    ) -> GroupResult:
        """A group with one member per rollout; their messages are added to ``conversations``."""
        members_dumps: dict[str, list[DumpedSample]] = defaultdict(list)
        for position, dump in enumerate(dumped):
            rollout = dump.sample.rollout_id
            rollout = dump.sample.index if rollout is None else rollout
            name = f"{number}-{group}-{position}s" if rollout is None else f"{number}-{group}-{rollout}"
            members_dumps[name].append(dump)
        members = []
        for name, part in members_dumps.items():
            conversations[name] = [message for dump in part for message in (*dump.messages, *self._response(dump))]
            first = part[0].sample
            status, row = first.status.value, rows.get(id(first))
            reward = row.raw_reward if row is not None and row.raw_reward is not None else part[0].reward
            failure = status if status in _UNFINISHED else None if reward is not None else "no_reward"
            members.append(
                MemberResult(
                    rollout_id=name,
                    group_id=group,
                    samples=tuple(dump.sample for dump in part),
                    reward=reward,
                    rewards=part[0].rewards,
                    sampled_tokens=sum(int(mask_of(dump.sample).sum()) for dump in part),
                    turns=max(first.metadata.get("turns", 1), 0),
                    failure=failure,
                    outcome_if_failed=_UNFINISHED.get(status, Outcome.FAILED),
                    instance_id=first.metadata.get("instance_id"),
                )
            )
        ready = any(member.ok for member in members)
        code = "" if ready else members[0].failure or ""
        about: dict[str, Any] = {"group_id": f"{number}-{group}", "mode": "train", "size": len(members)}
        return GroupResult(**about, members=tuple(members), ready=ready, code=code)

    def _response(self, dump: DumpedSample) -> Iterator[dict[str, str]]:
        """The messages after the prompt: sampled text, and the environment's text between."""
        sample, mask = dump.sample, dump.sample.loss_mask
        if self._tokenizer is None or mask is None or all(mask):
            yield {"role": "assistant", "content": sample.response}
            return
        ids = sample.tokens[len(sample.tokens) - sample.response_length :]
        for sampled, part in groupby(range(sample.response_length), key=lambda index: bool(mask[index])):
            text = self._tokenizer.decode([ids[index] for index in part])
            yield {"role": "assistant" if sampled else "environment", "content": text}

    def _write(self, step: DumpedStep) -> None:
        rewards = {member.rollout_id: member.reward for group in step.groups for member in group.members}
        labels: dict[str, str] = {}
        if sum(size for files in self._files.values() for _, size in files.values()) <= _ALL_BYTES:
            labels = dict.fromkeys(rewards, "all")
        elif self._budget.allows(step.number):
            labels = choose_rollouts(rewards, iteration=step.number)
        lines, rollout_lines = [], []
        for line, records in self._lines(step, labels):
            rollout_lines += records
            lines.append({**line, "kept": [rollout_id for rollout_id in line["rollouts"] if rollout_id in labels]})
        self._rollouts.append(step.number, rollout_lines)
        self._groups.append(step.number, lines)

    def _lines(
        self, step: DumpedStep, labels: Mapping[str, str]
    ) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """A line of each group, with the lines of its rollouts that have a label."""
        rows = step.rows
        for group in step.groups:
            line, rollout_lines = describe_group(group, collected=step.number), []
            for number, member in enumerate(group.members):
                if any(id(sample) in rows and rows[id(sample)].mask.any() for sample in member.samples):
                    line["outcomes"][number] = "trained"
            for member, outcome in zip(group.members, line["outcomes"], strict=True):
                if label := labels.get(member.rollout_id):
                    record = describe_member(member, line, self._pieces, lambda s, _: _scores(s, rows.get(id(s))))
                    record |= {"label": label, "outcome": outcome}
                    rollout_lines.append(jsonable({**record, "messages": step.conversations[member.rollout_id]}))
            yield line, rollout_lines


def _groups(dumped: Sequence[DumpedSample]) -> Iterator[tuple[str, list[DumpedSample]]]:
    """Samples by slime's group index; one without an index is a group by itself."""
    groups: dict[str, list[DumpedSample]] = defaultdict(list)
    for position, dump in enumerate(dumped):
        groups[f"s{position}" if dump.sample.group_index is None else f"g{dump.sample.group_index}"].append(dump)
    yield from groups.items()


def _take(rows: Mapping[bytes, list[TrainedRow]], dump: DumpedSample) -> TrainedRow | None:
    same = rows.get(key_of(dump.sample.tokens, dump.sample.response_length))
    return same.pop(0) if same else None


def _scores(sample: Any, row: TrainedRow | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Log-probs and advantages under the mask, NaN where the file has none."""
    if row is None or (row.log_probs is None and row.advantages is None):
        return None
    mask, unknown = mask_of(sample), np.full(sample.response_length, np.nan)
    log_probs, advantages = (unknown if column is None else column for column in (row.log_probs, row.advantages))
    return log_probs[mask].astype("f4"), advantages[mask].astype("f4")


def _train_metrics(rows: Sequence[TrainedRow]) -> dict[str, Any]:
    """Metrics of the step, from the train data."""
    if not rows:
        return {}
    with np.errstate(invalid="ignore"):  # a file may hold infinity
        pairs = ((row.log_probs, row.engine, row.mask) for row in rows)
        differences = [(ours - engine)[mask] for ours, engine, mask in pairs if ours is not None and engine is not None]
    tokens = int(sum(row.mask.sum() for row in rows))
    metrics: dict[str, Any] = {names.TOKENS_TRAINED: tokens, "train/samples": len(rows)}
    if differences and len(sizes := np.abs(np.concatenate(differences))):
        metrics |= {names.LOGPROB_DIFF_MAX: float(sizes.max()), "train/logprob_diff_mean": float(sizes.mean())}
    return metrics


def _identity(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


_AS_IDS = SimpleNamespace(decode=lambda ids: "".join(f"‹{token}›" for token in ids))


def _tokenizer(directory: Path) -> Any:
    """A decoder, of special tokens too, by ``tokenizer.json``, which is data: no code of the directory is run."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer

        return SimpleNamespace(decode=partial(Tokenizer.from_file(str(file)).decode, skip_special_tokens=False))
    except Exception:  # not installed, or a damaged file: shown as missing
        return None
