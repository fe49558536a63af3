"""Rollout and spans to slime Samples. Stateless.

Per Sample: ``tokens`` is prompt and response; ``loss_mask`` and ``rollout_log_probs`` begin at the first response token
and have ``response_length`` entries; a token under mask 1 was sampled by the engine at that place and is under mask 1
in no other Sample of the rollout.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict, Unpack

from agl_slime.errors import RewardError, TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.images import multimodal_inputs
from agl_slime.tokens.reward import Reward, TurnReward, read_reward, read_turn_rewards
from agl_slime.tokens.segments import Segment, merge_turns
from agl_slime.tokens.span_codec import parse_json, turn_numbers
from agl_slime.tokens.spans import read_turns, spans_of_attempt
from agl_slime.tokens.turn import Trajectory, Turn, is_truncated
from agl_slime.types import Sample, sample_from_fields

if TYPE_CHECKING:
    from agl_slime.support.agl import Rollout, Span
    from agl_slime.tokens.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Conversion:
    """The Samples of one rollout, its trajectory, and the number of Samples that began with a fork, by reason."""

    samples: list[Sample]
    trajectory: Trajectory
    forks: Mapping[str, int]


class ConversionOptions(TypedDict, total=False):
    """The keyword arguments of the conversion, all optional."""

    reward_key: str | None
    """The dimension of the reward to train on; the Samples then have all as a dict, for slime's ``--reward-key``."""
    run_key: str | None
    """Without ``reward_key``: the dimension that the run's first rollout decided to train on."""
    index: int | None
    """slime's number of the Sample; like the next two the same for all Samples of a rollout."""
    group_index: int | None
    rollout_id: int | None
    attempt_id: str | None
    """The attempt to read; by default the rollout's (an ``AttemptedRollout`` has one), else the latest."""
    is_policy_call: Callable[[Span], bool] | None
    """A filter of the policy's model calls for spans that do not name the policy: see ``read_turns``."""
    reward: Reward
    """The result of ``read_reward`` for these spans, to avoid a second reading."""
    replay_files: Path | None
    """The run's directory of routed experts and nuclei of large turns, see ``agl_slime.tokens.replay``."""
    reward_spans: bool
    """Whether rewards of single turns are spans of the rollout's Samples (``metadata["reward_spans"]``), for a trainer
    that reads them; by default their turns become separate Samples."""


def convert_rollout(
    rollout: Rollout,
    spans: Iterable[Span],
    tokenizer: ChatTokenizer | None = None,
    **options: Unpack[ConversionOptions],
) -> Conversion:
    """The Samples of one finished rollout, with its trajectory and counts.

    Spans may come in any order; spans of other attempts are skipped. ``tokenizer`` decodes prompt and response for
    people and tokenizes text-only traces; spans with token ids do not need it. Raises ``TraceError`` (``no_turns`` when
    no token was sampled, ``bad_trace`` when spans are damaged) and ``RewardError`` (``no_reward``, ``bad_reward``).
    """
    attempt = getattr(rollout, "attempt", None)  # of an AttemptedRollout: its latest attempt
    attempt_id = options.get("attempt_id") or (None if attempt is None else attempt.attempt_id)
    reward_key = options.get("reward_key")
    spans = spans_of_attempt(spans, attempt_id)
    turns = read_turns(spans, tokenizer, is_policy_call=options.get("is_policy_call"))
    attributes = _rollout_attributes(spans)
    if not any(len(turn.response_ids) for turn in turns):
        message = f"rollout {rollout.rollout_id} has no sampled token in {len(spans)} spans"
        counts = attributes.get(names.GATEWAY, "nothing of it")
        raise TraceError(f"{message}; the gateway saw {counts}", reason="no_turns")
    keys = {"reward_key": reward_key, "run_key": options.get("run_key")}
    reward = options.get("reward") or read_reward(spans, **keys)
    written = [(key, name) for key, name in _JSON_ATTRIBUTES.items() if name in attributes]
    metadata = {key: parse_json(str(attributes[name]), name) for key, name in written}
    if reward.missing:
        metadata["rewards_missing"] = [*reward.missing]
    gateway = {key: metadata[key] for key in ("gateway",) if key in metadata}
    trajectory = Trajectory(
        rollout_id=rollout.rollout_id,
        attempt_id=spans[0].attempt_id,
        task=rollout.input,
        mode=rollout.mode,
        turns=turns,
        reward=reward.primary,
        rewards=reward.named,
        stop_reason=str(attributes.get(names.STOP_REASON) or turns[-1].finish_reason),
        metadata={**(rollout.metadata or {}), **gateway},
    )
    if names.OPEN_BOUNDARIES in attributes:
        metadata["open_boundaries"] = attributes[names.OPEN_BOUNDARIES]
    untrained = untrained_turns(spans, turns)
    if untrained:
        metadata["untrained_turns"] = untrained
    conversion = convert_trajectory(
        trajectory,
        tokenizer,
        untrained_turns=frozenset(untrained),
        turn_rewards=read_turn_rewards(spans, **keys),
        metadata=metadata,
        reward_key=reward_key,
        reward_spans=options.get("reward_spans", False),
        replay_files=options.get("replay_files"),
        **{name: options.get(name) for name in ("index", "group_index", "rollout_id")},
    )
    idle_s = _time_between_calls(spans)
    for sample in conversion.samples:
        sample.non_generation_time = idle_s
    return conversion


