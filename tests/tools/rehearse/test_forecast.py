"""The simulation of a run, against cases that are computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agl_slime.rehearse.forecast import Shape, Speeds, compare, forecast

SPEEDS = Speeds(token_s=0.01, train_s=4.0, sync_s=1.0)
EQUAL = Shape(groups=4, size=2, engines=2, mean_tokens=100, spread=0.0, prompt_tokens=0)


def test_a_synchronous_step_is_sampling_training_and_update():
    result = forecast(SPEEDS, EQUAL)
    assert result.step_s == pytest.approx(1.0 + 4.0 + 1.0)
    assert result.trainer_waits == pytest.approx(1 / 6)
    assert result.engines_wait == pytest.approx(5 / 6)
    assert (result.behind, result.lost_tokens) == (0.0, 0.0)


def test_train_async_takes_the_longer_side_and_the_update():
    assert forecast(SPEEDS, replace(EQUAL, asynchronous=True)).step_s == pytest.approx(4.0 + 1.0)
    slow = replace(SPEEDS, token_s=0.1)
    result = forecast(slow, replace(EQUAL, asynchronous=True))
    assert result.step_s == pytest.approx(10.0 + 1.0)
    assert result.trainer_waits == pytest.approx(6 / 11)
    assert result.behind == 1.0


def test_slots_queue_and_each_sequence_slows_the_others():
    assert forecast(SPEEDS, replace(EQUAL, engines=1, slots=4)).step_s == pytest.approx(2 * 1.0 + 5.0)
    crowded = replace(SPEEDS, token_s_per_sequence=0.01)
    assert forecast(crowded, replace(EQUAL, engines=1)).step_s == pytest.approx(100 * 0.09 + 5.0)


def test_prompts_and_agents_cost_their_time():
    result = forecast(replace(SPEEDS, prefill_token_s=0.001, agent_s=3.0), replace(EQUAL, prompt_tokens=50))
    assert result.step_s == pytest.approx(1.0 + 4 * 0.05 + 3.0 + 5.0)  # four prompts for each of two engines
    # shared GPUs are handed over
    assert forecast(replace(SPEEDS, offload_s=2.0), replace(EQUAL, colocated=True)).step_s == pytest.approx(8.0)


def test_staleness_hides_stragglers_and_is_bounded():
    uneven = replace(EQUAL, groups=8, size=4, spread=1.0, mean_tokens=400, max_tokens=4000)
    steps_s = []
    for limit in (0, 1, 2):
        result = forecast(SPEEDS, replace(uneven, max_staleness=limit, resumes=True), steps=40)
        steps_s.append(result.step_s)
        assert max(step.behind for step in result.steps) <= limit
        assert len(result.steps) == 40
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[0] > 1.2 * steps_s[1]


def test_a_batch_of_more_groups_than_it_takes_is_faster_and_loses_tokens():
    uneven = replace(EQUAL, groups=8, spread=1.0, mean_tokens=400, max_tokens=4000)
    plain, larger = forecast(SPEEDS, uneven), forecast(SPEEDS, replace(uneven, oversampled=16))
    assert larger.step_s < plain.step_s
    assert 0.1 < larger.lost_tokens < 0.7
    assert plain.lost_tokens == 0


def test_more_engines_do_not_help_shared_gpus():
    assert [name for name, _ in compare(SPEEDS, replace(EQUAL, colocated=True))] == ["as it is"]
    rows = dict(compare(SPEEDS, EQUAL))
    assert {"as it is", "agl_max_staleness 1", "agl_max_staleness 2", "4 engines"} <= {*rows}
