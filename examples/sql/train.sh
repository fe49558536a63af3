#!/usr/bin/env bash
# Databases, a warm-up on 80 demonstrations, then training: bash examples/sql/train.sh DIRECTORY [flags of train.py]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" agent="$here/sql_agent.py:SmallSqlAgent" dir="$1"
python "$here/sql_data.py" "$dir" small
agl-slime warm-up --model smollm2 --agent "$agent" --demonstrations "$dir/demonstrations.jsonl" --output-dir "$dir/warm"
agl-slime train --model "$dir/warm" --agent "$agent" --tasks "$dir/train.jsonl" --eval-tasks "$dir/held_out.jsonl" \
  --output-dir "$dir/run" --rollout-batch-size 8 --n-samples-per-prompt 8 --max-new-tokens 96 --num-iterations 20 \
  --eval-interval 20 --eval-rollouts 96 --local.lr 2e-5 --local.n-minibatches 1 "${@:2}"