def convert_trajectory(
    trajectory: Trajectory,
    tokenizer: ChatTokenizer | None = None,
    *,
    untrained_turns: Collection[int] = (),
    turn_rewards: Mapping[int, TurnReward] | None = None,
    metadata: Mapping[str, Any] | None = None,
    reward_key: str | None = None,
    reward_spans: bool = False,
    replay_files: Path | None = None,
    **numbers: int | None,
) -> Conversion:
    """The Samples of a trajectory with its turns and its reward; see ``convert_rollout``.

    ``untrained_turns`` are context only. Turns with ``turn_rewards`` are trained in separate Samples, which name the
    rewarded object in ``metadata["reward_of"]``; ``metadata["reward"]`` is the rollout's. With ``reward_spans`` the
    Samples stay whole, and ``metadata["reward_spans"]`` lists ``[object, reward, start, end]`` over response tokens.
    ``metadata`` is added to the Samples'; ``numbers`` are ``index``, ``group_index`` and ``rollout_id``. Raises
    ``TraceError`` without a token to train, ``RewardError`` without a reward.
    """
    if trajectory.reward is None:
        raise RewardError(f"trajectory {trajectory.rollout_id} has no reward", reason="no_reward")
    trajectory = replace(trajectory, turns=tuple(with_replay(turn, replay_files) for turn in trajectory.turns))
    segments = merge_turns(trajectory.turns, tokenizer, untrained=untrained_turns)
    if not segments:
        message = f"rollout {trajectory.rollout_id} has no sampled token to train"
        if reasons := sorted({turn.untrained for turn in trajectory.turns if turn.untrained}):
            message += f": its answers are not trained ({', '.join(reasons)})"
        if "constrained" in reasons:
            message += "; --constraints drop samples them freely and trains them, refuse answers 400 in place of mask"
        raise TraceError(message, reason="no_turns")
    forks = dict(Counter(segment.fork_reason.value for segment in segments if segment.fork_reason is not None))
    split_by = turn_rewards if not reward_spans else None
    if split_by:
        segments = _split_by_reward(segments, trajectory, tokenizer, untrained_turns, split_by)
    common = {
        **(metadata or {}),
        **{key: trajectory.metadata[key] for key in ("group_id", "source_name") if key in trajectory.metadata},
        "agl_rollout_id": trajectory.rollout_id,
        "agl_attempt_id": trajectory.attempt_id,
        "mode": trajectory.mode,
        "rollout_turns": len(trajectory.turns),
        "segments": len(segments),
        "reward": trajectory.reward,
    }
    # slime trains with log-probs on all Samples or on none
    with_log_probs = all(segment.log_probs is not None for segment in segments)
    label = trajectory.task.get("label") if isinstance(trajectory.task, Mapping) else None
    if label is not None and not isinstance(label, str):
        label = json.dumps(label, ensure_ascii=False, default=str)
    samples = []
    for number, segment in enumerate(segments):
        details = {"segment": number, "forks": dict(forks), "rewards": dict(trajectory.rewards)}
        reward, rewards = trajectory.reward, dict(trajectory.rewards)
        if split_by and (rewarded := split_by.get(segment.placements[0].turn)) is not None:
            reward, details["reward_of"] = rewarded.primary, rewarded.target
            rewards = {**rewarded.named, **({reward_key: reward} if reward_key else {})}
        elif turn_rewards and reward_spans:
            details["reward_spans"] = [
                [scored.target, scored.primary, place.start - segment.prompt_length, place.end - segment.prompt_length]
                for place in segment.placements
                if (scored := turn_rewards.get(place.turn)) is not None
            ]
        fields = _fields(segment, trajectory, tokenizer, {**common, **details}, with_log_probs=with_log_probs)
        reward_field = reward if reward_key is None else rewards
        samples.append(sample_from_fields(**numbers, **fields, label=label, reward=reward_field))
    return Conversion(samples, _without_replay(trajectory), forks)


