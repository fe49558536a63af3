"""``--max-concurrent auto``: the load that engines report, and a run that follows it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agl_slime.cli.settings import train_config
from agl_slime.engine.client.load import EngineLoads
from agl_slime.errors import ConfigError
from agl_slime.support.http import listening


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
    from rich.console import Console

    from agl_slime.cli.local import run_training

    # the tiny policy answers an iteration in under a second: polls a second apart may all fall between two of them
    monkeypatch.setattr("agl_slime.loop.auto_concurrency._LOOK_S", 0.05)
    settings: dict[str, Any] = {"num_iterations": 6, "max_concurrent": "auto", "eval_interval": 0, "view": "lines"}
    config = train_config(model_path=policy_dir, output_dir=tmp_path / "run", **settings)
    asyncio.run(run_training(config, console=Console(quiet=True)))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    limits = [row["perf/in_flight_limit"] for row in rows]
    assert min(limits) >= 8  # the start
    assert 8 < max(limits) <= 256  # 64 rollouts of an iteration, an engine of 128 places
