"""A run with one fault raises the alarm of that fault and no other; a run that learns raises none."""

from collections.abc import Callable
from typing import Any

import pytest

from agl_slime.report.alarms import find_alarms

ITERATIONS, GROUPS, SIZE = 12, 6, 4
Run = tuple[list[dict[str, Any]], list[dict[str, Any]]]


def healthy() -> Run:
    """The records of a run that learns."""
    figures = {"rollout/response_tokens_mean": 40.0, "rollout/response_tokens_mean_trained": 41.0, "train/kl": 0.002}
    figures |= {"train/logprob_diff_max": 2e-6, "perf/collect_s": 2.0, "perf/train_s": 1.0, "perf/sync_s": 0.1}
    metrics = [{"iteration": n, **figures, "tools/errors": 0} for n in range(1, ITERATIONS + 1)]
    groups = [
        {
            "iteration": n,
            "group_id": f"{n}-{g}",
            "ready": True,
            "rollouts": [f"{n}-{g}-{i}" for i in range(SIZE)],
            "rewards": [0.0, 0.0, 1.0, 1.0] if g else [1.0] * SIZE,
            "outcomes": ["trained"] * SIZE,
            "reasons": [""] * SIZE,
            "truncated": 0,
            "alike": False,
            "tools": {"offered": {"lookup": SIZE}, "calls": {"lookup": 3}, "malformed": 1, "example": "<>"},
        }
        for n in range(1, ITERATIONS + 1)
        for g in range(GROUPS)
    ]
    return metrics, groups


def no_spread(run: Run) -> None:
    for group in run[1][3 * GROUPS :]:
        group["rewards"] = [1.0] * SIZE


def no_reward(run: Run) -> None:
    """All answers are alike, too, as those of a model that knows nothing often are."""
    for group in run[1]:
        group |= {"rewards": [0.0] * SIZE, "alike": True}


def in_metrics(row: int, **values: float) -> Callable[[Run], None]:
    """A fault in the metrics of one iteration."""
    return lambda run: run[0][row].update({name.replace("__", "/"): value for name, value in values.items()})


def aborts(run: Run) -> None:
    for group in run[1][4 * GROUPS : 5 * GROUPS]:
        group["outcomes"][2:] = ["cancelled", "failed"]
        group["reasons"][2:] = ["group_timeout", "aborted"]


def cut_off(run: Run) -> None:
    for group in run[1][2 * GROUPS :]:
        group["truncated"] = 2


def silence(run: Run) -> None:
    for group in run[1]:
        group["tools"]["calls"] = {}


def collapse(run: Run) -> None:
    for group in run[1][5 * GROUPS :]:
        group.update(alike=True, rewards=[0.5] * SIZE)


def mismatch(run: Run) -> None:
    for row in run[0][6:8]:
        row |= {"autopsy/sampler": 0.2, "autopsy/cause/late_weights": 0.19}


def short_answers(run: Run) -> None:
    for row in run[0][6:]:
        row["rollout/response_tokens_mean_trained"] = 25.0


def broken_judge(run: Run) -> None:
    for group in run[1][3 * GROUPS :]:
        group["outcomes"][:2] = ["failed"] * 2
        group["reasons"][:2] = ["no_reward", "timeout"]
        group["rewards"] = [None, None, 0.0, 1.0]


def refused(run: Run) -> None:
    run[0][6] |= {"gateway/refused/400": 3.0, "gateway/refused/410": 9.0, "gateway/refused/429": 9.0}
    run[0][6]["gateway/refused/rollouts"] = 2.0


def broken_tool(run: Run) -> None:
    """The rewards are all the same for it, and easier tasks would not help."""
    for group in run[1][4 * GROUPS :]:
        group["tools"] = {"offered": {"lookup": SIZE}, "calls": {"lookup": 6}, "malformed": 0, "failed": {"lookup": 6}}
        group["tools"]["failures"] = {"lookup": "Error: ConnectionError: no such host"}
        group["rewards"] = [0.0] * SIZE


