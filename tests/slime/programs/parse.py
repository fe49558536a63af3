"""slime's ``parse_args`` on this program's command line: what it makes of some of it, and the flags that it ignores.

python -m tests.slime.programs.parse FLAGS...
"""

from __future__ import annotations

import sys

from megatron.training.arguments import OPTIONS  # the stand-in's
from slime.utils.arguments import parse_args

from tests.slime.support import report

_NAMES = (
    "data_source_path",
    "rollout_function_path",
    "eval_function_path",
    "custom_reward_post_process_path",
    "agl_agent",
    "num_rollout",
    "lr",
    "colocate",
    "rollout_num_gpus",
    "actor_num_gpus_per_node",
    "use_tis",
    "tis_clip",
    "load",
    "save",
)

if __name__ == "__main__":
    args = parse_args()
    ignored = [flag for flag in sys.argv[1:] if flag.startswith("--") and flag not in OPTIONS]
    evals = [[one.name, one.path, one.n_samples_per_eval_prompt] for one in args.eval_datasets]
    report({name: getattr(args, name) for name in _NAMES} | {"ignored": ignored, "evals": evals})
