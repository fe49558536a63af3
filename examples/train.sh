#!/usr/bin/env bash
# SmolLM2-135M on a recipe: its data, a warm-up on demonstrations, then training.
#
#   bash examples/train.sh sql|search|repair DIRECTORY [flags of train.py]
set -euo pipefail
name="$1" dir="$2" here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$1"
agent="$here/${name}_agent.py:Small${name^}Agent"
n=12 flags=(--local.no-std-normalization) # iterations, and groups of each
case "$name" in search) n=8 ;; repair) flags+=(--drop-zero-variance) ;; esac
python "$here/${name}_data.py" "$dir" small
agl-slime warm-up --model smollm2 --agent "$agent" --demonstrations "$dir/demonstrations.jsonl" --output-dir "$dir/warm"
agl-slime train --model "$dir/warm" --agent "$agent" --tasks "$dir/train.jsonl" --eval-tasks "$dir/held_out.jsonl" \
  --output-dir "$dir/run" --rollout-batch-size "$n" --n-samples-per-prompt 8 --max-new-tokens 64 --num-iterations "$n" \
  --eval-interval "$n" --eval-rollouts 192 --local.lr 4e-5 --local.n-minibatches 1 "${flags[@]}" "${@:3}"
