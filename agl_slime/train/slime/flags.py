"""slime's flags of rollouts and data, and keys of ``--eval-config``, that have no effect under our hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

_ROLLOUT_HOOK = "agl_slime.slime_hooks.generate_rollout"
GENERATE_HOOK = "agl_slime.slime_hooks.generate"
_REWARD = "the reward is the agent's"
_ABORTS, _ORDER = "no rollout is aborted at the end of a batch", "groups stay in AGLDataSource, in order"
_BUFFER = "agl_slime.buffer.agent_rollout reads it"


class Ignored(NamedTuple):
    """A flag by its name in slime's ``args``: slime's default, and the reason why another value has no effect."""

    name: str
    default: Any
    reason: str


WITHOUT_EFFECT = (
    Ignored("over_sampling_batch_size", None, "missing groups run at once, and surplus ones are kept"),
    *(Ignored(name, False, _ABORTS) for name in ("partial_rollout", "mask_offpolicy_in_partial_rollout")),
    Ignored("rollout_skip_special_tokens", False, "an answer's text has the tokens that it was sampled with"),
    Ignored("custom_generate_function_path", None, "the agent samples"),
    Ignored("rollout_sample_hook_path", [], "use --rollout-sample-filter-path"),
    Ignored("buffer_filter_path", None, _ORDER),
    Ignored("buffer_sort_by_staleness", False, _ORDER),
    Ignored("sglang_server_concurrency", 512, "the runners' limit applies"),
    *(Ignored(name, None, _REWARD) for name in ("rm_type", "rm_url", "custom_rm_path")),
    Ignored("group_rm", False, _REWARD),
    Ignored("eval_reward_key", None, "evaluations use --reward-key"),
    Ignored("use_distributed_post", False, "agents send their own requests"),
    Ignored("rollout_buffer_url", None, _BUFFER),
    Ignored("fetch_trajectory_retry_times", -1, _BUFFER),
    Ignored("min_batch_collection_ratio", 1, _BUFFER),
    Ignored("rollout_task_type", "math", _BUFFER),
    Ignored("loss_mask_type", "qwen", _BUFFER),
)
# keys of an evaluation data set that our evaluations read, and why the others have no effect
_EVALUATED = """name path input_key label_key tool_key metadata_key multimodal_keys metadata_overrides temperature top_p
    top_k n_samples_per_eval_prompt apply_chat_template_kwargs max_response_len min_new_tokens stop stop_token_ids
    repetition_penalty skip_special_tokens no_stop_trim"""
EVALUATED = {*_EVALUATED.split()}
_WHY = {
    "rm_type": f"{_REWARD} (metadata_overrides add it to tasks)",
    "custom_rm_path": _REWARD,
    "custom_generate_function_path": "the agent samples",
    "apply_chat_template": "agents' prompts go through the model's template",
}


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


def evaluates(args: Any) -> bool:
    """Whether our rollout function evaluates, and not one of slime's."""
    function = getattr(args, "eval_function_path", None) or getattr(args, "rollout_function_path", None)
    return function in (None, _ROLLOUT_HOOK)


def refused_keys(args: Any) -> Iterator[str]:
    """A sentence for each key of slime's evaluation data sets that would have no effect: in our evaluations, and in
    slime's on samples of our ``generate``, whose reward is the agent's."""
    flags = {name: getattr(args, name, None) for name in ("rm_type", "custom_rm_path", "custom_generate_function_path")}
    flags["apply_chat_template"] = getattr(args, "apply_chat_template", None) or False
    for dataset in getattr(args, "eval_datasets", None) or ():
        keys = {name: value for name, value in vars(dataset).items() if value not in (None, {}, flags.get(name))}
        generate = keys.get("custom_generate_function_path") or flags["custom_generate_function_path"]
        rewards = {"rm_type", "custom_rm_path"} if generate == GENERATE_HOOK else set()
        for name in sorted(keys.keys() - EVALUATED if evaluates(args) else keys.keys() & rewards):
            reason, value = _WHY.get(name, "nothing reads it"), keys[name]
            if not (name == "apply_chat_template" and value) and not str(value).startswith("agl_slime.slime_hooks."):
                yield f"evaluation data set {dataset.name}: {name} {value!r} has no effect, as {reason}; leave it out"


def warn_of_flags(args: Any) -> None:
    """Log one warning that names the flags without effect, if there are any."""
    if named := [f"--{flag.name.replace('_', '-')} ({flag.reason})" for flag in without_effect(args)]:
        logger.warning("slime's flags without effect under agl_slime's hooks: %s.", ", ".join(named))
