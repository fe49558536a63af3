"""A run of slime's own, which wrote ``--dump-details`` or ``--save-debug-rollout-data``, as the files that the report
reads: metrics.jsonl, groups.jsonl and rollouts.jsonl in a directory of this process's own, gone when it ends."""

from __future__ import annotations

import re
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from agl_slime import metric_names as names
from agl_slime.events import IterationFinished
from agl_slime.groups.results import GroupResult, MemberResult, Outcome
from agl_slime.loop.metrics import collect_metrics, eval_metrics
from agl_slime.report.files import IterationFile, RunDir, cut, jsonable
from agl_slime.report.metrics import MetricsWriter
from agl_slime.report.pieces import Pieces
from agl_slime.report.rollouts import describe_group, describe_member, mask_of
from agl_slime.report.sampling import SizeBudget, choose_rollouts
from agl_slime.report.slime_files import (
    DumpedSample,
    TrainedRow,
    is_train_dump,
    key_of,
    load,
    samples_of,
    trained_rows,
)

_FOLDERS = ("", "rollout_data", "train_data")
# {rollout_id}.pt behind what the template adds; _rank was the end of train data before 624b824
_NAME = re.compile(r"(?!global_dataset_state_dict)(?:.*?\D)??(eval_)?(\d+)(?:_\d+)?\.pt")
_ALL_BYTES, _MOST_BYTES = 64 * 2**20, 256 * 2**20  # of files whose rollouts are all kept; of those that are kept
_UNFINISHED = {"aborted": Outcome.CANCELLED, "failed": Outcome.FAILED, "pending": Outcome.FAILED}
_NO_SETTINGS = (
    "slime's files do not say the settings, the times and the loss of this run: what is missing is not shown."
)
_NO_TRAIN = (
    "There is no train data (--dump-details writes it): what was trained, and the trainer's log-probs, are not known."
)
_NO_TOKENIZER = "There is no tokenizer.json beside the files, so tokens are shown by their ids: --tokenizer names one."


def dump_files(path: Path) -> dict[int, dict[Path, bool]]:
    """The files of each rollout id at ``path``, each with whether it is of an evaluation."""
    found: dict[int, dict[Path, bool]] = defaultdict(dict)
    for folder in (path / name for name in _FOLDERS):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (name := _NAME.fullmatch(file.name)) and len(name[2]) < 16:
                found[int(name[2])][file] = name[1] is not None
    return dict(sorted(found.items()))


