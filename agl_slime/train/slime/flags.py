"""slime's flags of rollouts and data that have no effect under our hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_ROLLOUT_HOOK = "agl_slime.slime_hooks.generate_rollout"
_REWARD = "the reward is the agent's"
_BUFFER = "agl_slime.buffer.agent_rollout reads it"


class Ignored(NamedTuple):
    """A flag by its name in slime's ``args``: slime's default, and the reason why another value has no effect."""

    name: str
    default: Any
    why: str


WITHOUT_EFFECT = (
    Ignored("over_sampling_batch_size", None, "missing groups run at once, and surplus ones are kept"),
    Ignored("partial_rollout", False, "no rollout is aborted at the end of a batch"),
    Ignored("mask_offpolicy_in_partial_rollout", False, "no rollout is aborted at the end of a batch"),
    Ignored("rollout_skip_special_tokens", False, "an answer's text has the tokens that it was sampled with"),
    Ignored("custom_generate_function_path", None, "the agent samples"),
    Ignored("rollout_sample_hook_path", [], "use --rollout-sample-filter-path"),
    Ignored("buffer_filter_path", None, "groups stay in AGLDataSource, in order"),
    Ignored("buffer_sort_by_staleness", False, "groups stay in AGLDataSource, in order"),
    Ignored("sglang_server_concurrency", 512, "the runners' limit applies"),
    Ignored("rm_type", None, _REWARD),
    Ignored("rm_url", None, _REWARD),
    Ignored("custom_rm_path", None, _REWARD),
    Ignored("group_rm", False, _REWARD),
    Ignored("eval_reward_key", None, "evaluations use --reward-key"),
    Ignored("use_distributed_post", False, "agents send their own requests"),
    Ignored("rollout_buffer_url", None, _BUFFER),
    Ignored("fetch_trajectory_retry_times", -1, _BUFFER),
    Ignored("min_batch_collection_ratio", 1, _BUFFER),
    Ignored("rollout_task_type", "math", _BUFFER),
    Ignored("loss_mask_type", "qwen", _BUFFER),
)


def without_effect(args: Any) -> Iterator[Ignored]:
    """The flags of ``args`` that differ from slime's defaults and are not read by our rollout function."""
    if getattr(args, "rollout_function_path", None) != _ROLLOUT_HOOK:
        return
    for flag in WITHOUT_EFFECT:
        value = getattr(args, flag.name, flag.default)
        # slime sets this one itself
        derived = flag.name == "over_sampling_batch_size" and value == getattr(args, "rollout_batch_size", None)
        if value not in (flag.default, None) and not derived:
            yield flag


def warn_of_flags(args: Any) -> None:
    """Log one warning that names the flags without effect, if there are any."""
    if named := [f"--{flag.name.replace('_', '-')} ({flag.why})" for flag in without_effect(args)]:
        logger.warning("slime's flags without effect under agl_slime's hooks: %s.", ", ".join(named))
