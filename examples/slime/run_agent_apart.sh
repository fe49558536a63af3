#!/usr/bin/env bash
# run_agent.sh on one node of eight GPUs, four for training and four for sampling, asynchronously: slime's train_async.py (if this version has it; newer ones
# have train.py only) trains on samples of the previous update, and truncated importance sampling (TIS) corrects for the difference.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
: "${SLIME_DIR:?set SLIME_DIR to the checkout of slime}"
script=train.py
[ ! -f "$SLIME_DIR/train_async.py" ] || script=train_async.py
export SCRIPT="${SCRIPT:-$script}"
export GPU_ARGS="${GPU_ARGS:---actor-num-nodes 1 --actor-num-gpus-per-node 4 --num-gpus-per-node 8 --rollout-num-gpus 4}"
exec "$here/run_agent.sh" --use-tis --tis-clip 2.0 "$@"