FAULTS: list[tuple[Callable[[Run], None], str, int, str]] = [
    (no_spread, "zero variance", 4, "for 9 iterations"),
    (in_metrics(8, perf__collect_s=90.0), "stall", 9, "collect took 90 s where 2.0 s was usual"),
    (aborts, "storm of aborts", 5, "50% of the rollouts were cancelled or aborted (group_timeout 6, aborted 6)"),
    (cut_off, "truncation", 3, "50% of the rollouts were cut off"),
    (silence, "silent tool", 2, "never called in 48 rollouts; 12 calls could not be parsed, such as '<>'"),
    (broken_tool, "broken tool", 5, "36 of 36 calls of tool 'lookup' failed: ConnectionError: no such host"),
    (collapse, "answers alike", 6, "6 of 6 groups"),
    (in_metrics(9, train__kl=0.7), "KL jump", 10, "0.7 where 0.002"),
    (in_metrics(0, train__logprob_diff_max=33.0), "wrong log-probs", 1, "33 nats at a token"),
    (in_metrics(3, train__logprob_diff_mean=0.4), "wrong log-probs", 4, "and 0.4 on average"),
    (in_metrics(2, train__first_ratio_dev_max=4.85e8), "wrong log-probs", 3, "ratio is 4.9e+08 at most"),
    (no_reward, "equal rewards", 1, "every reward of the first 12 iterations is 0: there is nothing to learn from"),
    (mismatch, "mismatch", 7, "late_weights explains 0.19 nats per token"),
    (short_answers, "length bias", 7, "38% shorter"),
    (refused, "refused requests", 7, "3 requests of agents were refused (400 or 413), in 2 rollouts"),
    (in_metrics(6, gateway__left_out__mcp=1.0), "tools left out", 7, "would run (mcp)"),
    (broken_judge, "failures", 4, "(no_reward 6, timeout 6)"),
]


@pytest.mark.parametrize(("fault", "kind", "iteration", "text"), FAULTS, ids=[row[1] for row in FAULTS])
def test_each_fault_raises_its_alarm_and_no_other(fault: Callable[[Run], None], kind: str, iteration: int, text: str):
    run = healthy()
    fault(run)
    (alarm,) = find_alarms(*run)
    assert (alarm.kind, alarm.iteration) == (kind, iteration)
    assert text in alarm.text
    assert alarm.advice
    assert not alarm.rollout or alarm.rollout.startswith(f"{iteration}-")
    assert not alarm.metric or alarm.metric in run[0][0] or alarm.metric.startswith(("rollout/", "val/", "autopsy/"))


@pytest.mark.parametrize("metric", ["train/teacher_kl", "train/opd_reverse_kl"])  # the local trainer's, slime's
@pytest.mark.parametrize("fault", [no_reward, no_spread])
def test_equal_rewards_are_no_fault_beside_a_teacher(fault: Callable[[Run], None], metric: str) -> None:
    run = healthy()
    fault(run)
    assert find_alarms(*run)
    for row in run[0]:
        row[metric] = 0.1
    assert find_alarms(*run) == []


def test_every_alarm_check_has_a_fault_that_raises_it() -> None:
    from agl_slime.report import alarms

    raised = set()
    for fault, *_ in FAULTS:
        run = healthy()
        fault(run)
        raised |= {check.__name__ for check in alarms._CHECKS if list(check(alarms._steps(*run)))}
    assert raised == {check.__name__ for check in alarms._CHECKS}


def test_a_run_that_learns_and_records_that_lack_fields_raise_nothing() -> None:
    assert find_alarms(*healthy()) == []
    metrics = [{"iteration": n} for n in range(1, 20)]
    groups: list[dict[str, Any]] = [{"iteration": n, "rewards": None, "rollouts": "?"} for n in range(1, 20)]
    assert find_alarms(metrics, groups) == []
    assert find_alarms([], []) == []
