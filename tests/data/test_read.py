"""Reading an ended rollout: its turns, also of a failed one, and the times of its timeline."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from agl_slime.data.read import collect
from agl_slime.errors import RolloutError
from agl_slime.store.bridge import BridgeStore
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder
from tests.harness.stores import a_turn, enqueue, finish


async def read(**end: Any) -> Any:
    store = BridgeStore()
    (rollout_id,) = await enqueue(store)
    await finish(store, rollout_id, **end)
    return await collect(store, rollout_id)


async def test_failed_rollout_keeps_its_turns() -> None:
    for end, reason in (({"status": "failed"}, "failed"), ({"reward": None}, "no_reward")):
        member = await read(**end)
        assert (member.ok, member.failure) == (False, reason)
        assert member.samples == ()
        assert [message["content"] for message in member.trajectory.messages] == ["hi", "hello"]
        assert (member.turns, member.sampled_tokens) == (1, len(member.trajectory.turns[0].response_ids))


async def test_failed_rollout_without_turns_or_with_damaged_turns_stays_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await read(status="failed", turns=[])).trajectory is None
    encode = TurnEncoder.encode
    monkeypatch.setattr(TurnEncoder, "encode", lambda *turn: {**encode(*turn), names.RESPONSE_IDS: "!"})
    member = await read(status="failed")
    assert member.failure == "failed"
    assert member.trajectory is None


async def test_timeline_starts_at_enqueueing() -> None:
    member = await read()
    assert member.ok
    timeline = member.timeline
    assert 0 <= timeline["started"] <= timeline["ended"] < 60
    (call,) = timeline["calls"]
    assert call[1] - call[0] == a_turn().latency_s
    assert call[0] + timeline["enqueued"] == pytest.approx(0, abs=1e-3)  # the span of the case began at Unix time 0


@pytest.mark.parametrize(("count", "sampled"), [(float("nan"), 0), ("12", 0), (True, 0), (12.0, 12)])
async def test_invalid_token_count_is_not_counted(monkeypatch: pytest.MonkeyPatch, count: Any, sampled: int) -> None:
    encode = TurnEncoder.encode
    monkeypatch.setattr(TurnEncoder, "encode", lambda *turn: {**encode(*turn), names.USAGE_OUTPUT_TOKENS: count})
    member = await read()
    assert (member.turns, member.sampled_tokens) == (1, sampled)


async def test_only_a_large_trace_is_converted_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: Any, **__: Any) -> None:
        raise RolloutError("converted", reason=threading.current_thread().name)

    monkeypatch.setattr("agl_slime.data.read.convert_rollout", convert)
    for limit, thread in ((200_000, threading.current_thread().name), (0, "agl-slime-worker")):
        monkeypatch.setattr("agl_slime.data.read._HEAVY_TRACE_CHARS", limit)
        assert (await read()).failure == thread
