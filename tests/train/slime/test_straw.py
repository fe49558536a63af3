"""Batches go into straw's durable queue, and whoever writes them is killed: each group is trained once."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from tests.harness.slime_programs import REPOSITORY, run_program
from tests.harness.stores import enqueue_group, finish

GROUPS, KILLS, SIZE, AHEAD = 1_000, 20, 2, 60


@pytest.mark.slow
def test_each_group_is_trained_once_however_often_the_manager_is_killed(tmp_path: Path):
    pytest.importorskip("straw", reason="the queue is not installed: pip install straw-queue")
    store = BridgeStore()

    def trained() -> int:
        journal = tmp_path / "journal.json"
        return 10 * json.loads(journal.read_text())["next"] if journal.exists() else 0

    async def roll_out() -> None:
        for number in range(GROUPS):
            for rollout in await enqueue_group(store, f"g{number}", size=SIZE):
                await finish(store, rollout.rollout_id)
            while number - trained() > AHEAD:  # noqa: ASYNC110  # as agents whose rollouts are asked for
                await asyncio.sleep(0.05)

    with StoreService(store=store) as service:
        agents = threading.Thread(target=lambda: asyncio.run(roll_out()))
        agents.start()
        numbers = (str(GROUPS), str(KILLS), "7")
        result = run_program(REPOSITORY, "straw", tmp_path, service.url, *numbers, timeout_s=400)
        agents.join(60)
    assert result["kills"] == KILLS
    # what the queue has accepted
    assert (result["groups"], result["rollouts"], result["distinct"]) == (GROUPS, GROUPS * SIZE, GROUPS * SIZE)
    # and what the ledger says
    assert result["ledger"] == {"trained": GROUPS * SIZE}
    assert result["open"] == 0
