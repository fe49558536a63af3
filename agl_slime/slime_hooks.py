"""The functions that slime is pointed at by path; their bodies are in ``agl_slime.slime.hooks``.

==============================================  ==============================================
slime's flag                                    here
==============================================  ==============================================
``--data-source-path``                          ``agl_slime.AGLDataSource``
``--rollout-function-path``                     ``agl_slime.slime_hooks.generate_rollout``
``--eval-function-path``                        ``agl_slime.slime_hooks.generate_rollout``
``--custom-reward-post-process-path``           ``agl_slime.slime_hooks.normalize_rewards``
``--dynamic-sampling-filter-path``              ``agl_slime.slime_hooks.keep_nonzero_variance``
``--buffer-filter-path``                        ``agl_slime.slime_hooks.take_oldest``
``--custom-rollout-log-function-path``          ``agl_slime.slime_hooks.log_rollout``
``--custom-eval-rollout-log-function-path``     ``agl_slime.slime_hooks.log_eval_rollout``
``--custom-generate-function-path``             ``agl_slime.slime_hooks.generate``
``--rollout-sample-filter-path``                ``agl_slime.slime_hooks.mask_unfit``
``--rollout-all-samples-process-path``          ``agl_slime.slime_hooks.count_groups``
``--custom-rm-path``                            ``agl_slime.slime_hooks.reward_of_agent``
``--custom-rm-path`` with ``--group-rm``        ``agl_slime.slime_hooks.rewards_of_agents``
==============================================  ==============================================

The module imports neither ray nor transformers nor slime's rollout code at its top, so slime may load it anywhere.
"""

from agl_slime.slime.hooks import (  # noqa: F401
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
