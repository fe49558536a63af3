"""The closing summary: on the console, and as ``summary.json``.

Figures of iterations come from ``metrics.jsonl`` and cover a resumed run as a whole; outcomes of rollouts and seconds
by phase cover this process only. Entries of ``RunFinished.summary`` take precedence.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rich.console import Console
from rich.text import Text

from agl_slime import metric_names as m
from agl_slime.events import Event, PhaseStarted, RolloutFinished, RunFinished, RunStarted, Warning
from agl_slime.report.alarms import find_alarms
from agl_slime.report.console import count_reason, format_reasons, format_seconds
from agl_slime.report.files import RunDir, dump, iter_jsonl
from agl_slime.report.metrics import Validation, number, validation_of
from agl_slime.support.files import write_file
from agl_slime.support.terminal import plain

# CPU share above which rollouts and training compete for cores.
_CROWDED = 0.75
_SUMS = {
    "rollouts": m.COUNT,
    "rollouts_failed": m.FAILED,
    "tokens_under_mask": m.TOKENS_UNDER_MASK,
    "tokens_trained": m.TOKENS_TRAINED,
    "forks": m.FORKS,
    "retokenized": m.RETOKENIZED,
}


def sum_up(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of a run from its iterations; None where a metric never occurred."""
    rows = list(rows)

    def values(*keys: str) -> list[float]:
        return [value for row in rows for key in keys if (value := number(row, key)) is not None]

    rewards = values(m.REWARD_MEAN)
    both = (validation_of(row, start=start) for row in rows for start in (True, False))
    validations = [validation for validation in both if validation is not None]
    versions = [row[m.WEIGHTS_VERSION] for row in rows if row.get(m.WEIGHTS_VERSION) is not None]
    return {
        "iterations": sum(row["iteration"] > 0 or number(row, m.REWARD_MEAN) is not None for row in rows),
        "reward_first": rewards[0] if rewards else None,
        "reward_last": rewards[-1] if rewards else None,
        **_largest("reward_best", rows, m.REWARD_MEAN),
        **_validation_figures("val_first", validations[:1]),
        **_validation_figures("val_last", validations[-1:]),
        "val_difference": validations[-1].difference if validations else None,
        **_largest("logprob_diff_max", rows, m.LOGPROB_DIFF_MAX),
        **_largest("first_ratio_dev_max", rows, m.FIRST_RATIO_DEV_MAX),
        "weights_version": versions[-1] if versions else None,
        **_overlap(rows),
        **{name: int(sum(counts)) if (counts := values(key)) else None for name, key in _SUMS.items()},
    }


