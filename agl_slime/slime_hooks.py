"""Functions for slime's flags that take a path, such as ``--rollout-function-path
agl_slime.slime_hooks.generate_rollout``; docs/slime.md has the flag of each.

The module imports neither ray nor transformers nor slime's rollout code at its top, so slime may load it anywhere.
"""

from agl_slime.train.slime.hooks import (  # noqa: F401
    advantages_of_tokens,
    count_groups,
    eval_entry,
    generate,
    generate_rollout,
    keep_nonzero_variance,
    log_eval_rollout,
    log_rollout,
    mask_unfit,
    normalize_rewards,
    reward_of_agent,
    rewards_of_agents,
    take_oldest,
    trace_metrics,
)
