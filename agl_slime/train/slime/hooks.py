"""Implementation of ``agl_slime.slime_hooks``: slime's hooks for rollouts, rewards, filters and logs. slime passes
samples flat, in groups, or in groups of siblings; every hook accepts each form."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pkgutil import resolve_name
from statistics import fmean
from typing import Any

from agl_slime.data import normalize
from agl_slime.data.credit import TokenRewards, token_rewards
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.support.slime import find
from agl_slime.train.slime.replay import check_recorded
from agl_slime.train.slime.versions import filter_output
from agl_slime.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample, flat_samples, staleness_of

logger = logging.getLogger(__name__)

NORMALIZE_HOOK, ADVANTAGE_HOOK = "agl_slime.slime_hooks.normalize_rewards", "agl_slime.slime_hooks.advantages_of_tokens"
# Advantage estimators for which slime normalises rewards per group, and, below, also by the standard deviation.
_GROUP_RELATIVE = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
_STD_NORMALIZED = frozenset({"grpo", "gspo", "cispo"})


# -- rollouts --------------------------------------------------------------------------------------------------------


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Exactly ``args.rollout_batch_size`` groups of finished rollouts (one with ``args=None``); with ``evaluation`` the
    data source's evaluation rollouts.

    Nothing is generated here and no request is aborted: agents run elsewhere and continue, and further groups stay in
    the data source. The dynamic sampling filter, the sample filter and the all-samples function of ``args`` apply as in
    slime's default rollout function.

    Raises:
        DataSourceError: the groups did not arrive in time, or one has no log-probs and slime's ``--use-tis`` or
            ``--use-rollout-logprobs`` needs them. Groups taken so far are given back to the data source.
    """
    if evaluation:
        evaluate = getattr(data_source, "evaluate", None)
        data = evaluate(rollout_id) if evaluate else {"agl": eval_entry([*flat_samples(data_source.get_samples(1))])}
        return RolloutFnEvalOutput(data=data)
    started = time.monotonic()
    if (saved := getattr(data_source, "kept_batch", lambda _: None)(rollout_id)) is not None:
        return RolloutFnTrainOutput(samples=saved)
    getattr(data_source, "begin_rollout", lambda _: None)(rollout_id)
    batch, all_groups, dropped = _collect_groups(args, rollout_id, data_source)
    batch.sort(key=_draw)
    if (path := getattr(args, "rollout_sample_filter_path", None)) is not None:
        resolve_name(path)(args, batch)
    if (path := getattr(args, "rollout_all_samples_process_path", None)) is not None:
        resolve_name(path)(args, all_groups, data_source)
    batch = getattr(data_source, "keep_batch", lambda _, groups: groups)(rollout_id, batch)
    metrics = {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in dropped.items()}
    metrics |= {"agl/wait_s": time.monotonic() - started, **getattr(data_source, "metrics", dict)()}
    return RolloutFnTrainOutput(samples=batch, metrics=metrics)


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """One Agent Lightning rollout for one slime prompt, for use with slime's default rollout function.

    The task is ``{"prompt": sample.prompt, "label": sample.label, **sample.metadata}``; engine and sampling parameters
    are slime's; ``agl_slime.train.slime.args`` configures store and agent. Returns the completed sample, or for a
    rollout that forks a list of siblings under one rollout id. A rollout that failed all attempts is a FAILED sample
    out of the loss, with ``metadata["agl_failure"]`` (``generate_rollout`` replaces such groups). A cancellation
    cancels the rollout in the store."""
    from agl_slime.train.slime.generate import run_rollout  # needs Agent Lightning, seconds of import

    return await run_rollout(args, sample, sampling_params, evaluation=evaluation)


# main then cancels this function's task instead of aborting every request on every engine
generate.abort_mode = "request"  # type: ignore[attr-defined]


def _collect_groups(
    args: Any, rollout_id: int, data_source: Any
) -> tuple[list[list[Sample]], list[list[Sample]], Counter[str]]:
    """A batch of groups that the dynamic filter keeps, all groups taken for it, and counts of the filter's reasons."""
    from tqdm import tqdm

    batch_size = getattr(args, "rollout_batch_size", None) or 1
    path = getattr(args, "dynamic_sampling_filter_path", None)
    keep = resolve_name(path) if path is not None else lambda args, group: True
    batch: list[list[Sample]] = []
    all_groups: list[list[Sample]] = []
    dropped: Counter[str] = Counter()
    demand, reject = (getattr(data_source, name, lambda *_: None) for name in ("demand", "reject"))
    try:
        with tqdm(total=batch_size, desc=f"rollout {rollout_id}", unit="group") as bar:
            while len(batch) < batch_size:
                demand(batch_size - len(batch))  # all missing groups run while the next one is awaited
                group = next(iter(data_source.get_samples(1)), None)
                if group is None:
                    raise DataSourceError("the data source returned no group; generate_rollout needs one that waits")
                if _first(group).status == Sample.Status.PENDING:
                    fix = "set agl_store_url or agl_agent, or use slime's default rollout function"
                    raise DataSourceError(f"the data source returned unsampled placeholders: {fix}")
                check_recorded(args, group)
                all_groups.append(group)
                output = keep(args, group)
                if getattr(output, "keep", output):
                    batch.append(group)
                    bar.update()
                else:
                    reason = str(getattr(output, "reason", None) or "filtered")
                    dropped[reason] += 1
                    reject([group], reason)
                    bar.set_postfix(dropped=sum(dropped.values()), refresh=False)
    except DataSourceError:
        if batch:
            data_source.add_samples(batch)
        raise
    return batch, all_groups, dropped


