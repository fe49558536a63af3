"""From a finished rollout in the store to what its group needs to know: samples and a reward, or why there are none."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from agl_slime import errors
from agl_slime.errors import RolloutError, spell_exception, spell_place
from agl_slime.groups.results import MemberResult, Outcome, instance_of
from agl_slime.support.agl import EnqueueRolloutRequest, LightningStore, Rollout, Span
from agl_slime.support.threads import run_in_thread
from agl_slime.trace.attributes import USAGE_OUTPUT_TOKENS
from agl_slime.trace.converter import convert_rollout
from agl_slime.trace.reward import read_reward

logger = logging.getLogger(__name__)

# Written by the runner's guard on the exception span of a failed attempt.
_FAILURE_REASON = "agl_slime.failure.reason"
_EXCEPTION_MESSAGE = "exception.message"
_EXCEPTION_TYPE = "exception.type"
_EXCEPTION_STACKTRACE = "exception.stacktrace"
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)

# Above this many attribute characters a conversion takes longer than a loop should wait (about 2 ms).
_HEAVY_TRACE_CHARS = 200_000

_FINISHED = frozenset({"succeeded", "failed", "cancelled"})


async def collect(
    store: LightningStore,
    rollout_id: str,
    *,
    tokenizer: Any = None,
    reward_key: str | None = None,
    convert_validation: bool = False,
) -> MemberResult | None:
    """The result of a rollout; ``None`` when it has not ended yet (a failed attempt that is tried again) or does not
    exist. Validation rollouts have samples only with ``convert_validation``."""
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None or rollout.status not in _FINISHED:
        return None
    metadata = rollout.metadata or {}
    group_id = str(metadata.get("group_id") or rollout.rollout_id)
    mode = rollout.mode or "train"
    if rollout.status == "cancelled":
        return _failed(
            rollout, group_id, mode, reason="cancelled", message="cancelled in the store", outcome=Outcome.CANCELLED
        )
    # Only the attempt that counts: spans of failed attempts stay in the store, and a dead worker may still write to its
    # own.
    attempt = await store.get_latest_attempt(rollout_id)
    attempt_id = attempt.attempt_id if attempt is not None else "latest"
    try:
        spans = [*await store.query_spans(rollout_id, attempt_id)]
    except (
        RuntimeError
    ) as error:  # Agent Lightning's in-memory store raises it for spans that it dropped to save memory
        return _failed(rollout, group_id, mode, reason="spans_evicted", message=str(error))
    if rollout.status == "failed":
        reason, message = failure_of(spans, attempt_status=attempt.status if attempt is not None else "failed")
        outcome = Outcome.CANCELLED if reason == "cancelled" else Outcome.FAILED
        return _failed(rollout, group_id, mode, reason=reason, message=message, outcome=outcome)
    try:
        reward = read_reward(spans, reward_key=reward_key)
        if mode != "train" and not convert_validation:
            conversion = None
        elif (
            sum(len(value) for span in spans for value in span.attributes.values() if isinstance(value, str))
            > _HEAVY_TRACE_CHARS
        ):
            conversion = await run_in_thread(
                partial(convert_rollout, rollout, spans, tokenizer, reward_key=reward_key, attempt_id=attempt_id)
            )
        else:
            conversion = convert_rollout(rollout, spans, tokenizer, reward_key=reward_key, attempt_id=attempt_id)
    except RolloutError as error:
        return _failed(rollout, group_id, mode, reason=error.reason, message=str(error))
    except Exception as error:
        # One rollout that breaks the conversion must not end the run; it is counted, and says where it broke.
        logger.debug("Rollout %s could not be converted.", rollout_id, exc_info=error)
        return _failed(rollout, group_id, mode, reason="conversion_error", message=spell_exception(error))
    return MemberResult(
        rollout_id=rollout.rollout_id,
        group_id=group_id,
        mode=mode,
        group_size=_group_size(metadata),
        samples=tuple(conversion.samples) if conversion is not None else (),
        trajectory=conversion.trajectory if conversion is not None else None,
        forks=dict(conversion.report.forks) if conversion is not None else {},
        reward=reward.primary,
        rewards=dict(reward.named),
        sampled_tokens=_sampled_tokens(spans),
        turns=sum(USAGE_OUTPUT_TOKENS in span.attributes for span in spans),
        task=rollout.input,
        instance_id=instance_of(metadata),
    )


def failure_of(spans: Sequence[Span], *, attempt_status: str) -> tuple[str, str]:
    """Why an attempt failed, as (reason, message): from its exception span, else from the status that the store gave it
    (``timeout``, ``unresponsive``)."""
    for span in reversed(spans):
        reason = span.attributes.get(_FAILURE_REASON) or span.attributes.get(_EXCEPTION_TYPE)
        if reason:
            message, place = str(span.attributes.get(_EXCEPTION_MESSAGE, "")), ""
            if reason == span.attributes.get(_EXCEPTION_TYPE) and not hasattr(errors, str(reason)):
                # not an error of ours, whose sentence says enough: of the agent's code, whose author wants to know
                # where
                frames = _FRAME.findall(str(span.attributes.get(_EXCEPTION_STACKTRACE, "")))
                place = spell_place([(file, int(line)) for file, line in frames])
            return str(reason), message + (f" ({place})" if place else "")
    return attempt_status, f"the store marked the attempt as {attempt_status}"


def _sampled_tokens(spans: Sequence[Span]) -> int:
    # the engine's own count, not the length of our ids: the two are compared in every report
    return sum(
        int(count) for span in spans if isinstance(count := span.attributes.get(USAGE_OUTPUT_TOKENS), (int, float))
    )


def _group_size(metadata: Mapping[str, Any]) -> int | None:
    size = metadata.get("group_size")
    return int(size) if isinstance(size, (int, float)) and size >= 1 else None


def _failed(
    rollout: Rollout, group_id: str, mode: str, *, reason: str, message: str, outcome: Outcome = Outcome.FAILED
) -> MemberResult:
    return MemberResult(
        rollout_id=rollout.rollout_id,
        group_id=group_id,
        mode=mode,
        group_size=_group_size(rollout.metadata or {}),
        failure=reason,
        failure_message=message,
        outcome_if_failed=outcome,
        task=rollout.input,
        instance_id=instance_of(rollout.metadata or {}),
        request=_request(rollout)
        if outcome is not Outcome.CANCELLED
        else None,  # what was stopped on purpose is not tried again
    )


def _request(rollout: Rollout) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(
        input=rollout.input,
        mode=rollout.mode,
        resources_id=rollout.resources_id,
        config=rollout.config,
        metadata=rollout.metadata,
    )
