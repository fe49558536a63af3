"""Alarms that explain themselves: pure functions over what a run has recorded.

An alarm is told once per kind (and reason, or tool), with the iteration in which it was seen first. The limits are
chosen so that a run that learns raises none; none of them comes from a theory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from agl_slime import metric_names as m
from agl_slime.groups.normalize import all_equal
from agl_slime.loop.metrics import FAILED_SHARE
from agl_slime.report.metrics import number

ENOUGH = 8  # rollouts of an iteration that say something
IN_A_ROW = 3  # iterations of what one may have by chance
KNOWN = 5  # iterations before that a jump is measured by
FEW_GROUPS = 4
SAME_SHARE, ABORTED_SHARE, TRUNCATED_SHARE, ALIKE_SHARE = 0.8, 0.3, 0.3, 0.5
TOOL_FAILED_SHARE = 0.9  # of the calls of a tool in an iteration
NEVER_IN = 32  # rollouts without a call of a tool that is on offer
JUMP = 10.0  # times the median before
STALL, STALL_S = 5.0, 10.0  # times the median before, and so many seconds more
KL_LEAST, LOGPROB_LEAST = 0.05, 1e-3  # nats: below these a jump is no matter
BIAS = 0.2  # of the mean length
_OF_SQLITE = frozenset(("OperationalError", "DatabaseOperationError"))  # of sqlite3, and what CrewAI makes of it
_ONE_AT_A_TIME = (
    "a framework with one SQLite file for all of its runs, as CrewAI has, loses those that run at once: try "
    "--max-concurrent 1 (docs/any-agent.md, How many at once)"
)
# What the clients of OpenAI and Anthropic, LiteLLM, httpx, requests, aiohttp and urllib raise.
_OF_CONNECTIONS = frozenset(("APIConnectionError", "APITimeoutError", "ConnectError", "ConnectTimeout", "ProxyError"))
_OF_CONNECTIONS |= {"ConnectionError", "ClientConnectorError", "ClientProxyConnectionError", "URLError"}
_PAST_THE_PROXY = (
    "where http_proxy is set and agents run elsewhere, their NO_PROXY must name 127.0.0.1 and the gateway's host "
    "(agl-slime doctor)"
)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """``kind`` is a word, ``text`` what was seen, ``advice`` what to try. ``iteration`` is where it was seen first,
    ``about`` which of a kind it is, a tool or a reason. The evidence is on the page: a metric's chart, a rollout."""

    kind: str
    iteration: int
    text: str
    advice: str
    about: str = ""
    metric: str = ""
    rollout: str = ""

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass
class _Step:
    """What an iteration recorded; ``members`` are (rollout id, outcome, reason)."""

    iteration: int
    metrics: Mapping[str, Any] = field(default_factory=dict)
    groups: list[Mapping[str, Any]] = field(default_factory=list)
    members: list[tuple[str, str, str]] = field(default_factory=list)

    def share(self, wanted: Callable[[tuple[str, str, str]], bool]) -> tuple[float, str]:
        """How many of the members are wanted, and the first of them; none where there are too few to say."""
        found = [member for member in self.members if wanted(member)]
        return (len(found) / len(self.members), found[0][0]) if found and len(self.members) >= ENOUGH else (0.0, "")