class SlimeRun:
    """What slime wrote at ``path``. ``update`` brings ``run`` up to date; ``absent`` are sentences about what slime
    does not write, ``damage`` about what cannot be read. ``tokenizer`` is a directory with a ``tokenizer.json``."""

    def __init__(self, path: Path, tokenizer: Path | None = None) -> None:
        self.path = path
        self._own = tempfile.TemporaryDirectory(prefix="agl-slime-report-")
        self.run = RunDir(Path(self._own.name))
        self.rewritten = 0
        """How often lines that were there before were written anew."""
        self._seen: dict[int, dict[Path, tuple[int, int]]] = {}
        self._wrong: dict[Path, str] = {}
        self._trained: set[int] = set()
        self._metrics = MetricsWriter(self.run.metrics, warn=lambda text, key: None)
        self._groups, self._rollouts = IterationFile(self.run.groups), IterationFile(self.run.rollouts)
        self._budget = SizeBudget(_MOST_BYTES)
        self._lock = threading.Lock()
        self._tokenizer = _tokenizer(path / "tokenizer" if tokenizer is None else tokenizer)
        self._pieces = Pieces(self._tokenizer or _Ids())

    def absent(self) -> list[str]:
        found = [_NO_SETTINGS]
        found += [_NO_TRAIN] if not self._trained else []
        return found + ([_NO_TOKENIZER] if self._tokenizer is None else [])

    def damage(self) -> list[str]:
        return [f"{path.relative_to(self.path)} {wrong}." for path, wrong in self._wrong.items()]

    def update(self) -> None:
        """Read what is new. A file that is written anew, or beside others, is read with all that come after it."""
        with self._lock:
            found = dump_files(self.path)
            now = {number: {file: _identity(file) for file in files} for number, files in found.items()}
            new = [number for number in now if now[number] != self._seen.get(number)]
            if new and any(number >= new[0] for number in self._seen):
                self.rewritten += 1
                for file in (self._metrics, self._groups, self._rollouts):
                    file.close()
                cut(new[0] - 1, self.run.metrics, self.run.groups, self.run.rollouts)
            for number in now if new else ():
                if number >= new[0]:
                    self._seen[number] = now[number]
                    self._read(number, found[number])

    def _read(self, number: int, files: Mapping[Path, bool]) -> None:
        dumped: dict[bool, list[DumpedSample]] = {False: [], True: []}
        rows: dict[bytes, list[TrainedRow]] = defaultdict(list)
        self._trained.discard(number)
        for path, evaluation in files.items():
            self._wrong.pop(path, None)
            try:
                value = load(path)
                if is_train_dump(value):
                    for key, row in trained_rows(value):
                        rows[key].append(row)
                    self._trained.add(number)
                    continue
                read = list(samples_of(value))
            except ValueError as error:
                self._wrong[path] = f"is left out: it {error}"
                continue
            dumped[evaluation] += [one for one in read if not isinstance(one, str)]
            if bad := [(at, one) for at, one in enumerate(read) if isinstance(one, str)]:
                self._wrong[path] = f"has {len(bad)} Samples that are left out; number {bad[0][0]} {bad[0][1]}"
        scores = {id(one.sample): row for one in dumped[False] if (row := _take(rows, one)) is not None}
        conversations: dict[str, list[dict[str, str]]] = {}
        groups = [self._group(number, place, own, scores, conversations) for place, own in _groups(dumped[False])]
        tested = [self._group(number, place, own, {}, {}) for place, own in _groups(dumped[True])]
        metrics = collect_metrics(groups, collect_s=0) if groups else {}
        metrics |= _train_metrics(list(scores.values())) | (eval_metrics(tested) if tested else {})
        self._write(number, groups, scores, conversations)
        self._metrics.handle(IterationFinished(iteration=number, metrics=metrics))

    def _group(
        self,
        number: int,
        place: str,
        dumped: Sequence[DumpedSample],
        rows: Mapping[int, TrainedRow],
        conversations: dict[str, list[dict[str, str]]],
    ) -> GroupResult:
        """A group with its members: the Samples of one rollout are one. ``conversations`` gets those of its members."""
        parts: dict[str, list[DumpedSample]] = defaultdict(list)
        for at, one in enumerate(dumped):
            rollout = one.sample.rollout_id
            rollout = one.sample.index if rollout is None else rollout
            parts[f"{number}-{place}-{at}s" if rollout is None else f"{number}-{place}-{rollout}"].append(one)
        members = []
        for name, own in parts.items():
            conversations[name] = [message for one in own for message in (*one.messages, *self._response(one))]
            status, raw = own[0].sample.status.value, rows.get(id(own[0].sample))
            reward = raw.raw_reward if raw is not None and raw.raw_reward is not None else own[0].reward
            failure = status if status in _UNFINISHED else None if reward is not None else "no_reward"
            members.append(
                MemberResult(
                    rollout_id=name,
                    group_id=place,
                    samples=tuple(one.sample for one in own),
                    reward=reward,
                    rewards=own[0].rewards,
                    sampled_tokens=sum(int(mask_of(one.sample).sum()) for one in own),
                    turns=max(own[0].sample.metadata.get("turns", 1), 0),
                    failure=failure,
                    outcome_if_failed=_UNFINISHED.get(status, Outcome.FAILED),
                    instance_id=own[0].sample.metadata.get("instance_id"),
                )
            )
        ready = any(member.ok for member in members)
        code = "" if ready else members[0].failure or ""
        return GroupResult(
            group_id=f"{number}-{place}",
            mode="train",
            size=len(members),
            members=tuple(members),
            ready=ready,
            code=code,
        )

    def _response(self, one: DumpedSample) -> Iterator[dict[str, str]]:
        """What follows the prompt: what was sampled, and what the environment put between."""
        sample, mask = one.sample, one.sample.loss_mask
        if self._tokenizer is None or mask is None or all(mask):
            yield {"role": "assistant", "content": sample.response}
            return
        ids = sample.tokens[len(sample.tokens) - sample.response_length :]
        for own, part in groupby(range(sample.response_length), key=lambda at: bool(mask[at])):
            text = self._tokenizer.decode([ids[at] for at in part])
            yield {"role": "assistant" if own else "environment", "content": text}

    def _write(
        self,
        number: int,
        groups: Sequence[GroupResult],
        rows: Mapping[int, TrainedRow],
        conversations: Mapping[str, Sequence[Mapping[str, str]]],
    ) -> None:
        rewards = {member.rollout_id: member.reward for group in groups for member in group.members}
        labels: dict[str, str] = {}
        if sum(size for files in self._seen.values() for _, size in files.values()) <= _ALL_BYTES:
            labels = dict.fromkeys(rewards, "all")
        elif self._budget.allows(number):
            labels = choose_rollouts(rewards, iteration=number)
        lines, kept = [], []
        for group in groups:
            line = describe_group(group, collected=number)
            trained = [
                any(id(s) in rows and rows[id(s)].mask.any() for s in member.samples) for member in group.members
            ]
            line["outcomes"] = ["trained" if one else was for one, was in zip(trained, line["outcomes"], strict=True)]
            for member, outcome in zip(group.members, line["outcomes"], strict=True):
                if label := labels.get(member.rollout_id):
                    whole = describe_member(member, line, self._pieces, lambda s, _: _scores(s, rows.get(id(s))))
                    whole |= {"label": label, "outcome": outcome, "messages": conversations[member.rollout_id]}
                    kept.append(jsonable(whole))
            lines.append({**line, "kept": [one for one in line["rollouts"] if one in labels]})
        self._rollouts.append(number, kept)
        self._groups.append(number, lines)