def with_replay(turn: Turn, directory: Path | None) -> Turn:
    """``turn`` with its arrays from a file of ``directory``. Raises ``TraceError``."""
    return turn if turn.filed is None else replace(turn, filed=None, **turn.filed.read(directory))


def _without_replay(trajectory: Trajectory) -> Trajectory:
    """The trajectory without experts and nuclei, which the Samples have."""
    if not any(turn.experts is not None or turn.nucleus is not None for turn in trajectory.turns):
        return trajectory
    return replace(trajectory, turns=tuple(replace(turn, experts=None, nucleus=None) for turn in trajectory.turns))


def _split_by_reward(
    whole: Sequence[Segment],
    trajectory: Trajectory,
    tokenizer: ChatTokenizer | None,
    untrained: Collection[int],
    rewards: Mapping[int, TurnReward],
) -> list[Segment]:
    """The segments of turns that share a reward, with all other turns as context. The first part of each segment in
    ``whole`` keeps its fork reason."""
    targets = [rewards[turn].target if turn in rewards else None for turn in range(len(trajectory.turns))]
    segments: list[Segment] = []
    for target in dict.fromkeys(targets):
        context = {turn for turn, turn_target in enumerate(targets) if turn_target != target}
        segments += merge_turns(trajectory.turns, tokenizer, untrained=context.union(untrained))
    segments.sort(key=lambda segment: segment.placements[0].turn)
    first = {segment.placements[0].turn for segment in whole}
    return [part if part.placements[0].turn in first else replace(part, fork_reason=None) for part in segments]


def rollout_to_samples(
    rollout: Rollout,
    spans: Iterable[Span],
    tokenizer: ChatTokenizer | None = None,
    **options: Unpack[ConversionOptions],
) -> list[Sample]:
    """The Samples of one finished rollout: several if it forks. Options and errors as for ``convert_rollout``."""
    return convert_rollout(rollout, spans, tokenizer, **options).samples


def rollout_to_sample(
    rollout: Rollout,
    spans: Iterable[Span],
    tokenizer: ChatTokenizer | None = None,
    **options: Unpack[ConversionOptions],
) -> Sample:
    """The Sample of a finished rollout without forks, as ``convert_rollout``; ``TraceError`` ``forked`` for several."""
    conversion = convert_rollout(rollout, spans, tokenizer, **options)
    if len(conversion.samples) > 1:
        reasons = ", ".join(f"{reason} {count}" for reason, count in conversion.forks.items())
        forked = f"forks into {len(conversion.samples)} Samples ({reasons})"
        raise TraceError(f"rollout {rollout.rollout_id} {forked}; use rollout_to_samples", reason="forked")
    return conversion.samples[0]


def untrained_turns(spans: Sequence[Span], turns: Sequence[Turn]) -> list[int]:
    """The indices of the ``turns`` of ``spans`` that are context only, in order."""
    return sorted({*_listed_untrained(spans), *(number for number, turn in enumerate(turns) if turn.untrained)})


def _listed_untrained(spans: Sequence[Span]) -> Iterator[int]:
    """The turns that are context only, from the last list of each encoder; a gateway that restarts is a new one."""
    numbers, lists = turn_numbers(spans), {}
    for span in spans:
        if text := span.attributes.get(names.UNTRAINED_TURNS):
            lists[span.attributes.get(names.STREAM)] = parse_json(str(text), names.UNTRAINED_TURNS)
    for stream, turns in lists.items():
        if not isinstance(turns, list) or not all(isinstance(turn, int) for turn in turns):
            raise TraceError(f"{names.UNTRAINED_TURNS} must be a JSON list of turn numbers, got {turns!r:.80}")
        yield from turns if stream is None else (numbers[key] for turn in turns if (key := (stream, turn)) in numbers)


