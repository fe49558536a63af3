"""slime's ``parse_args`` on this program's command line.

python -m tests.slime.programs.parse FLAGS...
"""

from __future__ import annotations

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
)

if __name__ == "__main__":
    args = parse_args()
    report({name: getattr(args, name) for name in _NAMES})
