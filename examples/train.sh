#!/usr/bin/env bash
# SmolLM2-135M on a recipe: its data, a warm-up on demonstrations, then training.
#
#   bash examples/train.sh sql|search|repair|langgraph DIRECTORY [flags of train.py]
#
# langgraph is LangChain's agent on the questions of sql.
set -euo pipefail
name="$1" dir="$2" here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" model=smollm2
agent="$here/$name/${name}_agent.py:Small${name^}Agent" prompts=()
n=12 flags=(--local.no-std-normalization) # iterations, and groups of each
case "$name" in search) n=8 ;; repair) flags+=(--drop-zero-variance) ;; esac
if [ "$name" = langgraph ]; then
  agent="$here/sql/langgraph_agent.py:answer_small" model="$dir/smollm2" flags+=(--max-new-tokens 96)
  python "$here/sql/sql_data.py" "$dir" foreign
  mkdir -p "$model" && ln -sf "$(agl-slime model smollm2)"/* "$model" # with a template that writes calls of tools
  ln -sf "$here/sql/tools.jinja" "$model/chat_template.jinja"
else
  prompts=(--agent "$agent") flags+=(--max-new-tokens 64)
  python "$here/$name/${name}_data.py" "$dir" small
fi
agl-slime warm-up --model "$model" "${prompts[@]}" --demonstrations "$dir/demonstrations.jsonl" --output-dir "$dir/warm"
agl-slime train --model "$dir/warm" --agent "$agent" --tasks "$dir/train.jsonl" --eval-tasks "$dir/held_out.jsonl" \
  --output-dir "$dir/run" --rollout-batch-size "$n" --n-samples-per-prompt 8 --num-iterations "$n" \
  --eval-interval "$n" --eval-rollouts 192 --local.lr 4e-5 --local.n-minibatches 1 "${flags[@]}" "${@:3}"