def _time_between_calls(spans: Sequence[Span]) -> float:
    """Seconds without a call in flight, from the first call to the end of the last: tools, the agent."""
    calls = sorted(
        (span.start_time, span.start_time + latency)
        for span in spans
        if span.start_time is not None
        and isinstance(latency := span.attributes.get(names.LATENCY_S), float)
        and math.isfinite(latency)
    )
    idle, end = 0.0, calls[0][1] if calls else 0.0
    for start, ended in calls:
        idle, end = idle + max(0.0, start - end), max(end, ended)
    return idle


_JSON_ATTRIBUTES = {"gateway": names.GATEWAY, "tools": names.TOOLS}
_ROLLOUT_ATTRIBUTES = (*_JSON_ATTRIBUTES.values(), names.OPEN_BOUNDARIES, names.STOP_REASON)


def _rollout_attributes(spans: Sequence[Span]) -> dict[str, Any]:
    """The attributes about the rollout as a whole, each from the last span that has it."""
    last: dict[str, Any] = {}
    for span in spans:
        attributes = span.attributes
        last.update({name: value for name in _ROLLOUT_ATTRIBUTES if (value := attributes.get(name))})
    return last


def _fields(
    segment: Segment,
    trajectory: Trajectory,
    tokenizer: ChatTokenizer | None,
    metadata: dict[str, Any],
    *,
    with_log_probs: bool,
) -> dict[str, Any]:
    """The fields of a segment's Sample. ``metadata`` has JSON values only, because slime logs and saves it; its spans
    are over the response's tokens, end exclusive."""
    turns = [trajectory.turns[place.turn] for place in segment.placements]
    start, tokens = segment.prompt_length, segment.token_ids.tolist()
    mask = segment.loss_mask[start:]
    log_probs = segment.log_probs[start:] if with_log_probs and segment.log_probs is not None else None
    # the rollout's stop reason belongs to the segment with its last turn
    last = turns[-1]
    stop_reason = trajectory.stop_reason if last is trajectory.turns[-1] else last.finish_reason
    truncated = is_truncated(stop_reason) or is_truncated(last.finish_reason)
    metadata |= {
        "token_source": "retokenized" if any(turn.token_source == "retokenized" for turn in turns) else "engine",
        "stop_reason": stop_reason,
        "turns": len(turns),
        "fork_reason": None if segment.fork_reason is None else segment.fork_reason.value,
        "turn_spans": [[place.start - start, place.end - start] for place in segment.placements],
        "weight_spans": [
            [span.version, place.start - start + span.start, place.start - start + span.end]
            for place, turn in zip(segment.placements, turns, strict=True)
            for span in turn.weight_versions
        ],
    }
    info = getattr(Sample, "PrefixCacheInfo", None)  # not in the oldest slime
    cached, prompt_tokens = sum(turn.cached_tokens for turn in turns), sum(len(turn.prompt_ids) for turn in turns)
    if turns[0].messages is not None:
        prompt: str | list[Any] = [dict(message) for message in turns[0].messages]
    else:
        prompt = "" if tokenizer is None else tokenizer.decode(tokens[:start], skip_special_tokens=False)
    response = None if tokenizer is None else tokenizer.decode(tokens[start:], skip_special_tokens=False)
    nucleus = segment.nucleus
    if segment.images:
        metadata["images"] = [image.sha for image in segment.images]
    replayed: dict[str, Any] = {
        "rollout_routed_experts": segment.experts,
        "rollout_top_p_token_ids": None if nucleus is None else nucleus.ids,
        "rollout_top_p_token_offsets": None if nucleus is None else nucleus.offsets,
    }
    counts = [sum(turn.speculated[place] for turn in turns) for place in range(3)]
    if any(counts):
        completed = sum(len(turn.response_ids) for turn in turns)
        replayed["spec_info"] = Sample.SpecInfo(*counts, completion_token_num=completed)
    return {
        **replayed,
        "session_id": trajectory.rollout_id,  # the router's key of all its calls
        "multimodal_inputs": multimodal_inputs(segment.images),
        "tokens": tokens,
        "response_length": len(tokens) - start,
        "loss_mask": mask.tolist(),
        "rollout_log_probs": None if log_probs is None else log_probs.tolist(),
        "prompt": prompt,
        "response": "".join(turn.text for turn in turns) if response is None else response,
        "status": Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED,
        "weight_versions": list(dict.fromkeys(span.version for turn in turns for span in turn.weight_versions)),
        "prefix_cache_info": None if info is None else info(cached_tokens=cached, total_prompt_tokens=prompt_tokens),
        "metadata": metadata,
    }
