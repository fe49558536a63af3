"""Reading an ended rollout: its turns, also of a failed one, and the times of its timeline."""

import json
import math
import threading
from typing import Any

import numpy as np
import pytest

from agl_slime.data.read import read_rollout
from agl_slime.errors import RolloutError
from agl_slime.store.bridge import BridgeStore
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder
from tests.harness.stores import a_turn, enqueue, finish, make_span
from tests.harness.vocabularies import chat_tokenizer
from tests.tokens.test_forks import UNMARKED


async def read(**end: Any) -> Any:
    store = BridgeStore()
    (rollout_id,) = await enqueue(store)
    await finish(store, rollout_id, **end)
    return await read_rollout(store, rollout_id)


async def test_failed_rollout_keeps_its_turns() -> None:
    for end, reason in (({"status": "failed"}, "failed"), ({"reward": None}, "no_reward")):
        member = await read(**end)
        assert (member.ok, member.failure) == (False, reason)
        assert member.samples == ()
        assert [message["content"] for message in member.trajectory.messages] == ["hi", "hello"]
        assert (member.turns, member.sampled_tokens) == (1, len(member.trajectory.turns[0].response_ids))


async def test_a_span_that_was_delivered_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    query = BridgeStore.query_spans

    async def query_twice(*args: Any) -> list[Any]:
        return [*await query(*args)] * 2

    once = await read()
    monkeypatch.setattr(BridgeStore, "query_spans", query_twice)
    twice = await read()
    assert (twice.turns, twice.sampled_tokens, len(twice.timeline["calls"])) == (1, once.sampled_tokens, 1)


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


@pytest.mark.parametrize(("log_probs", "why"), [([-0.5], "1 log-probs for 2 ids"), ([-0.5, -math.inf], "-inf")])
async def test_log_probs_that_cannot_be_right_fail_the_rollout(log_probs: list[float], why: str) -> None:
    turn = a_turn()
    object.__setattr__(turn, "log_probs", np.array(log_probs, dtype=np.float32))  # as another writer's
    member = await read(turns=[turn])
    assert (member.failure, why in member.failure_message) == ("bad_trace", True), member.failure_message


async def test_two_turns_of_text_are_one_sample_of_new_tokens() -> None:
    store, messages = BridgeStore(), list[dict[str, str]]()
    [rollout_id] = await enqueue(store)
    attempt_id = await finish(store, rollout_id, turns=[])
    for turn in (1, 2):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        answer = {"role": "assistant", "content": f"Answer {turn}!\n"}
        texts = {names.INPUT_MESSAGES: json.dumps(messages), names.OUTPUT_MESSAGES: json.dumps([answer])}
        span = make_span(rollout_id, attempt_id, turn, **texts, **{"gen_ai.operation.name": "chat"})
        await store.add_many_spans([span])
        messages.append(answer)
    member = await read_rollout(store, rollout_id, tokenizer=chat_tokenizer("deepseek", UNMARKED))
    assert member is not None
    [sample] = member.samples
    assert (sample.metadata["token_source"], sample.rollout_log_probs) == ("retokenized", None)


async def test_only_a_large_trace_is_converted_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(*_: Any, **__: Any) -> None:
        raise RolloutError("converted", reason=threading.current_thread().name)

    monkeypatch.setattr("agl_slime.data.read.convert_rollout", convert)
    for limit, thread in ((200_000, threading.current_thread().name), (0, "agl-slime-worker")):
        monkeypatch.setattr("agl_slime.data.read._HEAVY_TRACE_CHARS", limit)
        assert (await read()).failure == thread
