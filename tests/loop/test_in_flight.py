"""``--max-concurrent auto``: what engines say of their load, and a run that goes by it."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console

from agl_slime.cli.settings import train_config
from agl_slime.engine.client.load import EngineLoads
from agl_slime.errors import ConfigError
from agl_slime.support.http import listening


def serving(*answers: web.Response) -> web.Application:
    """A server that is no router; each answer of its load is the next of these."""
    left = list(answers)
    app = web.Application()

    async def loads(request: web.Request) -> web.Response:
        return left.pop(0)

    app.router.add_get("/v1/loads", loads)
    return app


def ranks(*loads: dict[str, float]) -> web.Response:
    return web.json_response({"loads": list(loads)})


async def test_the_ranks_of_a_server_are_one_load() -> None:
    rank = {"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.25, "max_running_requests": 8}
    app = serving(ranks(rank, {**rank, "token_usage": 0.5}), ranks({"num_running_reqs": 2}))
    async with listening(app, host="127.0.0.1", port=0, backlog=8) as url:
        loads = EngineLoads(url)
        both, poor = await loads.look(), await loads.look()
        await loads.aclose()
    assert (both.running, both.waiting, both.usage, both.most_running, both.refused) == (6, 2, 0.5, 16, 0)
    assert (poor.running, poor.waiting, poor.usage, poor.most_running) == (2, 0, 0.0, 0)


async def test_refusals_count_from_the_look_before_and_not_from_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    so_far = [7]
    monkeypatch.setattr("agl_slime.engine.client.load.refused_calls", lambda url: so_far[0])
    async with listening(serving(*(ranks({}) for _ in range(3))), host="127.0.0.1", port=0, backlog=8) as url:
        loads = EngineLoads(url)
        found = [(await loads.look()).refused]
        so_far[0] = 9
        found += [(await loads.look()).refused, (await loads.look()).refused]
        await loads.aclose()
    assert found == [0, 2, 0]


async def test_a_server_that_does_not_say_it_is_one_sentence() -> None:
    async with listening(web.Application(), host="127.0.0.1", port=0, backlog=8) as url:
        loads = EngineLoads(url)
        with pytest.raises(ConfigError, match=r"--max-concurrent auto: .* does not say how busy it is .*give a number"):
            await loads.look()
        await loads.aclose()


@pytest.mark.slow
def test_a_run_finds_its_number_and_says_it(policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason='training needs torch: pip install "agl-slime[local]"')
    from agl_slime.cli.local import run_training

    # the tiny policy answers an iteration in under a second: looks a second apart may all fall between two of them
    monkeypatch.setattr("agl_slime.loop.auto_concurrency._LOOK_S", 0.05)

    config = train_config(
        num_iterations=6,
        max_concurrent="auto",
        model_path=policy_dir,
        eval_interval=0,
        output_dir=tmp_path / "run",
        view="lines",
    )
    asyncio.run(run_training(config, console=Console(file=io.StringIO())))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    limits = [row["perf/in_flight_limit"] for row in rows]
    assert min(limits) >= 8  # where it began
    assert max(limits) > 8
    assert max(limits) <= 256  # of 64 rollouts of an iteration, an engine of 128 places


def test_it_is_for_runners_of_this_process() -> None:
    with pytest.raises(ConfigError, match="--max-concurrent auto with --runners process:2: give a number"):
        train_config(max_concurrent="auto", runners="process:2")
