"""``--max-concurrent auto``: the load that engines report, the limit of rollouts in flight on a simulated engine, and a
run with it.

The limit keeps the engine full, does not overrun it, and adapts within half a minute when the engine's speed changes.
The simulated queue has room for the calls of rollouts that were started while the engine was five times as fast: no
limit on rollouts could spare a smaller queue its refusals."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.cli.settings import train_config
from agl_slime.engine.client.load import EngineLoad, EngineLoads
from agl_slime.errors import ConfigError
from agl_slime.loop.auto_concurrency import MOST, AutoLimit
from agl_slime.support.http import listening
from tests.harness.engine_model import EngineModel
from tests.harness.examples import examples

FACTORS = (1.0, 5.0, 1.0)  # of the engine's speed, a minute each


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


def serving(*answers: list[dict[str, float]]) -> AbstractAsyncContextManager[str]:
    """A server that is no router; each request for its load gets the next answer."""
    pending = list(answers)
    app = web.Application()

    async def loads(request: web.Request) -> web.Response:
        return web.json_response({"loads": pending.pop(0)})

    if answers:
        app.router.add_get("/v1/loads", loads)
    return listening(app, host="127.0.0.1", port=0, backlog=8)


async def test_the_ranks_of_a_server_are_one_load() -> None:
    rank = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25, "max_running_requests": 8}
    async with serving([rank, {**rank, "token_usage": 0.5}], [{"num_running_reqs": 2}]) as url:
        loads = EngineLoads(url)
        both, poor = await loads.look(), await loads.look()
        await loads.aclose()
    assert (both.running, both.waiting, both.usage, both.most_running, both.refused) == (6, 2, 0.5, 16, 0)
    assert (poor.running, poor.waiting, poor.usage, poor.most_running) == (2, 0, 0.0, 0)


async def test_refusals_are_counted_between_two_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = [7, 9, 9]  # 7 are from before the run
    monkeypatch.setattr("agl_slime.engine.client.load.refused_calls", lambda url: totals[0])
    refused = []
    async with serving(*([{}] for _ in range(3))) as url:
        loads = EngineLoads(url)
        while totals:
            refused.append((await loads.look()).refused)
            totals.pop(0)
        await loads.aclose()
    assert refused == [0, 2, 0]


async def test_a_server_without_loads_is_one_sentence() -> None:
    async with serving() as url:
        loads = EngineLoads(url)
        with pytest.raises(ConfigError, match=r"--max-concurrent auto: .* does not say how busy it is .*give a number"):
            await loads.look()
        await loads.aclose()
    with pytest.raises(ConfigError, match="--max-concurrent auto with --runners process:2: give a number"):
        train_config(max_concurrent="auto", runners="process:2")


@pytest.mark.slow
def test_a_run_finds_its_number_and_reports_it(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from tests.harness.training import train

    # the tiny policy answers an iteration in under a second: polls a second apart may all fall between two of them
    monkeypatch.setattr("agl_slime.loop.auto_concurrency._LOOK_S", 0.05)
    settings: dict[str, Any] = {"num_iterations": 6, "max_concurrent": "auto", "eval_interval": 0, "view": "lines"}
    train(model_path=policy_dir, output_dir=tmp_path / "run", **settings)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    limits = [row["perf/in_flight_limit"] for row in rows]
    assert min(limits) >= 8  # the start
    assert 8 < max(limits) <= 256  # 64 rollouts of an iteration, an engine of 128 places
