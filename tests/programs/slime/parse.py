"""slime's ``parse_args`` on this program's command line: some of its values, and the flags that it ignores.

python -m tests.programs.slime.parse FLAGS...
"""

from __future__ import annotations

import os
import sys

from megatron.training.arguments import OPTIONS  # the stand-in's
from slime.utils.arguments import parse_args

from agl_slime.buffer.client import ask_buffer
from agl_slime.errors import DataSourceError
from agl_slime.support.backoff import Backoff
from agl_slime.support.http import is_transient
from agl_slime.support.threads import run_blocking
from tests.harness.slime_programs import report

_NAMES = """data_source_path rollout_function_path eval_function_path custom_reward_post_process_path agl_agent
    num_rollout lr colocate rollout_num_gpus actor_num_nodes actor_num_gpus_per_node use_tis tis_clip load save
    agent_rollout_buffer_url rollout_task_type prompt_data loss_mask_type rewards_normalization"""

if __name__ == "__main__":
    args = parse_args()
    ignored = [flag for flag in sys.argv[1:] if flag.startswith("--") and flag not in OPTIONS]
    evals = [[data.name, data.path, data.n_samples_per_eval_prompt] for data in args.eval_datasets]
    result = {name: getattr(args, name, None) for name in _NAMES.split()} | {"ignored": ignored, "evals": evals}
    result["agl_environment"] = {name: value for name, value in os.environ.items() if name.startswith("AGL_SLIME_MAX")}
    result["first_on_python_path"] = os.environ["PYTHONPATH"].partition(os.pathsep)[0]
    if url := result["agent_rollout_buffer_url"]:
        waited = Backoff("the buffer does not start", DataSourceError, cap_s=1.0, patience_s=60.0)
        result["generators"] = run_blocking(waited.run(lambda: ask_buffer(url, "/stats"), is_transient))["generators"]
    report(result)
