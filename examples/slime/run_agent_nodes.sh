#!/usr/bin/env bash
# run_agent.sh as a job on a Ray of NODES nodes with GPUS_PER_NODE GPUs each, which both train and sample. In slime's image, start Ray
#
#   ray start --head --node-ip-address ADDRESS --num-gpus 8 --disable-usage-stats     # on the first node
#   ray start --address ADDRESS:6379 --num-gpus 8 --disable-usage-stats               # on each other node
#
# and then, on the first node, with absolute paths that every node has:
#
#   SLIME_DIR=/root/slime MODEL=/shared/Qwen3-4B MODEL_TORCH_DIST=/shared/Qwen3-4B_torch_dist SAVE=/shared/runs/first \
#     AGENT_PATH=/shared/agents AGL_CONFIG=/shared/agl.yaml NODES=4 examples/slime/run_agent_nodes.sh
#
# RAY_WAIT_S: longest wait for Ray's job server. GPU_ARGS as in run_agent.sh, for example to train on two nodes and sample on the other two:
# "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --num-gpus-per-node 8 --rollout-num-gpus 16".
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
nodes="${NODES:-4}"
export NUM_GPUS="${GPUS_PER_NODE:-8}" RAY_JOB_ADDRESS="${RAY_JOB_ADDRESS:-http://127.0.0.1:8265}"
export GPU_ARGS="${GPU_ARGS:---actor-num-nodes $nodes --actor-num-gpus-per-node $NUM_GPUS --num-gpus-per-node $NUM_GPUS --colocate}"
deadline=$((SECONDS + ${RAY_WAIT_S:-300}))
until answer="$(ray job submit --address "$RAY_JOB_ADDRESS" -- true 2>&1)"; do # the server answers before it can start a job
  case "$answer" in *uthenticat*) deadline=0 ;; esac # waiting does not help
  if [ "$SECONDS" -ge "$deadline" ]; then
    printf '%s\nNo Ray takes jobs at %s: start it (ray start --head), or set RAY_JOB_ADDRESS\n' "$answer" "$RAY_JOB_ADDRESS" >&2
    exit 2
  fi
  sleep 2
done
exec "$here/run_agent.sh" "$@" # slime logs "Waiting for placement group" until all GPUs are registered
