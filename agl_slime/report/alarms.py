"""Alarms of a run, each with evidence and advice: pure functions over the recorded metrics and groups.

An alarm is raised once per kind (and per reason, tool or metric), for the first iteration that shows it. The limits are
rules of thumb, chosen so that a run that learns raises none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from agl_slime import metric_names as m
from agl_slime.data.normalize import all_equal
from agl_slime.loop.metrics import FAILED_SHARE
from agl_slime.report.metrics import number

MIN_ROLLOUTS, MIN_GROUPS = 8, 4  # of an iteration; below these a share says nothing
CONSECUTIVE = 3  # iterations, for alarms that one iteration may raise by chance
HISTORY = 5  # least number of earlier values that a jump is compared with
SAME_SHARE, ABORTED_SHARE, TRUNCATED_SHARE, ALIKE_SHARE = 0.8, 0.3, 0.3, 0.5
TOOL_FAILED_SHARE = 0.9  # of the calls of a tool in an iteration
UNCALLED_ROLLOUTS = 32  # rollouts with a tool on offer and no call of it
JUMP = 10.0  # times the median of earlier values
STALL, STALL_S = 5.0, 10.0  # times that median, and at least this many seconds more
MIN_KL = 0.05  # nats; smaller rises are ignored
# Nats between engine and trainer in any iteration: a bfloat16 engine has a mean below 0.05, and at 10 a token counts
# 22,000 times.
MAX_MEAN_DIFF, MAX_DIFF = 0.1, 10.0
BIAS = 0.2  # of the mean length
# Of a framework's one SQLite file for all runs, and of HTTP clients behind a proxy.
_FRAMEWORK_ERRORS = {"OperationalError", "DatabaseOperationError", "APIConnectionError", "ConnectError", "ProxyError"}
_Member = tuple[str, str, str]
"""Rollout id, outcome and reason."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """An observation (``text``) with ``advice``. ``iteration`` is the first that shows it, ``about`` the tool or reason
    where a kind has several. The page shows the evidence: the chart of ``metric``, an example ``rollout``."""

    kind: str
    iteration: int
    text: str
    advice: str
    about: str = ""
    metric: str = ""
    rollout: str = ""


@dataclass
class _Step:
    """The records of an iteration."""

    iteration: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    members: list[_Member] = field(default_factory=list)

    def share(self, condition: Callable[[_Member], bool]) -> tuple[float, str]:
        """The share of members that satisfy ``condition``, and the id of the first; 0 where there are too few."""
        hits = [member for member in self.members if condition(member)]
        return (len(hits) / len(self.members), hits[0][0]) if hits and len(self.members) >= MIN_ROLLOUTS else (0.0, "")


def find_alarms(metrics: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """The alarms of a run in the order of their iterations, from the lines of metrics.jsonl and groups.jsonl. Missing
    fields raise no alarm."""
    steps = _steps(metrics, groups)
    return _once(sorted((alarm for check in _CHECKS for alarm in check(steps)), key=lambda alarm: alarm.iteration))


def find_step_alarms(groups: Sequence[Mapping[str, Any]], *, best: float | None) -> list[Alarm]:
    """The alarms that a current run warns of, from the groups of one iteration: silent tools, broken tools, and
    identical answers that earn less than ``best``, the highest reward so far."""
    steps = _steps((), [{**group, "iteration": group["collected"]} for group in groups])
    return _once([*silent_tools(steps), *broken_tools(steps), *alike(steps, best=best)])


def _once(alarms: Iterable[Alarm]) -> list[Alarm]:
    """The first alarm of each kind, subject and metric; the checks raise one for every iteration that shows it."""
    first: dict[tuple[str, ...], Alarm] = {}
    for alarm in alarms:
        first.setdefault((alarm.kind, alarm.about, alarm.metric), alarm)
    return [*first.values()]


def zero_variance(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Groups with equal rewards; those with identical answers too are left to ``alike``."""

    def share(step: _Step) -> float:
        judged = [group for group in step.groups if len(_rewards(group)) > 1 and not group.get("alike")]
        same = sum(all_equal(_rewards(group)) for group in judged)
        return same / len(judged) if len(judged) >= MIN_GROUPS else 0.0

    untaught = (step for step in steps if not _has_teacher(step))
    for first, duration in _streaks([*untaught], lambda step: share(step) > SAME_SHARE and not any(_broken(step))):
        text = f"in {share(first):.0%} of the groups all rewards are equal, {duration}: their advantage is 0"
        advice = "easier or harder tasks, more rollouts per prompt (--n-samples-per-prompt), a reward with more steps,"
        advice += " or --drop-zero-variance, which replaces such groups"
        yield _alarm("zero variance", first, text, advice, metric="rollout/groups_zero_variance")


