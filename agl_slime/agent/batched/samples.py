"""slime Samples from finished trajectories of batched rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agl_slime.agent.outcome import check_reward, missing_rewards
from agl_slime.errors import TraceError
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.masks import get_loss_mask_generator
from agl_slime.tokens.tokenizer import ChatTokenizer
from agl_slime.tokens.trajectory import Trajectory, is_truncated
from agl_slime.types import Sample, sample_from_fields


def trajectory_to_samples(
    trajectory: Mapping[str, Any], *, reward: float, tokenizer: ChatTokenizer | None = None, **numbers: Any
) -> list[Sample]:
    """The token-exact Samples of a trajectory that ``MultiTurnRollout`` finished: one, or several when it forked.
    ``numbers``: ``index``, ``group_index``, ``rollout_id``.

    Raises ``TraceError`` when nothing was sampled, ``RewardError`` when ``reward`` is not finite.
    """
    name = str(trajectory.get("id", numbers.get("index")))
    rewards = check_reward(reward, source="the judge of a trajectory")
    finished = Trajectory(
        rollout_id=name,
        attempt_id=name,
        task={"label": trajectory["label"]} if "label" in trajectory else {},
        turns=tuple(trajectory["turn_records"]),
        reward=next(iter(rewards.values())),
        rewards=rewards,
        stop_reason=str(trajectory["end_reason"]),
    )
    metadata: dict[str, Any] = {"tools": trajectory["tools_called"]}
    if missing := missing_rewards(reward):
        metadata["rewards_missing"] = missing
    return convert_trajectory(finished, tokenizer, metadata=metadata, **numbers).samples


def messages_to_sample(
    messages: Sequence[Mapping[str, Any]],
    *,
    reward: float,
    tokenizer: Any,
    tools: Sequence[Mapping[str, Any]] | None = None,
    stop_reason: str = "stop",
    loss_mask_type: str = "auto",
    label: str | None = None,
    **numbers: Any,
) -> Sample:
    """A Sample from text alone, such as a trajectory of ``APIMultiTurnRollout``: re-tokenized, without log-probs, and
    marked in ``metadata["token_source"]``. ``numbers``: ``index``, ``group_index``, ``rollout_id``.

    Raises ``TraceError`` when no message is to be trained, ``RewardError`` when ``reward`` is not finite.
    """
    generator = get_loss_mask_generator(tokenizer, loss_mask_type)
    token_ids, loss_mask = generator.get_loss_mask(messages, tools=tools)
    (response_length,) = generator.get_response_lengths([loss_mask])
    if not 0 < response_length < len(token_ids):
        raise TraceError(
            f"{response_length} of {len(token_ids)} tokens follow the first trained one; an answer is missing"
        )
    return sample_from_fields(
        **numbers,
        prompt=[dict(message) for message in messages if message.get("role") != "assistant"][:1],
        tokens=token_ids,
        response=tokenizer.decode(token_ids[-response_length:], skip_special_tokens=False),
        response_length=response_length,
        loss_mask=loss_mask[-response_length:],
        label=label,
        reward=check_reward(reward, source="the judge of messages")["primary"],
        status=Sample.Status.TRUNCATED if is_truncated(stop_reason) else Sample.Status.COMPLETED,
        metadata={"token_source": "retokenized", "stop_reason": stop_reason, "loss_mask_type": loss_mask_type},
    )
