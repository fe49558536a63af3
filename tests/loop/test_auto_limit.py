"""The automatic limit of rollouts in flight on a simulated engine: it keeps the engine full, does not overrun it, and
adapts within half a minute when the engine's speed changes.

The engine's queue has room for the calls of rollouts that were started while it was five times as fast: no limit on
rollouts could spare a smaller queue its refusals."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.engine.client.load import EngineLoad
from agl_slime.loop.auto_concurrency import MOST, AutoLimit
from tests.harness.engine_model import EngineModel
from tests.harness.examples import examples

FACTORS = (1.0, 5.0, 1.0)  # of the engine's speed, a minute each
FIXED = (32, 96, 192, 384, 1024)  # benchmarks/auto_concurrency.py has more


def rates(model: EngineModel, auto: AutoLimit, *, tells: bool = True, fixed: bool = False) -> list[float]:
    """Tokens per second, measured from half a minute after each change."""
    speed, capacity, refused, result = model.speed, model.capacity, 0, []
    for factor in FACTORS:
        model.speed, model.capacity = speed * factor, capacity * factor
        tokens = 0.0
        for second in range(60):
            tokens = model.tokens if second == 30 else tokens
            model.advance(seconds=1, limit=partial(getattr, auto, "limit"))
            load = EngineLoad(
                running=len(model.running),
                waiting=len(model.waiting),
                refused=model.refused - refused,
                most_running=model.slots if tells else 0,
            )
            auto, refused = auto if fixed else auto.step(load, in_flight=model.in_flight), model.refused
        result.append((model.tokens - tokens) / 30)
    return result


@settings(max_examples=examples(8), deadline=None)
@given(
    slots=st.integers(16, 256),
    tools_s=st.sampled_from([0.0, 0.5, 2.0]),
    calls=st.integers(5, 20),
    seed=st.integers(0, 1000),
)
def test_it_is_within_five_percent_of_a_full_engine_and_overruns_none(
    slots: int, tools_s: float, calls: int, seed: int
) -> None:
    model = EngineModel(slots=slots, capacity=30.0 * slots, queue=5 * slots, tools_s=tools_s, calls=calls, seed=seed)
    full = [factor * 30.0 * slots for factor in FACTORS]
    # an answer takes only a fraction of its last tick
    reached = [rate / (most * 0.93) for rate, most in zip(rates(model, AutoLimit()), full, strict=True)]
    assert min(reached) >= 0.95, reached
    assert model.refused < 0.01 * model.n_requests


def test_it_is_as_good_as_the_best_fixed_number() -> None:
    def engine() -> EngineModel:
        return EngineModel(slots=96, capacity=3_000.0, queue=400, tools_s=2.0)

    fixed = {limit: (model := engine(), rates(model, replace(AutoLimit(), limit=limit), fixed=True)) for limit in FIXED}
    best = [max(rate) for rate in zip(*(result for _, result in fixed.values()), strict=True)]
    model = engine()
    result = rates(model, AutoLimit())
    assert all(rate >= 0.95 * most for rate, most in zip(result, best, strict=True)), (result, best)
    assert model.refused < 0.01 * model.n_requests
    overrun = fixed[1024][0]
    assert overrun.refused > 0.01 * overrun.n_requests


def test_the_capacity_of_an_engine_that_does_not_report_it_is_measured() -> None:
    model = EngineModel(slots=64, capacity=2_000.0)
    assert min(rates(model, AutoLimit(), tells=False)) >= 0.88 * 2_000


def test_the_limit_is_not_raised_where_it_would_not_help() -> None:
    fewer, cache = replace(AutoLimit(), limit=100, slow_start=False), AutoLimit()
    for _ in range(20):
        fewer = fewer.step(EngineLoad(running=40, waiting=0, usage=0.0), in_flight=40)
        n = cache.limit
        cache = cache.step(EngineLoad(running=n, waiting=0, usage=min(1.0, n * 0.02)), in_flight=n)
    assert fewer.limit == 100  # something else limits the rollouts
    assert cache.limit * 0.02 <= 1.0  # the KV cache is full


@given(
    st.lists(
        st.tuples(
            st.builds(
                EngineLoad,
                running=st.integers(0, 10_000),
                waiting=st.integers(0, 10_000),
                usage=st.floats(0, 2),
                most_running=st.integers(0, 5_000),
                refused=st.integers(0, 10_000),
            ),
            st.integers(0, 10_000),
        ),
        max_size=60,
    )
)
def test_auto_limit_stays_in_its_bounds_and_at_most_doubles(looks: list[tuple[EngineLoad, int]]) -> None:
    auto = AutoLimit()
    for load, in_flight in looks:
        last, auto = auto.limit, auto.step(load, in_flight=in_flight)
        assert 1 <= auto.limit <= MOST
        assert auto.limit <= max(2 * last, last + 1, in_flight)