def find_alarms(metrics: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[Alarm]:
    """The alarms of a run in the order of their iterations: ``metrics`` are the lines of metrics.jsonl, ``groups``
    those of groups.jsonl; what a line lacks raises nothing."""
    steps = _steps(metrics, groups)
    found = [alarm for look in _LOOKS for alarm in look(steps)]
    return sorted(found, key=lambda alarm: alarm.iteration)


def find_step_alarms(groups: Sequence[Mapping[str, Any]], *, best: float | None) -> list[Alarm]:
    """What a run warns of while it goes on, from the groups of one iteration alone: silent tools, broken ones, and
    answers that are all alike and earn less than the ``best`` reward so far."""
    steps = _steps((), [{**group, "iteration": group["collected"]} for group in groups])
    return [*silent_tools(steps), *broken_tools(steps), *alike(steps, best=best)]


def zero_variance(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Groups whose rewards are all the same; those whose answers are, too, are ``alike``'s."""

    def share(step: _Step) -> float:
        judged = [group for group in step.groups if len(_rewards(group)) > 1 and not group.get("alike")]
        same = sum(all_equal(_rewards(group)) for group in judged)
        return same / len(judged) if len(judged) >= FEW_GROUPS else 0.0

    for first, n in _runs(steps, lambda step: share(step) > SAME_SHARE and not any(_broken(step))):
        text = f"in {share(first):.0%} of the groups all rewards are the same, and so {n}: they have no advantage"
        advice = "easier or harder tasks, more rollouts per prompt (--n-samples-per-prompt), a reward with more steps,"
        advice += " or --drop-zero-variance, which replaces such groups"
        yield _alarm("zero variance", first, text, advice, metric="rollout/groups_zero_variance")
        return


def stalls(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """A phase that took far longer than before."""
    for phase in ("collect", "train", "sync"):
        name = f"perf/{phase}_s"
        for step, value, before in _jumps(steps, name, STALL):
            if value - before > STALL_S:
                slow = f"{phase} took {value:.0f} s where {before:.1f} s was usual"
                advice = "what else this machine did then, and the log of the engine"
                if phase == "collect":
                    advice = (
                        "the timelines of this step's rollouts: a tool or judge that hangs, one rollout that is far"
                    )
                    advice += " longer (--rollout-timeout, --group-timeout), or an engine that was restarted"
                yield _alarm("stall", step, slow, advice, metric=name)
                break


def abort_storms(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Many rollouts of an iteration that were cancelled or aborted."""
    for step in steps:
        share, example = step.share(_aborted)
        if share > ABORTED_SHARE:
            text = f"{share:.0%} of the rollouts were cancelled or aborted ({_reasons(step, _aborted)})"
            advice = "a longer --group-timeout or --rollout-timeout, fewer rollouts in flight (--max-concurrent)"
            yield _alarm("storm of aborts", step, text, f"{advice}, and the log of the engine", rollout=example)
            return


def truncation(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Many rollouts that were cut off by a limit."""

    def share(step: _Step) -> float:
        cut = sum(int(group.get("truncated") or 0) for group in step.groups)
        return cut / len(step.members) if len(step.members) >= ENOUGH else 0.0

    for first, n in _runs(steps, lambda step: share(step) > TRUNCATED_SHARE):
        text = f"{share(first):.0%} of the rollouts were cut off by a limit, and so {n}"
        advice = "more --max-new-tokens or --max-turns, or a reward that does not pay for length"
        yield _alarm("truncation", first, text, advice, metric="rollout/truncated")
        return


def silent_tools(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Tools on offer that no rollout has called."""
    offered: Counter[str] = Counter()
    called: set[str] = set()
    told: set[str] = set()
    malformed = 0
    for step in steps:
        for group in step.groups:
            tools = group.get("tools") or {}
            offered.update(tools.get("offered") or {})
            called |= set(tools.get("calls") or ())
            malformed += int(tools.get("malformed") or 0)
        for name, n in offered.items():
            if n >= NEVER_IN and name not in called | told:
                told.add(name)
                text = f"tool {name!r} was never called in {n} rollouts; {malformed} calls could not be parsed"
                advice = "compare the tool parser with the format that the model writes calls in, and say in the prompt"
                yield _alarm("silent tool", step, text, f"{advice} when to call it", about=name)


def broken_tools(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Tools of which nearly every call fails; one alarm per tool."""
    told: set[str] = set()
    for step in steps:
        for name, failed, calls, failure in _broken(step):
            if name not in told:
                told.add(name)
                text = f"{failed} of {calls} calls of tool {name!r} failed: {failure}"
                advice = "the tool on its own, with what it needs on this machine: the model sees the error as its "
                advice += "result, and is trained on that"
                yield _alarm("broken tool", step, text, advice, about=name, metric=m.TOOL_ERRORS)


def _broken(step: _Step) -> Iterator[tuple[str, int, int, str]]:
    """Name, failed calls, all calls and an error's text of each tool that hardly ever works."""
    calls: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    failures: dict[str, str] = {}
    for tools in (group.get("tools") or {} for group in step.groups):
        calls.update(tools.get("calls") or {})
        failed.update(tools.get("failed") or {})
        failures = {**(tools.get("failures") or {}), **failures}
    for name, n in failed.items():
        if n >= ENOUGH and n >= TOOL_FAILED_SHARE * calls[name]:
            yield name, n, calls[name], failures.get(name, "").removeprefix("Error: ")


def alike(steps: Sequence[_Step], *, best: float | None = None) -> Iterator[Alarm]:
    """Answers that are the same to the token, and earn less than the best so far."""
    best = float("-inf") if best is None else best
    for step in steps:
        best = max([best, *(reward for group in step.groups for reward in _rewards(group))])
        short = [group for group in step.groups if "alike" in group and max(_rewards(group), default=best) < best]
        same = [group for group in short if group["alike"]]
        if len(short) >= FEW_GROUPS and len(same) > ALIKE_SHARE * len(short):
            text = f"in {len(same)} of {len(short)} groups that could do better all answers are the same to the token"
            advice = "a higher --temperature, a lower --local.lr, a KL term (--local.kl-coef): the policy has collapsed"
            yield _alarm("answers alike", step, text, advice, rollout=str((same[0].get("rollouts") or [""])[0]))
            return


def kl_jumps(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """The policy moved much further in one iteration than before."""
    for name in ("train/kl", "train/reference_kl"):
        for step, value, before in _jumps(steps, name, JUMP):
            if value > KL_LEAST:
                advice = "a lower --local.lr, fewer --local.epochs, a smaller --local.grad-clip"
                yield _alarm(
                    "KL jump", step, f"{name} is {value:.3g} where {before:.2g} was usual", advice, metric=name
                )
                break


def logprob_jumps(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Engine and trainer disagree about the same tokens far more than before."""
    name = m.LOGPROB_DIFF_MAX
    for step, value, before in _jumps(steps, name, JUMP):
        if value > LOGPROB_LEAST:
            text = f"engine and trainer differ by {value:.2g} nats at a token where {before:.2g} was usual"
            advice = "colour the tokens of a rollout by the difference: all of them is a weight update that did not"
            advice += " arrive or another temperature, some are a template or kernels that differ"
            yield _alarm("log-prob jump", step, text, advice, metric=name)
            return


def length_bias(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """What is trained is longer or shorter than what was sampled."""

    def bias(step: _Step) -> float:
        sampled, trained = (number(step.metrics, name) for name in (m.RESPONSE_TOKENS, m.TRAINED_TOKENS_MEAN))
        return trained / sampled - 1 if sampled and trained is not None else 0.0

    for first, n in _runs(steps, lambda step: abs(bias(step)) > BIAS):
        how = "longer" if bias(first) > 0 else "shorter"
        text = f"rollouts that are trained are {abs(bias(first)):.0%} {how} than those that were sampled, and so {n}"
        advice = "longer ones fail, time out or are dropped more often, so the policy learns to be short, or the other"
        advice += " way round: look at the reasons of dropped groups, and give the limits more room"
        yield _alarm("length bias", first, text, advice, metric=m.TRAINED_TOKENS_MEAN)
        return


def failures(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Many rollouts of an iteration that failed, one alarm per main reason."""
    told: set[str] = set()
    for step in steps:
        share, _ = step.share(_failed)
        if share > FAILED_SHARE:
            reasons = Counter(reason for _, outcome, reason in step.members if _failed(("", outcome, reason)))
            main = reasons.most_common(1)[0][0]
            if main in told:
                continue
            told.add(main)
            example = next(one for one, outcome, reason in step.members if reason == main and outcome == "failed")
            text = f"{share:.0%} of the rollouts failed ({_reasons(step, _failed)})"
            advice = f"open a rollout that failed with {main}: its message says where"
            if main in _OF_SQLITE:
                advice += f"; {_ONE_AT_A_TIME}"
            if main in _OF_CONNECTIONS:
                advice += f"; {_PAST_THE_PROXY}"
            yield _alarm("failures", step, text, advice, about=main, metric=m.FAILED, rollout=example)


def failed_validations(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """A validation with many failed rollouts, whose mean is of the others."""
    for step in steps:
        for count_name, failed_name in ((m.VAL_START_COUNT, m.VAL_START_FAILED), (m.VAL_COUNT, m.VAL_FAILED)):
            count, failed = (number(step.metrics, name) or 0 for name in (count_name, failed_name))
            if failed > FAILED_SHARE * count:
                reasons = {name: number(step.metrics, name) or 0 for name in step.metrics}
                why = Counter({name: n for name, n in reasons.items() if name.startswith(f"{failed_name}/")})
                spelled = ", ".join(f"{name.rpartition('/')[2]} {n:.0f}" for name, n in why.most_common(3))
                text = (
                    f"{failed:.0f} of {count:.0f} validation rollouts failed ({spelled}), and the mean leaves them out"
                )
                advice = "the warning of the run, which has the first message of each reason; validations with other"
                advice += " shares of failures cannot be compared"
                yield _alarm("validation failures", step, text, advice, metric=failed_name)
                return


def refusals(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Requests of agents that the gateway refused as wrong: some clients swallow that, and the reward is for less."""
    for step in steps:
        counts = {status: number(step.metrics, f"gateway/refused/{status}") or 0 for status in (400, 413)}
        if n := sum(counts.values()):
            rollouts = number(step.metrics, "gateway/refused/rollouts") or 0
            where = f"{rollouts:.0f} rollouts" if rollouts else "rollouts"
            text = f"{n:.0f} requests of agents were refused (400 or 413), in {where} that were trained all the same"
            advice = "the log of the runner, which has the first refusal of each kind in words; docs/any-agent.md says"
            yield _alarm("refused requests", step, text, f"{advice} what is served")
            return


def tools_left_out(steps: Sequence[_Step]) -> Iterator[Alarm]:
    """Tools that a server would run, which no prompt has: an agent may have been written for them."""
    for step in steps:
        kinds = sorted(name.rpartition("/")[2] for name in step.metrics if name.startswith("gateway/left_out/"))
        if kinds:
            text = f"agents declare tools that a server would run ({', '.join(kinds)}), and were trained without them"
            advice = "give the agent tools that it runs itself, or leave these out of its requests"
            yield _alarm("tools left out", step, text, f"{advice}; docs/any-agent.md says what is served")
            return


_LOOKS = (zero_variance, stalls, abort_storms, truncation, silent_tools, broken_tools, alike, kl_jumps)
_LOOKS += (logprob_jumps, length_bias, failures, failed_validations, refusals, tools_left_out)


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
        step.members += [(str(one), str(outcome), str(reason)) for one, outcome, reason in zip(*columns, strict=False)]
    return [steps[iteration] for iteration in sorted(steps)]


def _rewards(group: Mapping[str, Any]) -> list[float]:
    return [reward for reward in group.get("rewards") or () if isinstance(reward, int | float)]


def _aborted(member: tuple[str, str, str]) -> bool:
    return member[1] == "cancelled" or "abort" in member[2]


def _failed(member: tuple[str, str, str]) -> bool:
    return member[1] == "failed" and not _aborted(member)


def _reasons(step: _Step, wanted: Callable[[tuple[str, str, str]], bool]) -> str:
    counts = Counter(member[2] or member[1] for member in step.members if wanted(member))
    return ", ".join(f"{reason} {n}" for reason, n in counts.most_common(3))


def _runs(steps: Sequence[_Step], bad: Callable[[_Step], bool]) -> Iterator[tuple[_Step, str]]:
    """Where at least ``IN_A_ROW`` iterations in a row are ``bad``: the first of them, and for how long."""
    row: list[_Step] = []
    for step in [*steps, None]:
        if step is not None and bad(step):
            row.append(step)
            continue
        if len(row) >= IN_A_ROW:
            yield row[0], f"for {len(row)} iterations"
        row = []


def _jumps(steps: Sequence[_Step], name: str, times: float) -> Iterator[tuple[_Step, float, float]]:
    """Where a metric is more than ``times`` the median of the ``2 * KNOWN`` values before, with value and median."""
    before: list[float] = []
    for step in steps:
        if (value := number(step.metrics, name)) is None:
            continue
        usual = median(before[-2 * KNOWN :]) if len(before) >= KNOWN else None
        if usual is not None and value > times * usual:
            yield step, value, usual
        before.append(value)
