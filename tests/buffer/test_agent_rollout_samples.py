import math
from typing import Any

import pytest

from agl_slime.buffer import stages
from agl_slime.buffer.masks import get_loss_mask_generator
from agl_slime.buffer.samples import SampleMaker, make_uniform
from agl_slime.types import Sample
from tests.buffer.items import make_item
from tests.harness.vocabularies import chat_tokenizer


def sent(uid: str, reward: float = 1.0, **fields: Any) -> dict[str, Any]:
    """An item with the engine's ids."""
    tokens = {"tokens": [5, 6, 7, 8], "response_length": 2, "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -0.25]}
    return make_item(uid, reward=reward, **{**tokens, **fields})


def maker(*, normalized: bool = True, masks: Any = None) -> SampleMaker:
    return SampleMaker(masks=masks, normalized=normalized)


def template_masks() -> Any:
    return get_loss_mask_generator(chat_tokenizer("anthropic", "chatml"))


def test_sent_token_ids_and_log_probs_are_used_as_they_are():
    (sample,) = maker().group([sent("1", extra_info={"finish_reason": "stop", "label": "x"}, weight_versions=[3])])
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([5, 6, 7, 8], 2, [1, 1])
    assert sample.rollout_log_probs == [-0.5, -0.25]
    assert (sample.reward, sample.status, sample.label) == (1.0, Sample.Status.COMPLETED, "x")
    assert (sample.response, sample.prompt) == (
        "-2 and -3",
        [{"role": "user", "content": "Solve the equation x^2 + 5x + 6 = 0"}],
    )
    assert sample.weight_versions == ["3"]
    assert sample.metadata["token_source"] == "engine"
    assert (sample.metadata["uid"], sample.metadata["instance_id"]) == ("1", "math_001")
    (sample,) = maker().group([sent("1", extra_info={"finish_reason": "length"})])
    assert sample.status == Sample.Status.TRUNCATED


def test_numbers_never_repeat_and_a_rollout_that_forked_becomes_siblings():
    parts = [{"tokens": [1, 2, 3], "response_length": 1}, {"tokens": [1, 9, 9], "response_length": 2}]
    shared = maker()
    groups = [shared.group([sent("1"), sent("2")]), shared.group([{**make_item("3"), "samples": parts}, sent("4")])]
    samples = [sample for group in groups for sample in group]
    assert [sample.index for sample in samples] == [0, 1, 2, 3, 4]
    assert [sample.group_index for sample in samples] == [0, 0, 1, 1, 1]
    assert [sample.rollout_id for sample in samples] == [0, 1, 2, 2, 3]
    assert [sample.response_length for sample in samples] == [2, 2, 1, 2, 2]
    assert samples[2].loss_mask == [1]


def padded(rewards: list[float], size: int) -> list[dict[str, Any]]:
    group = ("math_001", [sent(str(n), reward) for n, reward in enumerate(rewards)])
    return stages.pad_group_data(stages.normalize_group_data(group), size)[1]


def test_padded_copies_are_masked_and_originals_keep_the_full_advantage():
    """slime's own normalisation gets raw rewards, whose mean the copy does not move."""
    rewards = [1.0, 0.0, 0.0]
    samples = maker().group(padded(rewards, 4))
    advantages = [
        item["reward"] for item in stages.normalize_group_data(("i", [{"reward": reward} for reward in rewards]))[1]
    ]
    assert [sample.reward for sample in samples] == pytest.approx([*advantages, 0.0])
    assert [bool(sample.remove_sample) for sample in samples] == [False, False, False, True]
    assert samples[3].loss_mask == [0, 0]
    assert len({sample.rollout_id for sample in samples}) == 4
    raw = maker(normalized=False).group(padded(rewards, 4))
    assert [sample.reward for sample in raw] == pytest.approx([*rewards, 1 / 3])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": [1, "2"]}, "tokens.1 is '2'"),
        ({"response_length": 4}, "response_length is 4 with 4 tokens"),
        ({"response_length": 0}, "response_length is 0"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries"),
        ({"loss_mask": [1, 2]}, "loss_mask.1 is 2"),
        ({"rollout_log_probs": [-0.5, math.nan]}, "rollout_log_probs.1 is nan"),
    ],
)
def test_misaligned_tokens_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"item '1': {message}"):
        maker().group([sent("1", **fields)])


def test_text_is_rendered_and_masked():
    tokenizer = chat_tokenizer("anthropic", "chatml")
    messages = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "and 3?"},
        {"role": "assistant", "content": "7"},
    ]
    (sample,) = maker(masks=template_masks()).group([make_item("1", messages=messages)])
    assert sample.metadata["token_source"] == "retokenized"
    assert sample.rollout_log_probs is None
    assert sample.loss_mask is not None
    assert len(sample.loss_mask) == sample.response_length < len(sample.tokens)
    response = sample.tokens[-sample.response_length :]
    trained = tokenizer.decode([token for token, mask in zip(response, sample.loss_mask, strict=True) if mask])
    assert trained == "4<|im_end|>7<|im_end|>"
    assert tokenizer.decode(sample.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    (sample,) = maker(masks=template_masks()).group([make_item("2", messages=messages[:1])])  # no answer
    assert (sample.remove_sample, sample.response_length, sample.loss_mask) == (True, 1, [0])
    with pytest.raises(ValueError, match="there is no tokenizer; set --hf-checkpoint"):
        maker().group([make_item("1")])


def test_a_batch_has_log_probs_and_round_numbers_on_all_samples_or_on_none():
    shared = maker(masks=template_masks())
    groups = [shared.group([sent("1", extra_info={"round_number": 2})]), shared.group([make_item("2")])]
    assert make_uniform(groups) == 1
    assert [sample.rollout_log_probs for group in groups for sample in group] == [None, None]
    assert all("round_number" not in sample.metadata for group in groups for sample in group)
