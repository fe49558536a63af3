"""Rollout and spans to slime Samples. Stateless; what is given out has been checked against the invariants that
training relies on.

Per Sample: ``tokens`` is prompt and response; ``loss_mask`` and ``rollout_log_probs`` begin at the first response token
and have ``response_length`` entries; a token under mask 1 was sampled by the engine at that place and is under mask 1
in no other Sample of the rollout.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from typing_extensions import TypedDict, Unpack

from agl_slime.errors import RewardError, TraceError
from agl_slime.tokens.codec import LogProbArray
from agl_slime.trace import attributes as names
from agl_slime.trace.reward import read_reward
from agl_slime.trace.segments import Segment, merge_turns
from agl_slime.trace.span_codec import parse_json
from agl_slime.trace.spans import Convention, read_turns, spans_of_attempt
from agl_slime.trace.trajectory import Trajectory, is_truncated
from agl_slime.trace.turn import Turn
from agl_slime.types import Sample, sample_from_fields

if TYPE_CHECKING:
    from agl_slime.support.agl import Rollout, Span
    from agl_slime.tokens.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class ConversionReport:
    """What a rollout became, for counting.

    ``forks`` counts the segments that began with a fork, by reason. ``ignored_calls`` are model calls in the spans that
    are no turns of the policy.
    """

    convention: Convention | None
    turns: int
    samples: int
    sampled_tokens: int
    forks: Mapping[str, int]
    retokenized_turns: int
    ignored_calls: int


@dataclass(frozen=True)
class Conversion:
    """The Samples of one rollout, the trajectory they were made from, and the counts."""

    samples: list[Sample]
    trajectory: Trajectory
    report: ConversionReport


class ConversionOptions(TypedDict, total=False):
    """The keyword arguments of the conversion, all optional."""

    reward_key: str | None
    """Which dimension of the reward to train on; the Samples then carry all dimensions as a dict, as slime's
    ``--reward-key`` reads them."""
    index: int | None
    """slime's number of the Sample; as the next two, the same for all Samples of a rollout."""
    group_index: int | None
    rollout_id: int | None
    attempt_id: str | None
    """Which attempt to read; by default the rollout's own (an ``AttemptedRollout`` has one), else the one that began
    last."""
    is_policy_call: Callable[[Span], bool] | None
    """Which model calls are the policy's, where spans do not tell: see ``read_turns``."""


def convert_rollout(
    rollout: Rollout,
    spans: Iterable[Span],
    tokenizer: ChatTokenizer | None = None,
    **options: Unpack[ConversionOptions],
) -> Conversion:
    """The Samples of one finished rollout, with its trajectory and counts.

    Args:
        rollout: the rollout; its ``input`` gives the label (key ``label``), its metadata ``group_id`` and
            ``source_name``. spans: spans of the rollout, in any order; those of other attempts are passed over.
            tokenizer: decodes prompt and response for reading, tells drift from edits, and tokenises text-only traces.
            Not needed for spans with token ids. **options: see ``ConversionOptions``.

    Raises:
        TraceError: reason ``no_turns`` when no token was sampled; ``bad_trace`` when spans are damaged or cannot be
            aligned.
        RewardError: reason ``no_reward`` or ``bad_reward``.
    """
    reward_key = options.get("reward_key")
    own = spans_of_attempt(spans, options.get("attempt_id") or _attempt_of(rollout))
    read = read_turns(own, tokenizer, is_policy_call=options.get("is_policy_call"))
    facts = _facts(own)
    if not any(len(turn.response_ids) for turn in read.turns):
        raise TraceError(f"rollout {rollout.rollout_id} has no sampled token in {len(own)} spans", reason="no_turns")
    reward = read_reward(own, reward_key=reward_key)
    trajectory = Trajectory(
        rollout_id=rollout.rollout_id,
        attempt_id=own[0].attempt_id,
        task=rollout.input,
        mode=rollout.mode,
        turns=read.turns,
        reward=reward.primary,
        rewards=reward.named,
        stop_reason=facts.stop_reason or read.turns[-1].finish_reason,
        metadata=rollout.metadata or {},
    )
    return convert_trajectory(
        trajectory,
        tokenizer,
        untrained_turns=facts.untrained_turns,
        metadata=facts.metadata,
        convention=read.convention,
        ignored_calls=read.ignored_calls,
        reward_key=reward_key,
        **{name: options.get(name) for name in ("index", "group_index", "rollout_id")},
    )


