"""What the rollouts that slime's data source enqueues are sampled with."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from agl_slime.data.client import TaskGroup
from agl_slime.support.agl import LLM
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.connection import Connection

GROUPS = [TaskGroup(name, {"prompt": name}) for name in ("a", "b")]


@asynccontextmanager
async def connected(**args: Any) -> AsyncIterator[Connection]:
    given = Namespace(agl_agent="tests.programs.agents.contract_agent:ContractAgent", rollout_temperature=0.7, **args)
    connection = Connection(PluginSettings.from_args(given, {}))  # its runner is not started
    yield connection
    connection.stop()


async def sampled_with(connection: Connection, rollouts: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for rollout in rollouts:
        update = await connection.store.get_resources_by_id(rollout.resources_id)
        assert update is not None
        llm = update.resources["main_llm"]
        assert isinstance(llm, LLM)
        assert rollout.metadata["group_size"] == 3
        found.append((rollout.metadata["group_id"], llm.sampling_parameters))
    return found


async def test_deterministic_inference_gives_each_group_member_slimes_seed() -> None:
    async with connected(sglang_enable_deterministic_inference=True, rollout_seed=40) as connection:
        found = await sampled_with(connection, await connection.enqueue(GROUPS, size=3, mode="train"))
        assert [(group, sampling["sampling_seed"]) for group, sampling in found] == [
            *(("a", seed) for seed in (40, 41, 42)),
            *(("b", seed) for seed in (40, 41, 42)),
        ]
        assert {sampling["temperature"] for _, sampling in found} == {0.7}
        told = {"sampling_seed": 7}  # slime's own generate function says it by itself
        found = await sampled_with(connection, await connection.enqueue(GROUPS, size=3, mode="train", sampling=told))
        assert [sampling for _, sampling in found] == [told] * 6


async def test_nondeterministic_members_have_no_seed_and_share_one_resources_id() -> None:
    async with connected(rollout_seed=40) as connection:
        rollouts = await connection.enqueue(GROUPS, size=3, mode="train")
        assert len({rollout.resources_id for rollout in rollouts}) == 1
        assert all("sampling_seed" not in sampling for _, sampling in await sampled_with(connection, rollouts))


async def test_routed_experts_are_requested_without_a_probe_if_no_url_is_set() -> None:
    replayed = {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 2}
    async with connected(**replayed) as connection:
        assert connection.settings.llm_url is None
        found = await sampled_with(connection, await connection.enqueue(GROUPS, size=3, mode="train"))
        assert {tuple(sampling["routed_experts"]) for _, sampling in found} == {(2, 2)}
