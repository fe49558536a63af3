#!/usr/bin/env bash
# run_agent.sh with rollouts from a Rollout Buffer, which this script starts and ends:
#
#   DATA=~/dapo-math-17k.jsonl SLIME_DIR=… MODEL=… MODEL_TORCH_DIST=… examples/slime/run_agent_buffer.sh
#
# DATA: the tasks (JSON lines with prompt and label). TASK_TYPE: the generator (math, or agl with
# AGL_SLIME_AGENT=module:Class). GENERATORS: a directory of your own generators. LOSS_MASK_TYPE: a registered name or module:Class, for items without token ids.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
port="${BUFFER_PORT:-8889}"
DATA="$(realpath "${DATA:?set DATA to the tasks}")"
export DATA BUFFER_URL="http://127.0.0.1:$port"
python -m agl_slime buffer --port "$port" --run-dir "${SAVE:-$PWD/runs/slime}/buffer" --input-dir "$(dirname "$DATA")" ${GENERATORS:+--generators "$GENERATORS"} &
buffer=$!
trap 'kill "$buffer" 2>/dev/null || true; wait "$buffer" || true' EXIT
"$here/run_agent.sh" "$@" # waits for the buffer, and sends it the instances that a resumed run has trained on