def abort_storms(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Many cancelled or aborted rollouts in an iteration."""
    for step in steps:
        share, example = step.share(_aborted)
        if share > ABORTED_SHARE:
            text = f"{share:.0%} of the rollouts were cancelled or aborted ({_reasons(step, _aborted)})"
            advice = "a longer --group-timeout or --rollout-timeout, fewer rollouts in flight (--max-concurrent)"
            yield _alarm("storm of aborts", step, text, f"{advice}, and the engine's log", rollout=example)


def truncation(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Many truncated rollouts."""

    def share(step: _Step) -> float:
        truncated = sum(int(group.get("truncated") or 0) for group in step.groups)
        return truncated / len(step.members) if len(step.members) >= MIN_ROLLOUTS else 0.0

    for first, duration in _streaks(steps, lambda step: share(step) > TRUNCATED_SHARE):
        text = f"{share(first):.0%} of the rollouts were cut off by a limit, {duration}"
        advice = "more --max-new-tokens or --max-turns, or a reward that does not pay for length"
        yield _alarm("truncation", first, text, advice, metric="rollout/truncated")


def silent_tools(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Offered tools that no rollout called."""
    offered: Counter[str] = Counter()
    called: set[str] = set()
    malformed, example = 0, ""
    for step in steps:
        for group in step.groups:
            tools = group.get("tools") or {}
            offered.update(tools.get("offered") or {})
            called |= set(tools.get("calls") or ())
            malformed += int(tools.get("malformed") or 0)
            example = example or str(tools.get("example") or "")
        for name, n in offered.items():
            if n >= UNCALLED_ROLLOUTS and name not in called:
                text = f"tool {name!r} was never called in {n} rollouts; {malformed} calls could not be parsed"
                text += f", such as {example!r:.120}" if example else ""
                advice = "compare the tool parser with the format that the model writes calls in, and say in the prompt"
                yield _alarm("silent tool", step, text, f"{advice} when to call it", about=name)


def broken_tools(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Tools of which nearly every call fails."""
    for step in steps:
        for name, failed, calls, failure in _broken(step):
            text = f"{failed} of {calls} calls of tool {name!r} failed: {failure}"
            advice = "run the tool alone on this machine: the model sees the error as the tool's result, and is "
            advice += "trained on it"
            yield _alarm("broken tool", step, text, advice, about=name, metric=m.TOOL_ERRORS)


def _broken(step: _Step) -> Iterator[tuple[str, int, int, str]]:
    """Name, failed calls, all calls and an error text of each broken tool."""
    calls: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for tools in (group.get("tools") or {} for group in step.groups):
        calls.update(tools.get("calls") or {})
        failed.update(tools.get("failed") or {})
        failures = {**(tools.get("failures") or {}), **failures}
    for name, n in failed.items():
        if n >= MIN_ROLLOUTS and n >= TOOL_FAILED_SHARE * calls[name]:
            yield name, n, calls[name], failures.get(name, "").removeprefix("Error: ")


def alike(steps: Sequence[_Step], *, best: float | None = None) -> Iterator[Alarm]:
    """Groups with token-identical answers that earn less than the best reward so far."""
    best = float("-inf") if best is None else best
    for step in steps:
        best = max([best, *(reward for group in step.groups for reward in _rewards(group))])
        improvable = [group for group in step.groups if "alike" in group and max(_rewards(group), default=best) < best]
        same = [group for group in improvable if group["alike"]]
        if len(improvable) >= MIN_GROUPS and len(same) > ALIKE_SHARE * len(improvable):
            text = f"in {len(same)} of {len(improvable)} groups below the best reward all answers are token-identical"
            advice = "a higher --temperature, a lower --local.lr, a KL term (--local.kl-coef): the policy has collapsed"
            yield _alarm("answers alike", step, text, advice, rollout=str((same[0].get("rollouts") or [""])[0]))


@dataclass(frozen=True)
class _Jump:
    """A ``metric`` that must not exceed ``factor`` times the median of earlier values by ``rise``. ``text`` formats the
    value and the median."""

    kind: str
    metric: str
    factor: float
    rise: float
    text: str
    advice: str


_SLOW = "took {:.0f} s where {:.1f} s was usual"
_LOAD = "other load of this machine at that time, and the engine's log"
_HANGS = "the timelines of this step's rollouts: a tool or judge that hangs, one rollout that is far longer"
_HANGS += " (--rollout-timeout, --group-timeout), or an engine that was restarted"
_SMALLER_STEPS = "a lower --local.lr, fewer --local.epochs, a smaller --local.grad-clip"
_JUMPS = (
    _Jump("stall", "perf/collect_s", STALL, STALL_S, f"collect {_SLOW}", _HANGS),
    _Jump("stall", "perf/train_s", STALL, STALL_S, f"train {_SLOW}", _LOAD),
    _Jump("stall", "perf/sync_s", STALL, STALL_S, f"sync {_SLOW}", _LOAD),
    _Jump("KL jump", "train/kl", JUMP, MIN_KL, "train/kl is {:.3g} where {:.2g} was usual", _SMALLER_STEPS),
    _Jump("KL jump", "train/reference_kl", JUMP, MIN_KL, "train/reference_kl is {:.3g}, usual {:.2g}", _SMALLER_STEPS),
)


def jumps(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """A metric is far above its usual values."""
    for jump in _JUMPS:
        values: list[float] = []
        for step in steps:
            if (value := number(step.metrics, jump.metric)) is None:
                continue
            usual = median(values[-2 * HISTORY :]) if len(values) >= HISTORY else math.inf
            if value > jump.factor * usual and value > usual + jump.rise:
                yield _alarm(jump.kind, step, jump.text.format(value, usual), jump.advice, metric=jump.metric)
            values.append(value)


def wrong_logprobs(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Engine and trainer disagree so much that they cannot mean the same tokens, weights or temperature."""
    for step in steps:
        most, mean = (number(step.metrics, name) or 0.0 for name in (m.LOGPROB_DIFF_MAX, m.LOGPROB_DIFF_MEAN))
        ratio = number(step.metrics, m.FIRST_RATIO_DEV_MAX) or 0.0
        if mean > MAX_MEAN_DIFF or most > MAX_DIFF or ratio > math.exp(MAX_DIFF):
            text = f"engine and trainer differ by {most:.2g} nats at a token and {mean:.2g} on average, their ratio"
            text += f" is {1 + ratio:.2g} at most"
            advice = "agl-slime autopsy RUN, which names the cause: lost weights, another temperature, shifted tokens"
            yield _alarm("wrong log-probs", step, text, advice, metric=m.LOGPROB_DIFF_MAX)


def equal_rewards(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """All rewards since the start of the run are equal, and no teacher is learned from."""
    rewards: set[float] = set()
    judged: list[_Step] = []
    for step in steps:
        of_step = [reward for group in step.groups for reward in _rewards(group)]
        if len(rewards := rewards.union(of_step)) > 1:
            break
        judged += [step] if len(of_step) >= MIN_ROLLOUTS and not _has_teacher(step) else []
    if len(judged) >= CONSECUTIVE and len(rewards) == 1:
        text = (
            f"every reward of the first {len(judged)} iterations is {rewards.pop():g}: there is nothing to learn from"
        )
        advice = "agl-slime try shows one task with its reward; easier tasks, finer rewards, or a better model"
        yield _alarm("equal rewards", judged[0], text, advice, metric=m.REWARD_MEAN)


def mismatches(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Causes of a difference between engine and trainer that the run's autopsy named."""
    for step in steps:
        for name in step.metrics:
            prefix, _, cause = name.rpartition("/")
            if prefix == m.AUTOPSY_CAUSE and (nats := number(step.metrics, name)) is not None:
                text = f"{cause} explains {nats:.2g} nats per token of the difference between engine and trainer"
                advice = "docs/autopsy.md on this cause; agl-slime autopsy RUN shows the worst tokens"
                yield _alarm("mismatch", step, text, advice, about=cause, metric=f"{m.AUTOPSY}/sampler")


def length_bias(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Trained rollouts are longer or shorter than sampled ones."""

    def bias(step: _Step) -> float:
        sampled, trained = (number(step.metrics, name) for name in (m.RESPONSE_TOKENS, m.TRAINED_TOKENS_MEAN))
        return trained / sampled - 1 if sampled and trained is not None else 0.0

    for first, duration in _streaks(steps, lambda step: abs(bias(step)) > BIAS):
        longer = "longer" if bias(first) > 0 else "shorter"
        text = f"trained rollouts are {abs(bias(first)):.0%} {longer} than sampled ones, {duration}"
        advice = "long rollouts fail, time out or are dropped more often, so that the policy learns to be short, or the"
        advice += " reverse: look at the reasons of dropped groups, and raise the limits"
        yield _alarm("length bias", first, text, advice, metric=m.TRAINED_TOKENS_MEAN)


def failures(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Many failed rollouts in an iteration, by the main reason."""
    for step in steps:
        share, _ = step.share(_failed)
        if share > FAILED_SHARE:
            reasons = Counter(reason for _, outcome, reason in step.members if _failed(("", outcome, reason)))
            main = reasons.most_common(1)[0][0]
            example = next(name for name, outcome, reason in step.members if reason == main and outcome == "failed")
            text = f"{share:.0%} of the rollouts failed ({_reasons(step, _failed)})"
            advice = f"open a rollout that failed with {main}: its message says where"
            if main in _FRAMEWORK_ERRORS:
                advice += "; docs/any-agent.md has the limits of frameworks, agl-slime doctor the proxies"
            yield _alarm("failures", step, text, advice, about=main, metric=m.FAILED, rollout=example)


def refusals(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Requests that the gateway refused as invalid. Some clients ignore that, and a lesser attempt is rewarded."""
    for step in steps:
        counts = {status: number(step.metrics, f"gateway/refused/{status}") or 0 for status in (400, 413)}
        if n := sum(counts.values()):
            rollouts = number(step.metrics, "gateway/refused/rollouts") or 0
            count = f"{rollouts:.0f} rollouts" if rollouts else "rollouts"
            text = f"{n:.0f} requests of agents were refused (400 or 413), in {count} that were trained all the same"
            advice = "the runner's log, which has the first refusal of each kind; docs/any-agent.md lists supported"
            yield _alarm("refused requests", step, text, f"{advice} requests")


def tools_left_out(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Server-side tools that agents declare and no prompt has: an agent may depend on them."""
    for step in steps:
        kinds = sorted(name.rpartition("/")[2] for name in step.metrics if name.startswith("gateway/left_out/"))
        if kinds:
            text = f"agents declare tools that a server would run ({', '.join(kinds)}), and were trained without them"
            advice = "give the agent tools that it runs itself, or remove these from its requests"
            yield _alarm("tools left out", step, text, f"{advice}; docs/any-agent.md lists supported requests")


_CHECKS = (equal_rewards, wrong_logprobs, zero_variance, jumps, abort_storms, truncation, silent_tools, broken_tools)
_CHECKS += (alike, mismatches, length_bias, failures, refusals, tools_left_out)


def _alarm(kind: str, step: _Step, text: str, advice: str, **evidence: str) -> Alarm:
    return Alarm(kind=kind, iteration=step.iteration, text=text, advice=advice, **evidence)


def _steps(metrics: Iterable[Mapping[str, Any]], groups: Iterable[Mapping[str, Any]]) -> list[_Step]:
    steps: dict[int, _Step] = {}
    for row in metrics:
        steps.setdefault(row["iteration"], _Step(row["iteration"])).metrics = row
    for group in groups:
        step = steps.setdefault(group["iteration"], _Step(group["iteration"]))
        step.groups.append(group)
        columns = (group.get(name) or () for name in ("rollouts", "outcomes", "reasons"))
        step.members += [(str(name), str(outcome), str(why)) for name, outcome, why in zip(*columns, strict=False)]
    return [steps[iteration] for iteration in sorted(steps)]


def _rewards(group: Mapping[str, Any]) -> list[float]:
    return [reward for reward in group.get("rewards") or () if isinstance(reward, int | float)]


def _has_teacher(step: _Step) -> bool:
    """Whether a teacher's log-probs are in the advantages, which equal rewards then leave."""
    return not step.metrics.keys().isdisjoint(("train/teacher_kl", "train/opd_reverse_kl"))


def _aborted(member: _Member) -> bool:
    return member[1] == "cancelled" or "abort" in member[2]


def _failed(member: _Member) -> bool:
    return member[1] == "failed" and not _aborted(member)


def _reasons(step: _Step, condition: Callable[[_Member], bool]) -> str:
    counts = Counter(member[2] or member[1] for member in step.members if condition(member))
    return ", ".join(f"{reason} {n}" for reason, n in counts.most_common(3))


def _streaks(steps: Sequence[_Step], condition: Callable[[_Step], bool]) -> Iterator[tuple[_Step, str]]:
    """At least ``CONSECUTIVE`` iterations in a row that satisfy ``condition``: the first step and the duration."""
    streak: list[_Step] = []
    for step in [*steps, None]:
        if step is not None and condition(step):
            streak.append(step)
            continue
        if len(streak) >= CONSECUTIVE:
            yield streak[0], f"for {len(streak)} iterations"
        streak = []
