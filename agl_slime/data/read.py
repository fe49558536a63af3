"""Reading of a completed rollout: its Samples and reward, or the reason of its failure."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agl_slime import errors
from agl_slime.data.results import MemberResult, Outcome, instance_of
from agl_slime.errors import RolloutError, format_exception, format_place
from agl_slime.store.bridge import FINISHED, WORKER_DIED
from agl_slime.support.agl import Attempt, EnqueueRolloutRequest, LightningStore, Rollout, Span
from agl_slime.support.threads import run_in_thread_if
from agl_slime.tokens.attributes import FAILURE_REASON, LATENCY_S, REPLAY_FILE, USAGE_OUTPUT_TOKENS
from agl_slime.tokens.converter import convert_rollout
from agl_slime.tokens.reward import read_reward
from agl_slime.tokens.spans import read_turns, spans_of_attempt
from agl_slime.tokens.turn import Trajectory

logger = logging.getLogger(__name__)

_EXCEPTION_TYPE = "exception.type"
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)

# Above this many attribute characters a conversion takes longer than a loop should wait (about 2 ms).
_HEAVY_TRACE_CHARS = 200_000


async def read_rollout(
    store: LightningStore,
    rollout_id: str,
    *,
    tokenizer: Any = None,
    reward_key: str | None = None,
    run_key: str | None = None,
    convert_validation: bool = False,
    text_only: bool = False,
    reward_spans: bool = False,
    replay_files: Path | None = None,
) -> MemberResult | None:
    """The result of a rollout; ``None`` when it has not ended yet (a failed attempt that is tried again) or does not
    exist. Validation rollouts have samples only with ``convert_validation``, and with ``text_only`` the conversation's
    text without samples; keys, ``reward_spans`` and ``replay_files`` are of ``convert_rollout``."""
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None or rollout.status not in FINISHED:
        return None
    if rollout.status == "cancelled":
        message = "cancelled in the store"
        return _result(rollout, failure="cancelled", failure_message=message, outcome_if_failed=Outcome.CANCELLED)
    # The latest attempt only: spans of failed attempts stay in the store, and a dead worker may still add some.
    attempt = await store.get_latest_attempt(rollout_id)
    attempt_id = attempt.attempt_id if attempt is not None else "latest"
    try:
        delivered = await store.query_spans(rollout_id, attempt_id)
        spans = [*{span.span_id: span for span in delivered}.values()]  # an exporter may deliver a span twice
    except RuntimeError as error:  # of Agent Lightning's in-memory store, for spans that it dropped to save memory
        return _failed(rollout, "spans_evicted", str(error))
    timeline = timeline_of(rollout, attempt, spans)
    texts = (value for span in spans for value in span.attributes.values() if isinstance(value, str))
    heavy = sum(map(len, texts)) > _HEAVY_TRACE_CHARS or any(REPLAY_FILE in span.attributes for span in spans)
    # the engine's own count, not the length of our ids: the two are compared in every report
    counts = [span.attributes[USAGE_OUTPUT_TOKENS] for span in spans if USAGE_OUTPUT_TOKENS in span.attributes]
    # a foreign span may hold anything, as True or NaN
    numbers = [n for n in counts if isinstance(n, (int, float)) and not isinstance(n, bool)]
    sampled = sum(int(number) for number in numbers if math.isfinite(number))
    figures: Any = {"sampled_tokens": sampled, "turns": len(counts), "timeline": timeline}

    async def failed(reason: str, message: str) -> MemberResult:
        read_turns_so_far = partial(_trajectory_of, rollout, spans, attempt_id, tokenizer)
        trajectory = await run_in_thread_if(heavy, read_turns_so_far)
        return _failed(rollout, reason, message, trajectory=trajectory, **figures)

    if rollout.status == "failed":
        return await failed(*failure_of(spans, attempt))
    options: Any = {"reward_key": reward_key, "run_key": run_key}
    try:
        reward = read_reward(spans, **options)
        conversion = None
        if rollout.mode in (None, "train") or convert_validation:
            options |= {"reward": reward, "attempt_id": attempt_id}
            options |= {"reward_spans": reward_spans, "replay_files": replay_files}
            convert = partial(convert_rollout, rollout, spans, tokenizer, **options)
            conversion = await run_in_thread_if(heavy, convert)
    except RolloutError as error:
        return await failed(error.reason, str(error))
    except Exception as error:
        # One rollout that breaks the conversion must not end the run; it is counted, and says where it broke.
        logger.debug("Rollout %s could not be converted.", rollout_id, exc_info=error)
        return await failed("conversion_error", format_exception(error))
    return _result(
        rollout,
        samples=tuple(conversion.samples) if conversion is not None else (),
        trajectory=(
            _trajectory_of(rollout, spans, attempt_id, tokenizer) if text_only else conversion and conversion.trajectory
        ),
        reward=reward.primary,
        rewards=dict(reward.named),
        **figures,
    )


def _trajectory_of(rollout: Rollout, spans: Sequence[Span], attempt_id: str, tokenizer: Any) -> Trajectory | None:
    """The turns of a rollout without Samples, for reports; ``None`` where its spans have none."""
    try:
        turns = read_turns(spans_of_attempt(spans, attempt_id), tokenizer)
    except Exception as error:  # the cause of the failure, such as a tokenizer, may fail here, too
        logger.debug("The turns of failed rollout %s cannot be read.", rollout.rollout_id, exc_info=error)
        return None
    if not turns:
        return None
    return Trajectory(
        rollout_id=rollout.rollout_id, attempt_id=attempt_id, task=rollout.input, mode=rollout.mode, turns=turns
    )


def timeline_of(rollout: Rollout, attempt: Attempt | None, spans: Sequence[Span]) -> dict[str, Any]:
    """The timeline of a rollout, in seconds since ``enqueued`` (Unix time): ``started`` and ``ended`` of the latest
    attempt, and ``calls``, start and end of each model call. Before the start the rollout waits for a runner; between
    calls run the agent, its tools and its judge."""
    zero = rollout.start_time
    began, ended = (attempt.start_time, attempt.end_time) if attempt is not None else (None, rollout.end_time)
    calls = []
    for span in spans:
        if USAGE_OUTPUT_TOKENS in span.attributes and span.start_time is not None:
            latency = span.attributes.get(LATENCY_S, (span.end_time or span.start_time) - span.start_time)
            if isinstance(latency, (int, float)):
                calls.append([round(span.start_time - zero, 4), round(span.start_time - zero + latency, 4)])
    started, ended = (None if time_s is None else round(time_s - zero, 4) for time_s in (began, ended))
    return {"enqueued": zero, "started": started, "ended": ended, "calls": calls}


def failure_of(spans: Sequence[Span], attempt: Attempt | None) -> tuple[str, str]:
    """The failure of an attempt as (reason, message): from its exception span, else the store's status of the attempt
    (``timeout``, ``unresponsive``) and the end of its runner."""
    for span in reversed(spans):
        reason = span.attributes.get(FAILURE_REASON) or span.attributes.get(_EXCEPTION_TYPE)
        if reason:
            message, place = str(span.attributes.get("exception.message", "")), ""
            if reason == span.attributes.get(_EXCEPTION_TYPE) and not hasattr(errors, str(reason)):
                # an exception of the agent's code: its author needs the place; errors of this package say enough
                frames = _FRAME.findall(str(span.attributes.get("exception.stacktrace", "")))
                place = format_place([(file, int(line)) for file, line in frames])
            return str(reason), message + (f" ({place})" if place else "")
    status = attempt.status if attempt is not None else "failed"
    died = (attempt.metadata or {}).get(WORKER_DIED) if attempt is not None else None
    return status, f"its runner ended: {died}" if died else f"the store marked the attempt as {status}"


def _result(rollout: Rollout, **fields: Any) -> MemberResult:
    metadata = rollout.metadata or {}
    size = metadata.get("group_size")
    return MemberResult(
        rollout_id=rollout.rollout_id,
        group_id=str(metadata.get("group_id") or rollout.rollout_id),
        mode=rollout.mode or "train",
        group_size=int(size) if isinstance(size, (int, float)) and size >= 1 else None,
        task=rollout.input,
        instance_id=instance_of(metadata),
        **fields,
    )


def _failed(rollout: Rollout, reason: str, message: str, **fields: Any) -> MemberResult:
    """A failure with the request that retries it; a cancelled rollout has none."""
    outcome = Outcome.CANCELLED if rollout.status == "failed" and reason == "cancelled" else Outcome.FAILED
    metadata = dict(rollout.metadata or {})
    if "seed" in metadata:  # with the same one a deterministic engine would fail it again
        metadata["seed"] = f"{metadata['seed']}+"
    kept = {name: getattr(rollout, name) for name in ("input", "mode", "resources_id", "config")}
    retry = EnqueueRolloutRequest(**kept, metadata=metadata)
    return _result(
        rollout,
        failure=reason,
        failure_message=message,
        outcome_if_failed=outcome,
        request=None if outcome is Outcome.CANCELLED else retry,
        **fields,
    )
