"""``AGLDataSource`` over the contract agent, as slime's manager builds it."""

import asyncio
import json
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agl_slime import AGLDataSource, RunnerThread
from agl_slime.data.ledger import LedgerCounts
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LLM, LightningStore
from agl_slime.types import Sample
from tests.harness import stores
from tests.harness.waiting import becomes_true
from tests.programs.agents.contract_agent import ContractAgent

AGENT = "tests.programs.agents.contract_agent:ContractAgent"
HELD_AGENT = f"{__name__}:HeldAgent"


class HeldAgent(ContractAgent):
    """Ends no rollout before ``release`` is set."""

    release = threading.Event()

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        assert self.release.wait(30)
        return super().compute_reward(task, response)


def args_for(**settings: Any) -> Namespace:
    """The minimal args of slime's contract tests, and ours."""
    minimal = dict.fromkeys(("buffer_filter_path", "custom_rm_path", "rm_type", "reward_key"))
    minimal |= {"rollout_global_dataset": False, "n_samples_per_prompt": 2, "group_rm": False}
    return Namespace(**{**minimal, "agl_get_timeout_s": 30, "agl_max_attempts": 1, **settings})


def write_tasks(path: Path, n: int) -> str:
    path.write_text("".join(json.dumps({"prompt": f"task {i}", "label": str(i)}) + "\n" for i in range(n)))
    return str(path)


@contextmanager
def service_with_runner(agent: Any = None, *, port: int = 0) -> Iterator[tuple[BridgeStore, StoreService]]:
    store = BridgeStore()
    # the service ends first: rollouts that are in flight then are lost, not failed
    with RunnerThread(agent=agent or ContractAgent(), store=store), StoreService(store=store, port=port) as service:
        yield store, service


def names(groups: list[list[Sample]]) -> list[str]:
    return [sample.metadata["agl_rollout_id"] for group in groups for sample in group]


def check(groups: list[list[Sample]], *, size: int = 2) -> None:
    for group in groups:
        assert len(group) == size
        assert len({sample.group_index for sample in group}) == 1
        for sample in group:
            assert (sample.status, sample.reward) == (Sample.Status.COMPLETED, 0.25)
            assert sample.index is not None
            assert sample.loss_mask is not None
            assert sample.response_length == len(sample.loss_mask) < len(sample.tokens)


def counts_of(source: AGLDataSource) -> LedgerCounts:
    """The ledger's counts, which add up."""
    counts = source.groups.ledger.counts()
    assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
    return counts


async def finished_rollouts(store: LightningStore, n: int = 1, **options: Any) -> list[str]:
    """The ids of ``n`` rollouts that succeed after they are enqueued."""
    ids = await stores.enqueue(store, n, **options)
    for rollout_id in ids:
        await stores.finish(store, rollout_id)
    return ids


async def _enqueue(url: str, group_id: str, n: int, size: int) -> list[str]:
    store = RemoteStore(url)
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="")})
    inputs = [{"prompt": f"{group_id} {i}"} for i in range(n)]
    rollouts = await stores.enqueue_rollouts(store, inputs, metadata={"group_id": group_id, "group_size": size})
    await store.close()
    return [rollout.rollout_id for rollout in rollouts]


def enqueue(url: str, group_id: str, n: int, *, size: int = 2) -> list[str]:
    return asyncio.run(_enqueue(url, group_id, n, size))


def wait_until(source: AGLDataSource, n: int) -> None:
    """Wait until ``n`` rollouts are in the source's ledger."""

    def opened() -> bool:
        with source.groups.changed:
            return source.groups.ledger.counts().opened >= n

    assert becomes_true(opened, 20), source.groups.ledger.counts()


async def sampling_by_mode(store: BridgeStore) -> dict[str, list[dict[str, Any]]]:
    """The sampling parameters of the store's rollouts, each once."""
    by_mode: dict[str, list[dict[str, Any]]] = {}
    for rollout in await store.query_rollouts():
        resources = await store.get_resources_by_id(rollout.resources_id or "")
        assert resources is not None
        sampling = resources.resources["main_llm"].sampling_parameters  # type: ignore[union-attr]
        if sampling not in by_mode.setdefault(str(rollout.mode), []):
            by_mode[str(rollout.mode)].append(sampling)
    return by_mode