def eval_entry(samples: Sequence[Sample]) -> dict[str, Any]:
    """A data set of slime's evaluation output: parallel lists, one entry per sample."""
    return {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
        "samples": list(samples),
    }


# -- rewards ---------------------------------------------------------------------------------------------------------


def normalize_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Raw rewards and advantages, one of each per sample, by ``group_index`` with one reward per rollout (see
    ``agl_slime.data.normalize``). ``advantage_estimator``, ``rewards_normalization`` and ``grpo_std_normalization``
    apply. Failed and removed samples (``mask_unfit``) do not count: their advantage is 0, and so is a missing raw
    reward.

    Raises:
        RewardError: a missing or non-finite reward, or siblings whose rewards differ.
    """
    flat = list(flat_samples(samples))
    fit = [i for i, sample in enumerate(flat) if normalize.is_counted(sample)]
    raw = _rewards(args, flat, out_of_the_loss={*range(len(flat))}.difference(fit))
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in _GROUP_RELATIVE or not getattr(args, "rewards_normalization", True):
        return raw, raw
    std = estimator in _STD_NORMALIZED and bool(getattr(args, "grpo_std_normalization", True))
    if credits_tokens(args):
        credit = getattr(args, "agl_credit", None) or "group"
        return raw, token_rewards(flat, key=getattr(args, "reward_key", None), credit=credit, std=std)
    keys = [normalize.normalization_key(flat[i]) for i in fit]
    groups, rollouts = [group for group, _ in keys], [rollout for _, rollout in keys]
    normalized = normalize.normalize_rewards([raw[i] for i in fit], group_indices=groups, rollout_ids=rollouts, std=std)
    advantages = dict(zip(fit, normalized, strict=True))
    return raw, [advantages.get(i, 0.0) for i in range(len(flat))]


def advantages_of_tokens(args: Any, rollout_data: dict[str, Any]) -> None:
    """The advantages of each token that ``normalize_rewards`` has computed, on this rank's part of each sample."""
    import torch

    columns = (rollout_data[name] for name in ("rewards", "kl", "total_lengths", "response_lengths"))
    share, advantages = find("slice_log_prob_with_cp"), []
    for reward, kl, total, length in zip(*columns, strict=True):
        values = reward.values if isinstance(reward, TokenRewards) else [float(reward)] * length
        advantages.append(share(torch.as_tensor(values), total, length).to(kl))
    rollout_data["advantages"], rollout_data["returns"] = [*advantages], advantages


def credits_tokens(args: Any) -> bool:
    """Whether slime takes ``advantages_of_tokens``, so that rewards of turns stay in one Sample. Raises ``ConfigError``
    for flags that contradict it."""
    credit = getattr(args, "agl_credit", None) or "group"
    if getattr(args, "custom_advantage_function_path", None) != ADVANTAGE_HOOK:
        if credit != "group":
            raise ConfigError(f"agl_credit is {credit!r}; it needs --custom-advantage-function-path {ADVANTAGE_HOOK}")
        return False
    if getattr(args, "custom_reward_post_process_path", None) != NORMALIZE_HOOK:
        needs = f"it takes what --custom-reward-post-process-path {NORMALIZE_HOOK} computes"
        raise ConfigError(f"--custom-advantage-function-path {ADVANTAGE_HOOK}: {needs}; give both")
    if (estimator := getattr(args, "advantage_estimator", "grpo")) not in _STD_NORMALIZED:
        fix = f"only {', '.join(sorted(_STD_NORMALIZED))} have the reward at each token; leave the function out"
        raise ConfigError(f"--custom-advantage-function-path {ADVANTAGE_HOOK} with {estimator}: {fix}")
    if not getattr(args, "rewards_normalization", True):
        raise ConfigError(f"--custom-advantage-function-path {ADVANTAGE_HOOK} needs slime's rewards normalization")
    return True


async def reward_of_agent(args: Any, sample: Sample, **_: Any) -> float:
    """The agent's reward; raises ``RewardError`` when there is none."""
    return _rewards(args, [sample])[0]


