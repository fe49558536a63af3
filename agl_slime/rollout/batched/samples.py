"""Finished trajectories of batched rollouts as slime Samples, for the group pipeline or a data source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agl_slime.errors import RewardError, TraceError
from agl_slime.tokens.masks import get_loss_mask_generator
from agl_slime.tokens.tokenizer import ChatTokenizer
from agl_slime.trace.converter import convert_trajectory
from agl_slime.trace.trajectory import Trajectory, is_truncated
from agl_slime.types import Sample, sample_from_fields


def trajectory_to_samples(
    trajectory: Mapping[str, Any],
    *,
    reward: float,
    tokenizer: ChatTokenizer | None = None,
    index: int | None = None,
    group_index: int | None = None,
    rollout_id: int | None = None,
) -> list[Sample]:
    """The Samples of a trajectory that ``MultiTurnRollout`` finished: one, or several when it forked. Exact to the
    token.

    Raises ``TraceError`` when nothing was sampled, ``RewardError`` when ``reward`` is not finite.
    """
    name = str(trajectory.get("id", "" if index is None else index))
    finished = Trajectory(
        rollout_id=name,
        attempt_id=name,
        task={key: trajectory[key] for key in ("label",) if key in trajectory},
        turns=tuple(trajectory["turn_records"]),
        reward=_finite(reward),
        rewards={"primary": reward},
        stop_reason=str(trajectory["end_reason"]),
    )
    metadata = {"tools": trajectory["tools_called"]}
    conversion = convert_trajectory(
        finished, tokenizer, metadata=metadata, index=index, group_index=group_index, rollout_id=rollout_id
    )
    return conversion.samples


def messages_to_sample(
    messages: Sequence[Mapping[str, Any]],
    *,
    reward: float,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None = None,
    stop_reason: str = "stop",
    loss_mask_type: str = "auto",
    label: str | None = None,
    index: int | None = None,
    group_index: int | None = None,
    rollout_id: int | None = None,
) -> Sample:
    """A Sample from text alone, as ``APIMultiTurnRollout`` and others that know no ids give it: tokenized again,
    without log-probs, ``metadata["token_source"]`` says so.

    Raises ``TraceError`` when no message is to be trained, ``RewardError`` when ``reward`` is not finite.
    """
    generator = get_loss_mask_generator(tokenizer, loss_mask_type)
    token_ids, loss_mask = generator.get_loss_mask(messages, tools=tools)
    (response_length,) = generator.get_response_lengths([loss_mask])
    if not 0 < response_length < len(token_ids):
        raise TraceError(
            f"{response_length} of {len(token_ids)} tokens follow the first trained one; there must be a prompt and an answer"
        )
    return sample_from_fields(
        index=index,
        group_index=group_index,
        rollout_id=rollout_id,
        prompt=[dict(message) for message in messages if message.get("role") != "assistant"][:1],
        tokens=token_ids,
        response=tokenizer.decode(token_ids[-response_length:], skip_special_tokens=False),
        response_length=response_length,
        loss_mask=loss_mask[-response_length:],
        label=label,
        reward=_finite(reward),
        status=Sample.Status.TRUNCATED if is_truncated(stop_reason) else Sample.Status.COMPLETED,
        metadata={"token_source": "retokenized", "stop_reason": stop_reason, "loss_mask_type": loss_mask_type},
    )


def _finite(reward: Any) -> float:
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
        raise RewardError(f"the reward of a trajectory must be a finite number, got {reward!r}")
    return float(reward)