def convert_trajectory(
    trajectory: Trajectory,
    tokenizer: ChatTokenizer | None = None,
    *,
    untrained_turns: Collection[int] = (),
    metadata: Mapping[str, Any] | None = None,
    convention: Convention | None = None,
    ignored_calls: int = 0,
    reward_key: str | None = None,
    index: int | None = None,
    group_index: int | None = None,
    rollout_id: int | None = None,
) -> Conversion:
    """The Samples of a trajectory that has its turns and its reward; see ``convert_rollout``.

    ``untrained_turns`` are context only. ``metadata`` is added to that of the Samples. ``convention`` and
    ``ignored_calls`` are passed on to the report. Raises ``TraceError`` when no token is to be trained, ``RewardError``
    when there is no reward.
    """
    if trajectory.reward is None:
        raise RewardError(f"trajectory {trajectory.rollout_id} has no reward", reason="no_reward")
    segments = merge_turns(trajectory.turns, tokenizer, untrained=untrained_turns)
    if not segments:
        raise TraceError(
            f"trajectory {trajectory.rollout_id} has no sampled token that is to be trained", reason="no_turns"
        )
    report = ConversionReport(
        convention=convention,
        turns=len(trajectory.turns),
        samples=len(segments),
        sampled_tokens=trajectory.sampled_tokens,
        forks=dict(Counter(segment.fork_reason.value for segment in segments if segment.fork_reason is not None)),
        retokenized_turns=sum(turn.token_source == "retokenized" for turn in trajectory.turns),
        ignored_calls=ignored_calls,
    )
    with_log_probs = all(
        segment.log_probs is not None for segment in segments
    )  # slime trains with them on all Samples or on none
    samples = [
        _make_sample(
            segment,
            number,
            trajectory,
            report,
            metadata or {},
            tokenizer,
            with_log_probs=with_log_probs,
            reward=trajectory.reward if reward_key is None else dict(trajectory.rewards),
            numbers={"index": index, "group_index": group_index, "rollout_id": rollout_id},
        )
        for number, segment in enumerate(segments)
    ]
    return Conversion(samples, trajectory, report)


def rollout_to_samples(
    rollout: Rollout,
    spans: Iterable[Span],
    tokenizer: ChatTokenizer | None = None,
    **options: Unpack[ConversionOptions],
) -> list[Sample]:
    """The Samples of one finished rollout: one, or several when it forks. Options and errors as for
    ``convert_rollout``."""
    return convert_rollout(rollout, spans, tokenizer, **options).samples


def rollout_to_sample(
    rollout: Rollout,
    spans: Iterable[Span],
    tokenizer: ChatTokenizer | None = None,
    **options: Unpack[ConversionOptions],
) -> Sample:
    """The one Sample of a finished rollout that does not fork; ``TraceError`` with reason ``forked`` when it does.
    Options as for ``convert_rollout``."""
    conversion = convert_rollout(rollout, spans, tokenizer, **options)
    if len(conversion.samples) > 1:
        reasons = ", ".join(f"{reason} {count}" for reason, count in conversion.report.forks.items())
        raise TraceError(
            f"rollout {rollout.rollout_id} forks into {len(conversion.samples)} Samples ({reasons}); use rollout_to_samples",
            reason="forked",
        )
    return conversion.samples[0]


def _attempt_of(rollout: Rollout) -> str | None:
    attempt = getattr(rollout, "attempt", None)  # an AttemptedRollout knows the attempt it was read with: the latest
    return None if attempt is None else attempt.attempt_id


@dataclass(frozen=True)
class _Facts:
    """What the agent said about the rollout as a whole; the last span that says something counts."""

    stop_reason: str
    untrained_turns: frozenset[int]
    metadata: Mapping[str, Any]


_FACT_NAMES = (names.TOOLS, names.OPEN_SEAMS, names.UNTRAINED_TURNS, names.STOP_REASON)


def _facts(spans: Sequence[Span]) -> _Facts:
    said: dict[str, Any] = {}
    for span in spans:
        attributes = span.attributes
        said.update({name: value for name in _FACT_NAMES if (value := attributes.get(name))})
    metadata: dict[str, Any] = {}
    tools, seams, untrained, stop_reason = map(said.get, _FACT_NAMES)
    if tools is not None:
        metadata["tools"] = parse_json(str(tools), names.TOOLS)
    if seams is not None:
        metadata["open_seams"] = seams
    turns = parse_json(str(untrained), names.UNTRAINED_TURNS) if untrained is not None else []
    if not isinstance(turns, list) or not all(isinstance(turn, int) for turn in turns):
        raise TraceError(f"{names.UNTRAINED_TURNS} must be a JSON list of turn numbers, got {untrained!r:.80}")
    if turns:
        metadata["untrained_turns"] = turns
    return _Facts(str(stop_reason or ""), frozenset(turns), metadata)


