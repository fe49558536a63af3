"""Figures of the closing summary: overlap, validations, agents behind the gateway, outcomes and trained tokens."""

from types import SimpleNamespace
from typing import Any

import pytest

from agl_slime import metric_names as m
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.events import IterationFinished
from agl_slime.loop.metrics import collect_metrics, eval_metrics, fork_examples, reward_by_task
from agl_slime.report.console import iteration_line
from agl_slime.report.summary import headline, sum_up, summary_rows
from agl_slime.support.intervals import estimate
from tests.report.cases import METRICS, row

OVERLAP = {"perf/roll_s": 0.9, "perf/train_s": 0.6, "perf/sync_s": 0.1, "perf/iteration_s": 1.0}
OVERLAP |= {"perf/trainer_waited": 0.3, "perf/engine_waited": 0.05, "perf/cpu_busy": 0.96}


def test_asynchronous_training_has_waiting_shares_speed_up_and_ceiling() -> None:
    line = iteration_line(IterationFinished(iteration=3, metrics={**METRICS, **OVERLAP}), 10, {})
    assert "1.00 s  waited: training 30%, engine 5%  CPU 96%" in line
    summary = sum_up([{"iteration": n, **row(n, **OVERLAP)} for n in range(1, 4)])
    assert summary["speed_up"] == pytest.approx(1.6)
    assert summary["speed_up_ceiling"] == pytest.approx(1.6 / 1.0)
    rows = dict(summary_rows({"reason": "finished", **summary}))
    assert rows["overlap"] == "1.60x, at most 1.60x;  training waited 30%, the engine 5%"
    assert "shared CPU" in rows
    synchronous = sum_up([{"iteration": 1, **row(1)}])
    assert "speed_up" not in synchronous
    assert not {"overlap", "shared CPU"} & {*dict(summary_rows({"reason": "finished", **synchronous}))}


def test_unequal_token_counts_and_the_reason_of_a_stop_are_shouted() -> None:
    def tokens(sampled: int, trained: int | None) -> str:
        return dict(summary_rows({"iterations": 1, "tokens_under_mask": sampled, "tokens_trained": trained}))["tokens"]

    assert dict(summary_rows({"reason": "every rollout failed"}))["run"] == "stopped: every rollout failed"
    assert tokens(10, 9) == "10 sampled under mask, 9 trained: NOT EQUAL"
    assert tokens(10, None) == "10 sampled under mask, none reported as trained"
    assert tokens(0, None) == "0 sampled under mask, nothing was trained"


def test_the_summary_has_first_and_last_validation_and_nothing_invented() -> None:
    start = {"val/start_reward_mean": 0.1, "val/start_reward_low": 0.0, "val/start_reward_high": 0.2}
    end = {"val/start_reward_mean": 0.5, "val/reward_mean": 0.9, "val/count": 16, "val/failed": 1}
    total = sum_up([{"iteration": 1, **start}, {"iteration": 2}, {"iteration": 3, **end}])
    assert (total["val_first"], total["val_last"]) == (0.1, 0.9)
    assert dict(summary_rows(total))["validation"] == "0.100 [0.000, 0.200] -> 0.900 of 15/16"
    names = ("reward_first", "tokens_trained", "logprob_diff_max", "first_ratio_dev_max")
    assert {total[name] for name in names} == {None}


START = {"val/start_reward_mean": 0.19, "val/count": 9, "rollout/count": 64, "rollout/failed": 2}
LAST = {"val/reward_mean": 0.94, "val/reward_low": 0.88, "val/reward_high": 0.98}
EARLY = {"val/start_reward_mean": 0.1}
LATE = {"val/reward_mean": 0.3, **dict(zip(m.VAL_DIFFERENCE, (0.2, -0.1, 0.8), strict=True))}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([{}], "no rollout was rewarded over 1 iteration"),
        ([{"rollout/reward_mean": 0.5, "rollout/count": 4}], "reward 0.50 over 1 iteration; 0.0% of rollouts failed"),
        ([{"rollout/reward_mean": n} for n in (0.5, 0.4)], "reward fell from 0.50 to 0.40 over 2 iterations"),
        ([START, LAST], "validation rose from 0.19 to 0.94 [0.88, 0.98] over 2 iterations; 3.1% of rollouts failed"),
        ([EARLY, LATE], "validation went from 0.10 to 0.30, no clear change, over 2 iterations"),
    ],
)
def test_the_headline_says_what_became_of_the_run(rows: list[dict[str, Any]], sentence: str) -> None:
    figures = sum_up([{"iteration": number, **figures} for number, figures in enumerate(rows, start=1)])
    alarms = {0: "no alarm", 1: "1 alarm", 2: "2 alarms"}
    assert [headline(figures, alarms=n) for n in alarms] == [f"{sentence}; {text}" for text in alarms.values()]


