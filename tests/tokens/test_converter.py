"""Rollout and spans to Samples, with Agent Lightning's Span, Rollout and HTTP store; rewards in all their forms."""

import json
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.engine.client.generation import WeightSpan
from agl_slime.errors import RewardError, TraceError
from agl_slime.loop.metrics import collect_metrics
from agl_slime.support.agl import Rollout, Span, emit_reward, find_final_reward, get_rewards_from_span
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import Conversion, convert_rollout, rollout_to_sample, rollout_to_samples
from agl_slime.tokens.reward import check_reward, read_reward, split_missing
from agl_slime.tokens.turn import Turn
from agl_slime.types import Sample
from tests.harness.trace_strategies import conversations
from tests.tokens.spans import attempt_spans


def rollout(**fields: Any) -> Rollout:
    return Rollout(
        **{"rollout_id": "ro-1", "input": {"prompt": "hi", "label": "42"}, "start_time": 0.0, "mode": "train", **fields}
    )


FIRST = Turn(
    prompt_ids=[1, 2, 3],
    response_ids=[4, 5],
    log_probs=[-0.5, -0.25],
    weight_versions=[WeightSpan("7", 0, 2)],
    cached_tokens=1,
    text="call",
    messages=[{"role": "user", "content": "hi"}],
)
BRANCH = Turn(prompt_ids=[1, 2, 3, 4, 5, 70], response_ids=[9], log_probs=[-0.1])
SECOND = Turn(
    prompt_ids=[1, 2, 3, 4, 5, 90, 91],
    response_ids=[6, 7, 8],
    log_probs=[-1.0, -2.0, -3.0],
    weight_versions=[WeightSpan("7", 0, 1), WeightSpan("8", 1, 3)],
    cached_tokens=5,
    text="done",
)


def test_a_two_turn_rollout_is_one_sample_with_the_observation_masked():
    sample = rollout_to_sample(
        rollout(metadata={"group_id": "g"}), attempt_spans([FIRST, SECOND], 0.5), index=3, group_index=2, rollout_id=11
    )
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))).to_dict() == sample.to_dict()  # plain values
    assert sample.tokens == [1, 2, 3, 4, 5, 90, 91, 6, 7, 8]
    assert (sample.response_length, sample.loss_mask) == (7, [1, 1, 0, 0, 1, 1, 1])
    assert sample.rollout_log_probs == [-0.5, -0.25, 0.0, 0.0, -1.0, -2.0, -3.0]
    assert (sample.index, sample.group_index, sample.rollout_id) == (3, 2, 11)
    assert (sample.reward, sample.label, sample.status) == (0.5, "42", Sample.Status.COMPLETED)
    assert (sample.prompt, sample.response) == ([{"role": "user", "content": "hi"}], "calldone")
    assert sample.weight_versions == ["7", "8"]
    expected: dict[str, Any] = {"weight_spans": [["7", 0, 2], ["7", 4, 5], ["8", 5, 7]], "turn_spans": [[0, 2], [4, 7]]}
    expected |= {"token_source": "engine", "agl_rollout_id": "ro-1", "agl_attempt_id": "at-1", "group_id": "g"}
    expected |= {"turns": 2}
    assert expected.items() <= sample.metadata.items()
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (6, 10)


def test_the_status_is_that_of_the_last_call_or_of_the_agents_stop_reason():
    statuses = {"stop": "completed", "length": "truncated", "abort": "truncated", "tool_calls": "completed"}
    for finish, status in statuses.items():
        turn = Turn(prompt_ids=[1], response_ids=[2], log_probs=[-1.0], finish_reason=finish)
        assert rollout_to_sample(rollout(), attempt_spans([turn])).status.value == status
    spans = attempt_spans([FIRST, Turn(prompt_ids=[9], response_ids=[8], log_probs=[-0.1])])
    spans[-1].attributes[names.STOP_REASON] = "max_turns"
    samples = rollout_to_samples(rollout(), spans)
    assert [sample.metadata["stop_reason"] for sample in samples] == ["stop", "max_turns"]
    assert [sample.status.value for sample in samples] == ["completed", "truncated"]