async def rewards_of_agents(args: Any, samples: Sequence[Sample], **_: Any) -> list[float]:
    """The agents' rewards, for ``--group-rm``, which would overwrite them."""
    return _rewards(args, samples)


def _rewards(args: Any, samples: Sequence[Sample], *, out_of_the_loss: Container[int] = ()) -> list[float]:
    key, rewards = getattr(args, "reward_key", None), []
    for position, sample in enumerate(samples):
        missing = position in out_of_the_loss and sample.reward is None
        rewards.append(0.0 if missing else normalize.reward_value(sample, position, key=key))
    return rewards


# -- filters ---------------------------------------------------------------------------------------------------------


def keep_nonzero_variance(args: Any, samples: Sequence[Any], **_: Any) -> Any:
    """Keep a group whose rewards differ; equal rewards give no advantage."""
    rewards = _rewards(args, [*filter(normalize.is_counted, flat_samples(samples))])
    keep = bool(rewards) and not normalize.all_equal(rewards)
    reason = None if keep else f"zero_std_{round(rewards[0], 1)}" if rewards else "empty"
    return filter_output(keep=keep, reason=reason)


def take_oldest(args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Take ``num_samples`` groups out of the buffer, by ``group_index``, then by order of arrival."""
    order = sorted(range(len(buffer)), key=lambda i: _first(buffer[i]).group_index or 0)[:num_samples]
    oldest = [buffer[i] for i in order]
    for i in sorted(order, reverse=True):
        del buffer[i]
    return oldest


def mask_unfit(args: Any, groups: Sequence[Any]) -> None:
    """Take samples out of the loss that are neither completed nor truncated, or have no reward."""
    for sample in flat_samples(groups):
        if sample.status not in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) or sample.reward is None:
            sample.remove_sample = True


def count_groups(args: Any, all_groups: Sequence[Any], data_source: Any) -> None:
    """Store the number of groups, including dropped ones, in ``args.processed_group_count``."""
    args.processed_group_count = len(all_groups)


# -- logging ---------------------------------------------------------------------------------------------------------


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """Add forks, re-tokenized samples, turns and weight versions to slime's metrics. Returns ``False``: slime logs,
    too."""
    args.logged_rollout_id = rollout_id
    metrics = trace_metrics(list(flat_samples(samples)))
    if rollout_extra_metrics is not None:
        rollout_extra_metrics.update(metrics)
    logger.info("rollout %s (%.1f s): %s", rollout_id, rollout_time, metrics)
    return False


def log_eval_rollout(
    rollout_id: int, args: Any, data: Mapping[str, Mapping[str, Any]], extra_metrics: dict[str, Any] | None
) -> bool:
    """Log the mean rewards of an evaluation. Returns ``False``: slime logs, too."""
    args.logged_eval_rollout_id = rollout_id
    means = {name: fmean(entry["rewards"]) for name, entry in data.items() if entry["rewards"]}
    logger.info("evaluation %s: %s", rollout_id, means)
    return False


def trace_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics ``agl/…`` of a batch. ``weight_versions`` counts the versions that sampled it; ``staleness_mean`` and
    ``_max`` are the versions by which its tokens are behind the data source's newest, if versions are numbers."""
    if not samples:
        return {}
    metadata = [sample.metadata or {} for sample in samples]
    # a sample without a rollout id counts as a rollout
    rollouts = {entry.get("agl_rollout_id", position) for position, entry in enumerate(metadata)}
    versions = {version for sample in samples for version in getattr(sample, "weight_versions", None) or ()}
    behind = staleness_of(samples, lambda sample: (sample.metadata or {}).get("policy_version"))
    staleness = {} if behind is None else {"agl/staleness_mean": behind[0], "agl/staleness_max": behind[1]}
    return staleness | {
        "agl/rollouts": len(rollouts),
        "agl/samples_per_rollout": len(samples) / len(rollouts),
        "agl/forks": len(samples) - len(rollouts),
        "agl/retokenized": sum(entry.get("token_source") == "retokenized" for entry in metadata),
        "agl/turns_mean": fmean(entry.get("turns", 1) for entry in metadata),
        "agl/tokens_under_mask": sum(
            sample.response_length if sample.loss_mask is None else sum(sample.loss_mask) for sample in samples
        ),
        "agl/weight_versions": len(versions),
    }


def _first(group: Sequence[Any]) -> Sample:
    return next(flat_samples(group))


def _draw(group: Sequence[Any]) -> int:
    """The number of the group's task in the order of draw, else the group's in the order in which groups ended: sums
    over a batch shall not depend on which group was faster."""
    number = str(_first(group).metadata.get("group_id")).rpartition("-")[2]
    return int(number) if number.isdecimal() else _first(group).group_index or 0