def _groups(dumped: Sequence[DumpedSample]) -> Iterator[tuple[str, list[DumpedSample]]]:
    """By the number that slime gave each group; a Sample without one is a group of its own."""
    found: dict[str, list[DumpedSample]] = defaultdict(list)
    for at, one in enumerate(dumped):
        found[f"s{at}" if one.sample.group_index is None else f"g{one.sample.group_index}"].append(one)
    yield from found.items()


def _take(rows: Mapping[bytes, list[TrainedRow]], one: DumpedSample) -> TrainedRow | None:
    same = rows.get(key_of(one.sample.tokens, one.sample.response_length))
    return same.pop(0) if same else None


def _scores(sample: Any, row: TrainedRow | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Log-probs and advantages under the mask, NaN where the file has none."""
    if row is None or (row.log_probs is None and row.advantages is None):
        return None
    mask, unknown = mask_of(sample), np.full(sample.response_length, np.nan)
    log_probs, advantages = (unknown if told is None else told for told in (row.log_probs, row.advantages))
    return log_probs[mask].astype("f4"), advantages[mask].astype("f4")


def _train_metrics(rows: Sequence[TrainedRow]) -> dict[str, Any]:
    """What the train data says of the step."""
    if not rows:
        return {}
    with np.errstate(invalid="ignore"):  # a file may hold infinity
        both = [
            (row.log_probs - row.engine)[row.mask]
            for row in rows
            if row.log_probs is not None and row.engine is not None
        ]
    differences = np.abs(np.concatenate(both)) if both else np.zeros(0)
    found: dict[str, Any] = {names.TOKENS_TRAINED: int(sum(row.mask.sum() for row in rows)), "train/samples": len(rows)}
    if len(differences):
        found |= {
            names.LOGPROB_DIFF_MAX: float(differences.max()),
            "train/logprob_diff_mean": float(differences.mean()),
        }
    return found


def _identity(path: Path) -> tuple[int, int]:
    try:
        about = path.stat()
    except OSError:
        return 0, 0
    return about.st_mtime_ns, about.st_size


class _Ids:
    """Tokens where there is no tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"‹{one}›" for one in ids)


def _tokenizer(directory: Path) -> Any:
    """What turns ids into text: data, without code of the directory's."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        from tokenizers import Tokenizer

        return _Whole(Tokenizer.from_file(str(file)))
    except Exception:  # not installed, or whatever a damaged file makes of it: shown as not there
        return None


class _Whole:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens too."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)