def test_branching_rollout_gives_siblings_with_one_rollout_id_and_reward():
    conversion = convert_rollout(rollout(), attempt_spans([FIRST, SECOND, BRANCH], 0.25), rollout_id=5)
    first, second = conversion.samples
    assert first.tokens == [1, 2, 3, 4, 5, 90, 91, 6, 7, 8]
    assert second.tokens == [1, 2, 3, 4, 5, 70, 9]
    assert second.loss_mask == [1]
    assert {sample.rollout_id for sample in conversion.samples} == {5}
    assert [sample.reward for sample in conversion.samples] == [0.25, 0.25]
    assert [sample.metadata["fork_reason"] for sample in conversion.samples] == [None, "branch"]
    assert conversion.forks == {"branch": 1}
    member = MemberResult(rollout_id="ro", group_id="g", reward=0.25, samples=tuple(conversion.samples))
    group = GroupResult(group_id="g", mode="train", size=1, members=(member,), ready=True)
    metrics = collect_metrics([group, group], collect_s=1.0)
    assert {name: n for name, n in metrics.items() if name.startswith("trace/forks/")} == {"trace/forks/branch": 2}
    assert conversion.trajectory.sampled_tokens == 6 == sum(sum(sample.loss_mask) for sample in conversion.samples)


def test_a_fork_is_refused_where_one_sample_is_wanted():
    with pytest.raises(TraceError, match=r"forks into 2 Samples \(branch 1\); use rollout_to_samples") as error:
        rollout_to_sample(rollout(), attempt_spans([FIRST, SECOND, BRANCH]))
    assert error.value.reason == "forked"


def test_an_aborted_call_that_sampled_nothing_contributes_nothing():
    aborted = Turn(prompt_ids=[1, 2, 3], response_ids=[], log_probs=[], finish_reason="abort")
    sample = rollout_to_sample(rollout(), attempt_spans([aborted, FIRST]))
    assert (sample.tokens, sample.status) == ([1, 2, 3, 4, 5], Sample.Status.COMPLETED)
    for spans in (attempt_spans([]), attempt_spans([aborted]), []):
        with pytest.raises(TraceError) as error:
            rollout_to_samples(rollout(), spans)
        assert error.value.reason == "no_turns"


def test_log_probs_are_on_all_samples_of_a_rollout_or_on_none():
    without = Turn(prompt_ids=[9], response_ids=[8])
    samples = rollout_to_samples(rollout(), attempt_spans([FIRST, without]))
    assert [sample.rollout_log_probs for sample in samples] == [None, None]


def test_only_the_latest_attempt_is_read():
    dead = Turn(prompt_ids=[1, 2, 3], response_ids=[66], log_probs=[-9.0])
    late = attempt_spans([dead], 0.0, attempt_id="at-dead", began=50.0)
    late[-1].start_time = 500.0  # the dead worker's reward came after everything else
    alive = attempt_spans([FIRST, SECOND], 1.0, attempt_id="at-alive", began=100.0)
    for spans in (late + alive, alive + late):
        sample = rollout_to_sample(rollout(), spans)
        assert sample.metadata["agl_attempt_id"] == "at-alive"
        assert 66 not in sample.tokens
        assert sample.reward == 1.0
    assert rollout_to_sample(rollout(), late + alive, attempt_id="at-dead").tokens == [1, 2, 3, 66]


def test_spans_that_an_exporter_delivered_twice_count_once():
    spans = attempt_spans([FIRST, SECOND])
    assert rollout_to_sample(rollout(), spans + spans).tokens == rollout_to_sample(rollout(), spans).tokens


def test_the_label_is_the_tasks():
    labels = [({"label": {"a": 1}}, '{"a": 1}'), ({"label": None}, None), ({"question": "x"}, None), ("text", None)]
    for task, label in labels:
        assert rollout_to_sample(rollout(input=task), attempt_spans([FIRST])).label == label


def test_gateway_refusals_are_in_the_trajectorys_metadata() -> None:
    spans = attempt_spans([FIRST, SECOND])
    spans[1].attributes[names.GATEWAY] = json.dumps({"answers": 2, "refused/400": 1})
    conversion = convert_rollout(rollout(metadata={"group_id": "g"}), spans)
    assert conversion.trajectory.metadata == {"group_id": "g", "gateway": {"answers": 2, "refused/400": 1}}
    assert conversion.samples[0].metadata["gateway"] == {"answers": 2, "refused/400": 1}


ROLLOUT = Rollout(rollout_id="ro", input={}, start_time=0.0)


