#!/usr/bin/env bash
# SmolLM2-135M on a recipe: its data, a warm-up on 80 demonstrations, then training.
#
#   bash examples/train.sh sql|search|repair DIRECTORY [flags of train.py]
set -euo pipefail
name="$1" dir="$2" here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$1"
agent="$here/${name}_agent.py:Small${name^}Agent"
python "$here/${name}_data.py" "$dir" small
agl-slime warm-up --model smollm2 --agent "$agent" --demonstrations "$dir/demonstrations.jsonl" --output-dir "$dir/warm"
agl-slime train --model "$dir/warm" --agent "$agent" --tasks "$dir/train.jsonl" --eval-tasks "$dir/held_out.jsonl" \
  --output-dir "$dir/run" --rollout-batch-size 8 --n-samples-per-prompt 8 --max-new-tokens 96 --num-iterations 16 \
  --eval-interval 16 --eval-rollouts 96 --local.lr 2e-5 --local.n-minibatches 1 "${@:3}"
