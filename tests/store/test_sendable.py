"""Tasks that JSON cannot hold are refused by a store that other processes read, and neither changed nor retried."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import ConfigError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.sendable import check_sendable
from agl_slime.store.server import StoreService
from agl_slime.support.agl import EnqueueRolloutRequest
from agl_slime.support.threads import run_in_thread

ODD = [
    ({"a": [1, {"b": float("nan")}]}, r"task\['a'\]\[1\]\['b'\] is nan"),
    ({"a": float("-inf")}, r"task\['a'\] is -inf"),
    ({"a": "half \ud83d"}, r"task\['a'\] is 'half"),
    ({"\ud83d": 1}, "a key of task is"),
    ({"a": object()}, r"task\['a'\] is <object object"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=12,
)


async def test_a_task_that_json_cannot_hold_is_refused_where_others_read() -> None:
    store = BridgeStore()
    service = StoreService(store=store)
    await run_in_thread(service.start)
    try:
        for task, message in ODD:
            with pytest.raises(ConfigError, match=message):
                await store.enqueue_rollout(input=task)
            with pytest.raises(ConfigError, match=message):
                await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task)])
        task = {"n": 10**30, "text": "NaN, Infinity", "emoji": "😀"}
        await store.enqueue_rollout(input=task)
        remote = RemoteStore(service.url)
        rollout = await remote.dequeue_rollout(worker_id="worker")
        await remote.close()
        assert rollout is not None
        assert rollout.input == task
    finally:
        await run_in_thread(service.stop)
    for task, _ in ODD:
        await store.enqueue_rollout(input=task)  # this process takes it as it is


@given(task=JSON, text=st.sampled_from(["NaN", "Infinity", "-Infinity"]))
def test_json_is_never_refused(task: Any, text: str) -> None:
    check_sendable({"task": task, text: [text, task]})