def check(conversion: Conversion, turns: list[Turn]) -> None:
    """Token-exact, aligned, once: against the engine's record, without the code that is tested."""
    trained: Counter[tuple[bytes, ...]] = Counter()
    for sample in conversion.samples:
        n = sample.response_length
        assert 0 < n < len(sample.tokens)
        assert sample.loss_mask is not None
        assert sample.rollout_log_probs is not None
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == n
        assert {type(value) for value in sample.tokens} == {int}
        prompt_length = len(sample.tokens) - n
        for start, end in sample.metadata["turn_spans"]:
            first, last = prompt_length + start, prompt_length + end
            log_probs = sample.rollout_log_probs[start:end]
            trained[record(sample.tokens[:first], sample.tokens[first:last], log_probs)] += 1
        in_turns = {place for start, end in sample.metadata["turn_spans"] for place in range(start, end)}
        assert sample.loss_mask == [int(place in in_turns) for place in range(n)]
        assert {sample.rollout_log_probs[place] for place in range(n) if place not in in_turns} <= {0.0}
    sampled = [turn for turn in turns if len(turn.response_ids)]
    assert trained == Counter(record(turn.prompt_ids, turn.response_ids, log_probs_of(turn)) for turn in sampled)
    reasons = [sample.metadata["fork_reason"] for sample in conversion.samples]
    assert (reasons[0], None in reasons[1:]) == (None, False)
    assert sum(sum(sample.loss_mask or []) for sample in conversion.samples) == conversion.trajectory.sampled_tokens


def log_probs_of(turn: Turn) -> list[float]:
    assert turn.log_probs is not None
    return turn.log_probs.tolist()


def record(prompt: Any, response: Any, log_probs: list[float]) -> tuple[bytes, ...]:
    arrays = ((prompt, "<i4"), (response, "<i4"), (log_probs, "<f4"))
    return tuple(np.array(values, dtype=kind).tobytes() for values, kind in arrays)


@given(conversations().filter(lambda turns: any(len(turn.response_ids) for turn in turns)))
def test_packed_spans(turns: list[Turn]):
    check(convert_rollout(ROLLOUT, attempt_spans(turns)), turns)


def reward_span(value: Any, **options: Any) -> Span:
    core = emit_reward(value, propagate=False, **options)
    return Span.from_attributes(name=core.name, attributes=core.attributes)


def raw(name: str, value: Any, **extra: Any) -> Span:
    attributes = {"agentlightning.reward.0.name": name, "agentlightning.reward.0.value": value, **extra}
    return Span.from_attributes(name="agentlightning.annotation", attributes=attributes)


def test_the_last_number_is_the_reward():
    for value, number in ((1.0, 1.0), (-2, -2.0), (True, 1.0), (0.0, 0.0)):
        reward = read_reward([reward_span(0.1), Span.from_attributes(name="other", attributes={}), reward_span(value)])
        assert (reward.primary, dict(reward.named)) == (number, {"primary": number})


@pytest.mark.parametrize("bad", [math.nan, -math.inf, "high", 10**400, 1e308, -1e39, 2e18])
@pytest.mark.parametrize("later", [raw("primary", 1.0), raw("other", 1.0), reward_span(0.5)])
def test_a_bad_reward_that_a_later_one_replaces_is_not_passed_over(bad: Any, later: Span):
    for spans in ([raw("primary", bad), later], [later, raw("primary", bad)]):
        with pytest.raises(RewardError, match=r"the reward 'primary' is .*(a reward must be|expected) a") as refused:
            read_reward(spans, reward_key="primary")
        assert refused.value.reason == "bad_reward"
    other = read_reward([raw("primary", bad), raw("other", -1e18)])  # it is not trained, and the largest is
    assert (other.named, other.missing) == ({"other": -1e18}, ("primary",))


def test_the_first_dimension_is_primary_unless_another_is_named():
    spans = [reward_span({"format": 0.5, "correct": 1.0}, primary_key="correct")]
    reward = read_reward(spans)
    assert (reward.primary, dict(reward.named)) == (1.0, {"correct": 1.0, "format": 0.5})
    reward = read_reward([*spans, reward_span(0.75)], reward_key="format")
    assert (reward.primary, dict(reward.named)) == (0.5, {"correct": 1.0, "format": 0.5, "primary": 0.75})
    with pytest.raises(RewardError, match="no reward named 'style', only correct, format") as error:
        read_reward(spans, reward_key="style")
    assert error.value.reason == "other_rewards"


OLD_FORM = {"agentops.task.output": '{"type": "reward", "value": 0.75}'}
TWO = {f"agentlightning.reward.{n}.name": f"r{n}" for n in (1, 0)}
TWO |= {f"agentlightning.reward.{n}.value": n / 2 for n in (1, 0)}  # type: ignore[misc]


