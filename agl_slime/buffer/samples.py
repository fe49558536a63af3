"""From the buffer's items to slime's Samples.

Token ids and log-probs that a generator sent are used as they are. Where there is only text, the loss mask generator
renders and tokenizes it: such samples say ``metadata["token_source"] == "retokenized"`` and have no log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_slime.buffer.stages import PADDING_OF, PADDING_SHARES, Item
from agl_slime.tokens.masks import LossMaskGenerator
from agl_slime.types import Sample, sample_from_fields

_COPIED = ("uid", "instance_id", "group_id", "raw_reward", "buffer_group", PADDING_OF)


@dataclass(slots=True)
class SampleNumbers:
    """The next free numbers; slime sorts by ``index`` and counts rollouts by ``rollout_id``, so they must be integers
    and never repeat in a batch."""

    index: int = 0
    group_index: int = 0
    rollout_id: int = 0


@dataclass(slots=True, kw_only=True)
class SampleMaker:
    """Makes Samples of groups of items.

    ``normalized``: the buffer's rewards are advantages already and slime leaves them alone
    (``--disable-rewards-normalization``); else each sample gets its raw reward, so that slime does not normalise twice.
    """

    masks: LossMaskGenerator | None
    normalized: bool
    numbers: SampleNumbers = field(default_factory=SampleNumbers)

    def group(self, items: Sequence[Item]) -> list[Sample]:
        """The samples of one group. Raises ``ValueError`` naming the item that cannot be used.

        A copy that padding made is masked out and its original gets its whole reward back: the tokens of a rollout
        train once. For slime's own normalisation, which would count it, a copy has the mean of the group's raw rewards
        and so leaves the baseline where it is.
        """
        group_index = self.numbers.group_index
        self.numbers.group_index += 1
        raw = [float(item.get("raw_reward", item["reward"])) for item in items if PADDING_OF not in item]
        mean = math.fsum(raw) / len(raw) if raw else 0.0
        samples: list[Sample] = []
        for item in items:
            is_copy = PADDING_OF in item
            if self.normalized:
                reward = 0.0 if is_copy else float(item["reward"]) * int(item.get(PADDING_SHARES, 1))
            else:
                reward = mean if is_copy else float(item.get("raw_reward", item["reward"]))
            for part in item.get("samples") or [
                item
            ]:  # a rollout that forked comes as several parts, siblings under one rollout_id
                sample = self._sample({**item, **part}, reward)
                if is_copy:
                    sample.loss_mask = [0] * sample.response_length
                    sample.remove_sample = True
                sample.group_index = group_index
                sample.index = self.numbers.index
                self.numbers.index += 1
                samples.append(sample)
            self.numbers.rollout_id += 1
        return samples

    def _sample(self, item: Item, reward: float) -> Sample:
        messages = item.get("messages") or []
        if item.get("tokens") is not None:
            tokens, response_length, loss_mask, log_probs = _sent_tokens(item)
            source = "engine"
        else:
            tokens, response_length, loss_mask = self._rendered(item)
            log_probs, source = None, "retokenized"
        extra: Mapping[str, Any] = item.get("extra_info") or {}
        finish_reason = item.get("finish_reason", extra.get("finish_reason"))
        sample = sample_from_fields(
            prompt=_prompt(messages),
            tokens=tokens,
            response=_response(item, messages),
            response_length=response_length,
            loss_mask=loss_mask,
            rollout_log_probs=log_probs,
            reward=reward,
            label=None if extra.get("label") is None else str(extra["label"]),
            status=Sample.Status.TRUNCATED if finish_reason == "length" else Sample.Status.COMPLETED,
            weight_versions=[str(version) for version in item.get("weight_versions") or ()],
            metadata={**extra, **{name: item[name] for name in _COPIED if name in item}, "token_source": source},
            rollout_id=self.numbers.rollout_id,
        )
        if not any(loss_mask):
            sample.remove_sample = True
        return sample

    def _rendered(self, item: Item) -> tuple[list[int], int, list[int]]:
        if self.masks is None:
            raise ValueError(
                f"item {item.get('uid')!r} has no token ids and there is no tokenizer; set --hf-checkpoint"
            )
        tokens, mask = self.masks.get_loss_mask(item["messages"], item.get("tools"))
        (length,) = self.masks.get_response_lengths([mask])
        if len(tokens) < 2:
            raise ValueError(f"item {item.get('uid')!r} has {len(tokens)} tokens; expected a prompt and a response")
        length = min(
            max(length, 1), len(tokens) - 1
        )  # training predicts the response from at least one token before it
        return list(tokens), length, list(mask[-length:])


def _sent_tokens(item: Item) -> tuple[list[int], int, list[int], list[float] | None]:
    """What a generator sent, checked: slime would not notice."""
    uid = item.get("uid")
    tokens, length = item["tokens"], item.get("response_length")
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError(f"item {uid!r}: tokens are no list of token ids")
    if type(length) is not int or not 0 < length < len(tokens):
        raise ValueError(
            f"item {uid!r}: response_length is {length!r} with {len(tokens)} tokens; expected 1 to {len(tokens) - 1}"
        )
    mask = item.get("loss_mask")
    if mask is None:
        mask = [1] * length
    if not isinstance(mask, list) or len(mask) != length or not all(value in (0, 1) for value in mask):
        raise ValueError(f"item {uid!r}: loss_mask must have {length} entries, each 0 or 1")
    log_probs = item.get("rollout_log_probs")
    if log_probs is not None and (
        not isinstance(log_probs, list)
        or len(log_probs) != length
        or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in log_probs)
    ):
        raise ValueError(f"item {uid!r}: rollout_log_probs must have {length} finite numbers")
    return (
        tokens,
        length,
        [int(value) for value in mask],
        None if log_probs is None else [float(value) for value in log_probs],
    )


def _prompt(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    first = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return [dict(message) for message in messages[:first]]


def _response(item: Item, messages: Sequence[Mapping[str, Any]]) -> str:
    if isinstance(item.get("response"), str):
        return item["response"]
    content = next(
        (message.get("content") for message in reversed(messages) if message.get("role") == "assistant"), None
    )
    return content if isinstance(content, str) else ""


def agree(groups: Sequence[Sequence[Sample]]) -> int:
    """Make a batch uniform, as slime needs it: log-probs and ``round_number`` on all samples or on none. Returns how
    many lost their log-probs."""
    samples = [sample for group in groups for sample in group]
    lost = 0
    if any(sample.rollout_log_probs is None for sample in samples):
        for sample in samples:
            lost += sample.rollout_log_probs is not None
            sample.rollout_log_probs = None
    if any("round_number" not in sample.metadata for sample in samples):
        for sample in samples:
            sample.metadata.pop("round_number", None)
    return lost
