"""The simulation of a run, against cases that can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agl_slime.rehearse.forecast import Shape, Speeds, compare, forecast

SPEEDS = Speeds(token_s=0.01, train_s=4.0, sync_s=1.0)
EQUAL = Shape(groups=4, size=2, engines=2, mean_tokens=100, spread=0.0, prompt_tokens=0)


def test_a_synchronous_step_is_sampling_training_and_update():
    found = forecast(SPEEDS, EQUAL)
    assert found.step_s == pytest.approx(1.0 + 4.0 + 1.0)
    assert found.trainer_waits == pytest.approx(1 / 6)
    assert found.engines_wait == pytest.approx(5 / 6)
    assert (found.behind, found.lost_tokens) == (0.0, 0.0)


def test_train_async_takes_the_longer_side_and_the_update():
    assert forecast(SPEEDS, replace(EQUAL, asynchronous=True)).step_s == pytest.approx(4.0 + 1.0)
    slow = replace(SPEEDS, token_s=0.1)
    found = forecast(slow, replace(EQUAL, asynchronous=True))
    assert found.step_s == pytest.approx(10.0 + 1.0)
    assert found.trainer_waits == pytest.approx(6 / 11)
    assert found.behind == 1.0


def test_slots_queue_and_each_sequence_slows_the_others():
    one = replace(EQUAL, engines=1, slots=4)
    assert forecast(SPEEDS, one).step_s == pytest.approx(2 * 1.0 + 5.0)
    crowded = replace(SPEEDS, token_s_per_sequence=0.01)
    assert forecast(crowded, replace(EQUAL, engines=1)).step_s == pytest.approx(100 * 0.09 + 5.0)


def test_prompts_and_agents_cost_their_time():
    found = forecast(replace(SPEEDS, prefill_token_s=0.001, agent_s=3.0), replace(EQUAL, prompt_tokens=50))
    assert found.step_s == pytest.approx(1.0 + 4 * 0.05 + 3.0 + 5.0)  # four prompts for each of two engines


def test_shared_gpus_hand_over():
    assert forecast(replace(SPEEDS, offload_s=2.0), replace(EQUAL, colocated=True)).step_s == pytest.approx(8.0)


def test_staleness_hides_stragglers_and_is_bounded():
    uneven = replace(EQUAL, groups=8, size=4, spread=1.0, mean_tokens=400, max_tokens=4000)
    steps_s = []
    for limit in (0, 1, 2):
        found = forecast(SPEEDS, replace(uneven, max_staleness=limit, resumes=True), steps=40)
        steps_s.append(found.step_s)
        assert max(step.behind for step in found.steps) <= limit
        assert len(found.steps) == 40
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[0] > 1.2 * steps_s[1]


def test_a_batch_of_more_groups_than_it_takes_is_faster_and_loses_tokens():
    uneven = replace(EQUAL, groups=8, spread=1.0, mean_tokens=400, max_tokens=4000)
    plain, more = forecast(SPEEDS, uneven), forecast(SPEEDS, replace(uneven, oversampled=16))
    assert more.step_s < plain.step_s
    assert 0.1 < more.lost_tokens < 0.7
    assert plain.lost_tokens == 0


def test_more_engines_do_not_help_shared_gpus():
    assert [name for name, _ in compare(SPEEDS, replace(EQUAL, colocated=True))] == ["as it is"]
    rows = dict(compare(SPEEDS, EQUAL))
    assert {"as it is", "agl_max_staleness 1", "agl_max_staleness 2", "4 engines"} <= {*rows}
