"""A Ray of one node, which ends with this program's standard input; prints its address.

python -m tests.programs.slime.node
"""

from __future__ import annotations

import sys

import ray

if __name__ == "__main__":
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=100_000_000)
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
