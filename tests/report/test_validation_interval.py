"""The line before and after training says how sure it is."""

from __future__ import annotations

from agl_slime.data.results import MemberResult
from agl_slime.loop.metrics import eval_metrics
from agl_slime.report.summary import sum_up, summary_rows
from agl_slime.support.intervals import estimate


def validation(*tasks: tuple[float | None, ...]) -> dict[str, object]:
    members = [
        MemberResult(
            rollout_id=f"{task}-{n}",
            group_id=str(task),
            mode="val",
            reward=reward,
            failure=None if reward is not None else "x",
        )
        for task, rewards in enumerate(tasks)
        for n, reward in enumerate(rewards)
    ]
    return eval_metrics(members)


def test_validation_has_an_interval_of_its_rewards_without_failures() -> None:
    found, wanted = validation((0.0,), (1.0,), (1.0,), (None,)), estimate([0.0, 1.0, 1.0])
    assert wanted is not None
    assert (found["val/reward_low"], found["val/reward_high"]) == (wanted.low, wanted.high)
    alone = validation((1.0,))
    assert (alone["val/reward_low"], alone["val/reward_high"]) == (None, None)


def test_several_rollouts_of_a_task_are_one_value_of_the_interval() -> None:
    found, wanted = validation((0.0, 1.0, 0.5), (1.0, 1.0, None), (0.0, 0.0, 0.0)), estimate([0.5, 1.0, 0.0])
    assert wanted is not None
    assert (found["val/reward_low"], found["val/reward_high"]) == (wanted.low, wanted.high)
    assert found["val/reward_mean"] == 3.5 / 8


def test_the_summary_tells_before_and_after_with_their_intervals() -> None:
    start = {"val/start_reward_mean": 0.1, "val/start_reward_low": 0.0, "val/start_reward_high": 0.2}
    rows = [
        {"iteration": 1, **start},
        {"iteration": 2, "val/reward_mean": 0.9, "val/reward_low": 0.8, "val/reward_high": 1.0},
    ]
    told = dict(summary_rows(sum_up(rows)))
    assert told["validation"] == "0.100 [0.000, 0.200] -> 0.900 [0.800, 1.000]"


def test_the_summary_says_of_how_many_rollouts_a_validation_is() -> None:
    start = {"val/start_reward_mean": 1.0, "val/start_count": 16, "val/start_failed": 15}
    most = {"val/reward_mean": 0.5, "val/count": 16, "val/failed": 1}
    told = dict(summary_rows(sum_up([{"iteration": 1, **start, **most}])))
    assert told["validation"] == "1.000 of 1/16 -> 0.500 of 15/16"
    none = {"val/reward_mean": None, "val/count": 16, "val/failed": 16}
    told = dict(summary_rows(sum_up([{"iteration": 1, **start}, {"iteration": 2, **most}, {"iteration": 3, **none}])))
    assert told["validation"] == "1.000 of 1/16 -> - of 0/16"


def test_failures_of_a_validation_are_counted_by_reason() -> None:
    found = validation((0.5,), (None,), (None,))
    assert (found["val/count"], found["val/failed"], found["val/failed/x"]) == (3, 2, 2)