def validation(*tasks: tuple[float | None, ...], first: Any = None) -> dict[str, Any]:
    members = []
    for task, rewards in enumerate(tasks):
        for number, reward in enumerate(rewards):
            name, failure = f"{task}-{number}", "x" if reward is None else None
            about: dict[str, Any] = {"rollout_id": name, "group_id": name, "failure": failure}
            members.append(MemberResult(mode="val", reward=reward, task={"n": task, 1: "another kind of key"}, **about))
    return eval_metrics(members, first=first)


def test_validation_has_mean_and_interval_of_its_tasks_without_failures() -> None:
    """Several rollouts of a task are one value; the mean lies within the interval, however often a task was drawn."""
    cases = {
        ((0.0,), (1.0,), (1.0,), (None,)): [0.0, 1.0, 1.0],
        ((1.0,) * 29, *(((0.0,),) * 11)): [1.0, *[0.0] * 11],
        ((0.0, 1.0, 0.5), (1.0, 1.0, None), (0.0, 0.0, 0.0)): [0.5, 1.0, 0.0],
    }
    for tasks, values in cases.items():
        metrics, expected = validation(*tasks), estimate(values)
        assert expected is not None
        figures = [metrics[f"val/reward_{name}"] for name in ("mean", "low", "high")]
        assert figures == [expected.mean, expected.low, expected.high]
    assert (metrics["val/count"], metrics["val/failed"], metrics["val/failed/x"]) == (9, 1, 1)
    assert "val/difference" not in metrics
    single = validation((1.0,))
    assert (single["val/reward_low"], single["val/reward_high"]) == (None, None)
    assert collect_metrics([], collect_s=1.0)["rollout/reward_mean"] is validation((None,))["val/reward_mean"] is None


def test_a_validation_is_compared_with_the_first_task_by_task() -> None:
    members = [
        MemberResult(rollout_id=str(n), group_id=str(n), task={"n": n, 1: "another kind of key"}, reward=reward)
        for n, reward in enumerate([0.0, 1.0, 0.5, 0.0])
    ]
    metrics = validation((1.0,), (1.0,), (None,), (0.5, 1.0), first=reward_by_task(members))
    expected = estimate([1.0, 0.0, 0.75], differences=True)
    assert expected is not None
    values = [metrics[name] for name in ("val/difference", "val/difference_low", "val/difference_high")]
    assert values == [expected.mean, expected.low, expected.high]
    shown = dict(summary_rows(sum_up([{"iteration": 1, "val/start_reward_mean": 0.3}, {"iteration": 2, **metrics}])))
    assert shown["validation"].endswith(", task by task {:+.3f} [{:+.3f}, {:+.3f}]".format(*values))


def member(number: int, *kinds: str | None, **counts: int) -> MemberResult:
    metadata = {"gateway": {"answers": 2, **counts}, "token_source": "engine"}
    fields: dict[str, Any] = {"loss_mask": [1], "status": None, "response_length": 1}
    samples: Any = tuple(SimpleNamespace(metadata={**metadata, "fork_reason": kind}, **fields) for kind in kinds)
    return MemberResult(rollout_id=f"ro-{number}", group_id="g", samples=samples, reward=1.0, sampled_tokens=1)


def test_gateway_counts_are_metrics_and_forks_and_refusals_are_named() -> None:
    members = (
        member(1, None, **{"overridden/temperature": 2}),
        member(2, None, "compaction", **{"overridden/temperature": 1, "refused/400": 2}),
        member(3, None, "compaction", "branch", **{"refused/413": 1}),
    )
    group = GroupResult(group_id="g", mode="train", size=3, members=members, ready=True)
    metrics = collect_metrics([group], collect_s=1.0)
    assert {name: value for name, value in metrics.items() if name.startswith("gateway/")} == {
        "gateway/answers": 6,
        "gateway/overridden/temperature": 3,
        "gateway/refused/400": 2,
        "gateway/refused/413": 1,
        "gateway/refused/rollouts": 2,
    }
    assert fork_examples(members) == {
        "compaction": "conversations fork (compaction), first seen in rollout ro-2: Sample 2 of 2",
        "branch": "conversations fork (branch), first seen in rollout ro-3: Sample 3 of 3",
        "refused": "requests were refused (2 x refused/400), first seen in rollout ro-2",
    }


def test_a_ratio_that_both_sides_computed_is_called_meaningless() -> None:
    figures = {"reason": "finished", "first_ratio_dev_max": 1e-6, "first_ratio_dev_max_iteration": 3, "forks": 0}
    assert dict(summary_rows({**figures, "retokenized": 0}))["first ratio"] == "within 1.0e-06 of 1 (iteration 3)"
    assert "; meaningless for retokenized samples" in dict(summary_rows({**figures, "retokenized": 3}))["first ratio"]