def _make_sample(
    segment: Segment,
    number: int,
    trajectory: Trajectory,
    report: ConversionReport,
    facts: Mapping[str, Any],
    tokenizer: ChatTokenizer | None,
    *,
    with_log_probs: bool,
    reward: float | dict[str, float],
    numbers: Mapping[str, int | None],
) -> Sample:
    turns = [trajectory.turns[at.turn] for at in segment.placements]
    start = segment.prompt_length
    mask, log_probs = (
        segment.loss_mask[start:],
        segment.log_probs[start:] if with_log_probs and segment.log_probs is not None else None,
    )
    tokens = segment.token_ids.tolist()
    _check(len(tokens), len(tokens) - start, mask, log_probs)
    # the rollout's own stop reason is that of the segment with its last turn
    stop_reason = trajectory.stop_reason if turns[-1] is trajectory.turns[-1] else turns[-1].finish_reason
    return sample_from_fields(
        **numbers,
        tokens=tokens,
        response_length=len(tokens) - start,
        loss_mask=mask.tolist(),
        rollout_log_probs=None if log_probs is None else log_probs.tolist(),
        prompt=_prompt(turns[0], tokenizer),
        response=_decode(tokens[start:], tokenizer) if tokenizer is not None else "".join(turn.text for turn in turns),
        label=_label(trajectory.task),
        reward=reward,
        status=Sample.Status.TRUNCATED
        if is_truncated(stop_reason) or is_truncated(turns[-1].finish_reason)
        else Sample.Status.COMPLETED,
        weight_versions=list(dict.fromkeys(span.version for turn in turns for span in turn.weight_versions)),
        prefix_cache_info=_prefix_cache_info(turns),
        metadata={**facts, **_metadata(segment, number, turns, trajectory, report, stop_reason)},
    )


def _check(length: int, n: int, mask: npt.NDArray[np.int8], log_probs: LogProbArray | None) -> None:
    """The invariants of a Sample of ``length`` tokens, ``n`` of them response; slime checks only some of them, and
    late. On arrays: 20 times as fast as on the lists that the Sample gets."""
    if not 0 < n < length:
        raise TraceError(f"response_length must lie between 1 and {length - 1} (the tokens less one), got {n}")
    trained = mask == 1
    context = None if np.count_nonzero(trained) == n else ~trained
    if len(mask) != n or not trained[0] or (context is not None and mask[context].any()):
        raise TraceError(f"loss_mask must have {n} entries of 0 or 1 and begin with 1, got {len(mask)}")
    if log_probs is not None:
        if len(log_probs) != n:
            raise TraceError(f"rollout_log_probs must have {n} entries, got {len(log_probs)}")
        if not np.isfinite(log_probs).all():
            raise TraceError("rollout_log_probs must be finite")
        if context is not None and log_probs[context].any():
            raise TraceError("rollout_log_probs must be 0.0 where the loss mask is 0")


def _metadata(
    segment: Segment,
    number: int,
    turns: Sequence[Turn],
    trajectory: Trajectory,
    report: ConversionReport,
    stop_reason: str,
) -> dict[str, Any]:
    """JSON values only: slime logs and saves metadata. Spans are over the response's tokens, end exclusive."""
    metadata: dict[str, Any] = {
        "token_source": "retokenized" if any(turn.token_source == "retokenized" for turn in turns) else "engine",
        "agl_rollout_id": trajectory.rollout_id,
        "agl_attempt_id": trajectory.attempt_id,
        "mode": trajectory.mode,
        "stop_reason": stop_reason,
        "turns": len(turns),
        "rollout_turns": report.turns,
        "segment": number,
        "segments": report.samples,
        "fork_reason": None if segment.fork_reason is None else segment.fork_reason.value,
        "forks": dict(report.forks),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "turn_spans": [[at.start - segment.prompt_length, at.end - segment.prompt_length] for at in segment.placements],
        "weight_spans": _weight_spans(segment, trajectory.turns),
    }
    for key in ("group_id", "source_name"):
        if key in trajectory.metadata:
            metadata[key] = trajectory.metadata[key]
    return metadata


def _weight_spans(segment: Segment, turns: Sequence[Turn]) -> list[list[Any]]:
    return [
        [span.version, at.start - segment.prompt_length + span.start, at.start - segment.prompt_length + span.end]
        for at in segment.placements
        for span in turns[at.turn].weight_versions
    ]


def _prompt(turn: Turn, tokenizer: ChatTokenizer | None) -> str | list[Any]:
    if turn.messages is not None:
        return [dict(message) for message in turn.messages]
    return "" if tokenizer is None else _decode(turn.prompt_ids.tolist(), tokenizer)


def _decode(ids: list[int], tokenizer: ChatTokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


def _label(task: Any) -> str | None:
    label = task.get("label") if isinstance(task, Mapping) else None
    return label if label is None or isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)


def _prefix_cache_info(turns: Sequence[Turn]) -> Any:
    info = getattr(Sample, "PrefixCacheInfo", None)  # not in the oldest slime
    cached, prompts = sum(turn.cached_tokens for turn in turns), sum(len(turn.prompt_ids) for turn in turns)
    return None if info is None else info(cached_tokens=cached, total_prompt_tokens=prompts)
