"""Conversion of the buffer's items to slime's Samples.

Token ids and log-probs from a generator are used unchanged. Items with only text are rendered and tokenized by the loss
mask generator: their samples have ``metadata["token_source"] == "retokenized"`` and no log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any

from pydantic import BaseModel, Field, FiniteFloat, StrictInt

from agl_slime.buffer.masks import MultiTurnLossMaskGenerator
from agl_slime.buffer.models import ItemFields, check
from agl_slime.buffer.stages import PADDING_OF, Item
from agl_slime.types import Sample, sample_from_fields

_COPIED = ("uid", "instance_id", "group_id", "raw_reward", "buffer_group", PADDING_OF)


class _Rewarded(ItemFields):
    reward: FiniteFloat = Field()
    raw_reward: FiniteFloat | None = None
    padding_shares: int = 1
    samples: list[dict[str, Any]] | None = None

    @property
    def raw(self) -> float:
        return self.reward if self.raw_reward is None else self.raw_reward


class _SentTokens(BaseModel):
    """Checked tokens of a generator; slime would not notice misaligned ones."""

    tokens: list[Annotated[StrictInt, Field(ge=0)]]
    response_length: Annotated[StrictInt, Field(gt=0)]
    loss_mask: list[Annotated[int, Field(ge=0, le=1)]] | None = None
    rollout_log_probs: list[FiniteFloat] | None = None


@dataclass(slots=True, kw_only=True)
class SampleMaker:
    """Makes Samples of groups of items.

    ``normalized``: the buffer's rewards are advantages, which slime keeps (``--disable-rewards-normalization``);
    otherwise each sample gets its raw reward, so that rewards are not normalised twice.

    slime sorts by ``index`` and counts rollouts by ``rollout_id``; these numbers never repeat.
    """

    masks: MultiTurnLossMaskGenerator | None
    normalized: bool
    next_index: int = 0
    next_group: int = 0
    next_rollout: int = 0

    def group(self, items: Sequence[Item]) -> list[Sample]:
        """The samples of one group. Raises ``ValueError`` naming an invalid item.

        Padding copies are masked out, and their originals get their whole reward back: the tokens of a rollout train
        once. For slime's own normalisation a copy has the mean of the group's raw rewards, which keeps the baseline.
        """
        group_index, self.next_group = self.next_group, self.next_group + 1
        checked = [(item, check(_Rewarded, item, f"item {item.get('uid')!r}")) for item in items]
        raw = [fields.raw for item, fields in checked if PADDING_OF not in item]
        mean = math.fsum(raw) / len(raw) if raw else 0.0
        samples: list[Sample] = []
        for item, fields in checked:
            is_copy = PADDING_OF in item
            advantage = fields.reward * fields.padding_shares * (not is_copy)
            reward = advantage if self.normalized else mean if is_copy else fields.raw
            # a rollout that forked has several parts: siblings under one rollout_id
            for part in fields.samples or [{}]:
                sample = self._sample({**item, **part}, fields, reward)
                if is_copy:
                    sample.loss_mask = [0] * sample.response_length
                    sample.remove_sample = True
                sample.group_index = group_index
                sample.index, self.next_index = self.next_index, self.next_index + 1
                samples.append(sample)
            self.next_rollout += 1
        return samples

    def _sample(self, item: Item, fields: ItemFields, reward: float) -> Sample:
        if item.get("tokens") is not None:
            tokens, response_length, loss_mask, log_probs = _sent_tokens(item)
            source = "engine"
        else:
            tokens, response_length, loss_mask = self._rendered(item)
            log_probs, source = None, "retokenized"
        extra = fields.extra_info or {}
        finish_reason = item.get("finish_reason", extra.get("finish_reason"))
        copied = {name: item[name] for name in _COPIED if name in item}
        return sample_from_fields(
            prompt=list(takewhile(lambda message: message.get("role") != "assistant", fields.messages)),
            tokens=tokens,
            response=_response(item, fields.messages),
            response_length=response_length,
            loss_mask=loss_mask,
            rollout_log_probs=log_probs,
            reward=reward,
            label=None if extra.get("label") is None else str(extra["label"]),
            status=Sample.Status.TRUNCATED if finish_reason == "length" else Sample.Status.COMPLETED,
            weight_versions=[str(version) for version in item.get("weight_versions") or ()],
            metadata={**extra, **copied, "token_source": source},
            rollout_id=self.next_rollout,
            remove_sample=not any(loss_mask),
        )

    def _rendered(self, item: Item) -> tuple[list[int], int, list[int]]:
        if self.masks is None:
            name = f"item {item.get('uid')!r}"
            raise ValueError(f"{name} has no token ids and there is no tokenizer; set --hf-checkpoint")
        tools = (item["tools"],) if item.get("tools") else ()  # slime's mask generators take messages only
        tokens, mask = self.masks.get_loss_mask(item["messages"], *tools)
        (length,) = self.masks.get_response_lengths([mask])
        if len(tokens) < 2:
            raise ValueError(f"item {item.get('uid')!r} has {len(tokens)} tokens; expected a prompt and a response")
        # at least one token before the response
        length = min(max(length, 1), len(tokens) - 1)
        return list(tokens), length, list(mask[-length:])


def _sent_tokens(item: Item) -> tuple[list[int], int, list[int], list[float] | None]:
    name = f"item {item.get('uid')!r}"
    sent = check(_SentTokens, item, name)
    length = sent.response_length
    if length >= len(sent.tokens):
        raise ValueError(f"{name}: response_length is {length} with {len(sent.tokens)} tokens; one is a prompt's")
    for field in ("loss_mask", "rollout_log_probs"):
        values = getattr(sent, field)
        if values is not None and len(values) != length:
            raise ValueError(f"{name}: {field} has {len(values)} entries; response_length is {length}")
    return sent.tokens, length, sent.loss_mask or [1] * length, sent.rollout_log_probs


def _response(item: Item, messages: Sequence[Mapping[str, Any]]) -> str:
    if isinstance(item.get("response"), str):
        return item["response"]
    answers = [message.get("content") for message in messages if message.get("role") == "assistant"]
    return answers[-1] if answers and isinstance(answers[-1], str) else ""


def make_uniform(groups: Sequence[Sequence[Sample]]) -> int:
    """Make a batch uniform, as slime needs it: log-probs and ``round_number`` on all samples or on none. Returns the
    number of samples that lost their log-probs."""
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
