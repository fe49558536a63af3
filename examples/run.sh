#!/usr/bin/env bash
# A recipe with slime on 8 GPUs; rehearsed, not run.
#
#   SLIME_DIR=~/slime MODEL=~/Qwen3-4B MODEL_TORCH_DIST=~/Qwen3-4B_torch_dist RECIPE=sql DATA=DIRECTORY examples/run.sh
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export AGL_AGENT="${RECIPE}_agent:${RECIPE^}Agent" AGENT_PATH="$here/$RECIPE" EVAL_DATA="$DATA/held_out.jsonl"
export NUM_GPUS="${NUM_GPUS:-8}" MODEL_ARGS_FILE="${MODEL_ARGS_FILE:-$SLIME_DIR/scripts/models/qwen3-4B.sh}"
exec "$here/slime/run_agent.sh" --prompt-data "$DATA/train.jsonl" "$@"