def _largest(name: str, rows: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """The largest value of a metric, and its iteration."""
    values = [(value, row["iteration"]) for row in rows if (value := number(row, key)) is not None]
    value, iteration = max(values, key=itemgetter(0), default=(None, None))
    return {name: value, f"{name}_iteration": iteration}


def _validation_figures(name: str, validations: Sequence[Validation]) -> dict[str, Any]:
    """Mean, interval and counts of at most one validation."""
    validation = validations[0] if validations else Validation(None, None, None, None)
    rewarded = None if validation.count is None else (validation.rewarded, validation.count)
    return {name: validation.mean, f"{name}_interval": validation.interval, f"{name}_rewarded": rewarded}


def _overlap(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """For an asynchronous run, the speed-up over the synchronous schedule and its ceiling, (roll + train + sync) /
    (max(roll, train) + sync). Both use this run's times and are too high if rollouts and training share a CPU."""
    rows = [row for row in rows if number(row, m.ROLL_S) is not None]
    roll, train, sync, wall, trainer, engine = (
        sum(number(row, key) or 0.0 for row in rows)
        for key in (m.ROLL_S, m.TRAIN_S, m.SYNC_S, m.ITERATION_S, m.TRAINER_WAITED, m.ENGINE_WAITED)
    )
    if not wall or not max(roll, train) + sync:
        return {}
    behind = [value for row in rows if (value := number(row, m.STALENESS_MEAN)) is not None]
    most = [value for row in rows if (value := number(row, m.STALENESS_MAX)) is not None]
    busy = [value for row in rows if (value := number(row, m.CPU_BUSY)) is not None]
    return {
        "speed_up": (roll + train + sync) / wall,
        "speed_up_ceiling": (roll + train + sync) / (max(roll, train) + sync),
        "trainer_waited": trainer / len(rows),
        "engine_waited": engine / len(rows),
        "cpu_busy": sum(busy) / len(busy) if busy else None,
        "staleness_mean": sum(behind) / len(behind) if behind else None,
        "staleness_max": max(most, default=None),
    }


def headline(figures: Mapping[str, Any], *, alarms: int) -> str:
    """The result of a run in a sentence: validation, else reward, from first to last; failed rollouts; alarms."""
    if not (iterations := figures.get("iterations")):
        return "no iteration was finished"
    key, name = ("reward", "reward") if figures.get("val_last") is None else ("val", "validation")
    first, last = figures.get(f"{key}_first"), figures.get(f"{key}_last")
    last_text = _mean_text(figures, f"{key}_last", digits=2)
    if last is None:
        result = "no rollout was rewarded"
    elif first is None or first == last:
        result = f"{name} {last_text}"
    else:
        _, low, high = figures.get("val_difference") or (None, last - first, last - first)
        verb, doubt = ("rose", "") if low > 0 else ("fell", "") if high < 0 else ("went", ", no clear change,")
        result = f"{name} {verb} from {first:.2f} to {last_text}{doubt}"
    text = f"{result} over {iterations} iteration{'s' if iterations > 1 else ''}"
    if rollouts := figures.get("rollouts"):
        text += f"; {(figures.get('rollouts_failed') or 0) / rollouts:.1%} of rollouts failed"
    return f"{text}; {alarms or 'no'} alarm{'s' if alarms > 1 else ''}"


def summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and text of each line. Figures that are None are left out."""
    get = summary.get
    outcome = "finished" if get("reason") == "finished" else f"stopped: {get('reason')}"
    rows = [("run", outcome), ("result", headline(summary, alarms=len(get("alarms") or ())))]
    if get("reward_first") is not None:
        best = f"  (best {get('reward_best'):.3f} in iteration {get('reward_best_iteration')})"
        rows.append(("reward", f"{get('reward_first'):.3f} -> {get('reward_last'):.3f}{best}"))
    if get("val_first") is not None or get("val_first_rewarded"):
        rows.append(("validation", _validation_text(summary)))
    if ledger := get("ledger"):  # counts every enqueued rollout; events count only executed ones
        ends = {name: count for name, count in ledger.items() if name != "opened" and count}
        rows.append(("rollouts", f"{ledger.get('opened', 0):,} enqueued: {format_reasons(ends, most=10)}"))
    elif get("outcomes"):
        rows.append(("rollouts", format_reasons(summary["outcomes"], most=10)))
    if get("reasons"):
        rows.append(("failures", format_reasons(summary["reasons"], most=5)))
    sampled, trained = get("tokens_under_mask"), get("tokens_trained")
    if sampled is not None or trained is not None:
        rows.append(("tokens", f"{_count(sampled)} sampled under mask, {_verdict(sampled, trained)}"))
    rows += _agreement_rows(summary)
    if get("speed_up") is not None:
        waited = f"training waited {get('trainer_waited'):.0%}, the engine {get('engine_waited'):.0%}"
        rows.append(("overlap", f"{get('speed_up'):.2f}x, at most {get('speed_up_ceiling'):.2f}x;  {waited}"))
    if (busy := get("cpu_busy")) is not None and busy >= _CROWDED:
        slowed = "rollouts and training slowed each other: the gain over --max-staleness 0 was smaller"
        rows.append(("shared CPU", f"{busy:.0%} busy: {slowed}"))
    if get("staleness_max") is not None:
        behind = f"{get('staleness_mean'):.2f} versions on average, {get('staleness_max'):.0f} at most"
        rows.append(("staleness", behind))
    if get("forks") is not None or get("retokenized") is not None:
        rows.append(("samples", f"{_count(get('forks'))} forks, {_count(get('retokenized'))} retokenized"))
    if get("wall_s") is not None:
        phases = sorted((get("phase_s") or {}).items(), key=lambda item: -item[1])
        phase_texts = [f"{name} {format_seconds(seconds)}" for name, seconds in phases if seconds >= 0.005]
        rows.append(("wall time", "  ".join([format_seconds(summary["wall_s"]), *phase_texts])))
    rows += [("warning", text + (f" (x{times})" if times > 1 else "")) for text, times in get("warnings") or ()]
    for alarm in get("alarms") or ():
        rows.append(("alarm", f"iteration {alarm['iteration']}: {alarm['text']}. Advice: {alarm['advice']}"))
    rows += [(label, path) for label, path in (get("files") or {}).items()]
    if model := (get("files") or {}).get("model"):
        run = str(Path(model).parent)
        rows.append(("look at it", shlex.join(["agl-slime", "report", run])))
        rows.append(("is it better", shlex.join(["agl-slime", "eval", run, "--with-start"])))
        rows.append(("watch it", shlex.join(["agl-slime", "try", "--model", run])))
        rows.append(("serve it", shlex.join(["python", "-m", "sglang.launch_server", "--model-path", model])))
    rows += [("note", note) for note in get("notes") or ()]
    return rows


def _validation_text(summary: Mapping[str, Any]) -> str:
    """The first and the last validation, and their difference."""
    first, last = (_mean_text(summary, name, digits=3) for name in ("val_first", "val_last"))
    if (values := summary.get("val_difference")) is None:
        return f"{first} -> {last}"
    return f"{first} -> {last}, task by task {{:+.3f}} [{{:+.3f}}, {{:+.3f}}]".format(*values)


def _mean_text(figures: Mapping[str, Any], name: str, *, digits: int) -> str:
    """A mean of ``sum_up`` with its interval, and with its counts if rollouts failed."""
    text = Validation(figures.get(name), None, *(figures.get(f"{name}_rewarded") or (None, None))).format(digits)
    if (interval := figures.get(f"{name}_interval")) is None:
        return text
    return f"{text} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def _agreement_rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The largest differences of trainer and engine in the run."""
    if (difference := summary.get("logprob_diff_max")) is not None:
        worst = f"(iteration {summary.get('logprob_diff_max_iteration')})"
        yield "log-prob difference", f"{difference:.1e} at most between trainer and engine {worst}"
    if (deviation := summary.get("first_ratio_dev_max")) is not None:
        text = f"within {deviation:.1e} of 1 (iteration {summary.get('first_ratio_dev_max_iteration')})"
        caveat = "; meaningless for retokenized samples: the trainer computed both sides"
        yield "first ratio", text + (caveat if summary.get("retokenized") else "")


def _verdict(sampled: float | None, trained: float | None) -> str:
    if trained is None:
        return "none reported as trained" if sampled else "nothing was trained"
    return f"{_count(trained)} trained: {'equal' if sampled == trained else 'NOT EQUAL'}"


def _count(value: float | None) -> str:
    return "?" if value is None else f"{value:,.0f}"


def show(rows: Sequence[tuple[str, str]], console: Console) -> None:
    """Print the rows, aligned; paths are never wrapped."""
    width = max(len(label) for label, _ in rows)
    console.print()
    for label, text in rows:
        alarming = label in ("warning", "alarm") or text.endswith("NOT EQUAL")
        style = "bold red" if alarming else "bold" if label in ("run", "reward") else ""
        console.print(Text.assemble((f"{label:<{width}}  ", "dim"), (plain(text), style)), soft_wrap=True)


@runtime_checkable
class Output(Protocol):
    """A file or directory that a reporter writes; ``note`` is a sentence for the case that it is missing."""

    path: Path
    note: str


@dataclass
class ModelOfRun:
    """The weights of the run, for the summary."""

    path: Path
    note: str = "no model directory was written: there is no checkpoint, or it is slime's (docs/after-the-run.md)"


class SummaryReporter:
    """Prints and writes the summary when the run ends, with the paths of ``outputs`` by label. The last reporter, so
    that all other files exist."""

    def __init__(self, run: RunDir, *, outputs: Mapping[str, Output], console: Console) -> None:
        self._run, self._outputs, self._console = run, outputs, console
        self._outcomes: dict[str, Counter[str]] = {"train": Counter(), "val": Counter()}
        self._reasons: Counter[str] = Counter()
        self._phase_s: dict[str, float] = {}
        self._warnings: dict[str, list[Any]] = {}
        self._phase = "start-up"
        self._phase_at: float | None = None

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._phase_at = event.at
        elif isinstance(event, PhaseStarted):
            self._enter(event.phase, event.at)
        elif isinstance(event, RolloutFinished):
            count_reason(self._outcomes[event.mode], event.outcome)
            if event.outcome == "failed":
                count_reason(self._reasons, event.reason or "unknown")
        elif isinstance(event, Warning):
            if event.key in self._warnings or len(self._warnings) < 100:
                self._warnings.setdefault(event.key, [event.text, 0])[1] += 1
        elif isinstance(event, RunFinished):
            self._finish(event)

    def close(self) -> None:
        """Nothing to release."""

    def _enter(self, phase: str, time: float) -> None:
        if self._phase_at is not None:
            self._phase_s[self._phase] = self._phase_s.get(self._phase, 0.0) + time - self._phase_at
        self._phase, self._phase_at = phase, time

    def _finish(self, event: RunFinished) -> None:
        self._enter("end", event.at)
        files = {label: str(output.path) for label, output in self._outputs.items() if output.path.exists()}
        notes = [*{output.note: None for label, output in self._outputs.items() if label not in files}]  # each once
        metrics = self._run.metrics
        steps = list(iter_jsonl(metrics)) if metrics.exists() else []
        figures = sum_up(steps)
        groups = iter_jsonl(self._run.groups) if self._run.groups.exists() else ()
        warned = {text for text, _ in self._warnings.values()}
        alarms = [alarm for alarm in find_alarms(steps, list(groups)) if not any(alarm.text in text for text in warned)]
        if not figures["tokens_trained"] and files.pop("model", None):
            notes.append(f"nothing was trained: {self._run.model} has the weights that the run began with")
        summary: dict[str, Any] = {
            "reason": event.reason,
            **figures,
            "outcomes": dict(self._outcomes["train"]),
            "val_outcomes": dict(self._outcomes["val"]),
            "reasons": dict(self._reasons),
            "wall_s": sum(self._phase_s.values()),
            "phase_s": self._phase_s,
            "warnings": list(self._warnings.values()),
            "alarms": [asdict(alarm) for alarm in alarms],
            "files": {**files, "summary": str(self._run.summary)},
            "notes": notes,
            **event.summary,
        }
        try:
            write_file(self._run.summary, dump(summary, indent=2))
        finally:
            show(summary_rows(summary), self._console)