@pytest.mark.parametrize(
    "span",
    [
        *(raw("a", value) for value in (0.5, 2, "0.5")),
        raw("a", 0.5, other=1),
        raw("a", 0.5, **{"agentlightning.reward.0.note": "extra"}),
        *(Span.from_attributes(name="agentlightning.annotation", attributes=each) for each in (TWO, OLD_FORM)),
        Span.from_attributes(name="agentlightning.annotation", attributes={"reward": 0.25}),  # of 0.2
    ],
)
def test_every_form_is_read_as_agent_lightning_reads_it(span: Span):
    spans = [raw("first", 0.125), span, Span.from_attributes(attributes={})]
    reward = read_reward(spans)
    assert reward.primary == find_final_reward(spans)
    dimensions = [dimension for each in spans for dimension in get_rewards_from_span(each)]
    unnamed = {} if get_rewards_from_span(span) else {"primary": reward.primary}
    assert reward.named == {dimension.name: dimension.value for dimension in dimensions} | unnamed


@pytest.mark.parametrize(
    "spans", [[], [Span.from_attributes(name="agl_slime.generate", attributes={"gen_ai.usage.input_tokens": 1})]]
)
def test_no_reward_is_an_error_and_not_zero(spans: list[Span]):
    with pytest.raises(RewardError, match="no reward") as error:
        read_reward(spans)
    assert error.value.reason == "no_reward"


@given(data=st.data(), values=st.dictionaries(st.sampled_from(["a", "b", "c"]), st.floats(-1, 1), min_size=2))
def test_the_order_of_a_dict_does_not_decide_which_reward_is_trained(data: st.DataObject, values: dict[str, float]):
    """One name is trained in a run; a plain number is that reward, and a rollout without the name says which it has."""
    key = data.draw(st.sampled_from([*values]))
    bad = data.draw(st.sets(st.sampled_from(["a", "b", "c"]))) & values.keys()
    named = {name: data.draw(st.sampled_from([None, "text", math.nan, 1e300])) for name in bad}
    items = data.draw(st.permutations([*(values | named).items()]))
    if bad == values.keys():
        with pytest.raises(RewardError):
            check_reward(dict(items), source="judge")
        return
    numbers, missing = split_missing(check_reward(dict(items), source="judge"))
    spans = [reward_span(numbers, primary_key=next(iter(numbers)), attributes=missing)]
    for keys in ({"run_key": key}, {"reward_key": key}):
        if key in bad:
            with pytest.raises(RewardError, match=rf"^judge\['{key}'\] returned ") as refused:
                read_reward(spans, **keys)
            assert refused.value.reason == ("no_reward" if named[key] is None else "bad_reward")
        else:
            reward = read_reward(spans, **keys)
            assert (reward.primary, next(iter(reward.named))) == (values[key], key)
            assert {*reward.missing} == bad
    first = items[0][0]  # the rollout's own
    if first in bad:
        with pytest.raises(RewardError):
            read_reward(spans)
    else:
        assert read_reward(spans).primary == values[first]
    with pytest.raises(
        RewardError, match=f"no reward named 'd', only {', '.join(sorted(values))}; a run trains on one"
    ):
        read_reward(spans, run_key="d")
    assert read_reward([reward_span(0.5)], run_key="d").primary == 0.5


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(0.25), np.array([0.5]), Fraction(1, 4)], ids=lambda value: type(value).__name__
)
def test_numbers_of_all_kinds_become_floats(value: Any) -> None:
    rewards = check_reward(value, source="judge")
    assert rewards == {"primary": float(np.asarray(value, dtype=float).item())}
    assert type(rewards["primary"]) is float


@pytest.mark.parametrize(
    ("value", "reason", "word"),
    [
        (None, "no_reward", "None"),
        ({}, "bad_reward", "empty"),
        ("1.0", "bad_reward", "'1.0' of type str"),
        ([1.0], "bad_reward", "list"),
        (math.nan, "bad_reward", "finite"),
        (np.float32("nan"), "bad_reward", "finite"),
        (np.array([1.0, 2.0]), "bad_reward", "not one number"),
        ({"format": math.nan}, "bad_reward", "'format'"),
        (10**400, "bad_reward", "finite"),
        (1e39, "bad_reward", "at most 1e\\+18"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_everything_else_is_refused_with_its_reason(value: object, reason: str, word: str) -> None:
    with pytest.raises(RewardError, match=f"^judge.*{word}") as caught:
        check_reward(value, source="judge")
    assert caught.value.reason == reason
