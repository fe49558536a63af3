"""Sampling parameters of the rollouts that slime's data source enqueues."""

from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agl_slime.data.client import TaskGroup
from agl_slime.support.agl import LLM
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.connection import Connection
from tests.harness.slime_source import AGENT

GROUPS = [TaskGroup(name, {"prompt": name}) for name in ("a", "b")]


@asynccontextmanager
async def connected(**args: Any) -> AsyncIterator[Connection]:
    args = {"agl_agent": AGENT, "rollout_temperature": 0.7, **args}
    connection = Connection(PluginSettings.from_args(Namespace(**args), {}))  # its runner is not started
    yield connection
    connection.stop()


async def enqueued(connection: Connection, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Group and sampling parameters of two groups of three rollouts."""
    rows = []
    for rollout in await connection.enqueue(GROUPS, size=3, mode="train", **options):
        update = await connection.store.get_resources_by_id(rollout.resources_id or "")
        assert update is not None
        llm = update.resources["main_llm"]
        assert isinstance(llm, LLM)
        assert rollout.metadata["group_size"] == 3
        rows.append((rollout.metadata["group_id"], llm.sampling_parameters))
    return rows


async def test_members_of_a_group_have_their_own_seeds_and_one_resources_id() -> None:
    async with connected(rollout_seed=40) as connection:
        rollouts = await connection.enqueue(GROUPS, size=3, mode="train", oldest_version=4)
        seeds = [(rollout.metadata["seed"], rollout.metadata["oldest_version"]) for rollout in rollouts]
        assert seeds == [(f"40/train/{group}/{member}", 4) for group in "ab" for member in range(3)]
        assert len({rollout.resources_id for rollout in rollouts}) == 1
        assert all("sampling_seed" not in sampling for _, sampling in await enqueued(connection))
        sampling = {"sampling_seed": 7}  # slime's own generate function sets it
        assert await enqueued(connection, sampling=sampling) == [(group, sampling) for group in "aaabbb"]


async def test_routed_experts_are_requested_without_a_probe_if_no_url_is_set() -> None:
    replayed = {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 2}
    async with connected(**replayed) as connection:
        assert connection.settings.llm_url is None
        assert {tuple(sampling["routed_experts"]) for _, sampling in await enqueued(connection)} == {(2, 2)}
