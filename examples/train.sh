#!/usr/bin/env bash
# SmolLM2-135M on a recipe: its data, a warm-up on demonstrations, then training.
#
#   bash examples/train.sh sql|search|repair DIRECTORY [flags of train.py]
#   bash examples/train.sh langgraph|openai|mini DIRECTORY [flags of train.py]
#
# The second line trains another agent on the tasks: LangChain's on those of sql, OpenAI's on search, mini-swe-agent on repair.
set -euo pipefail
dir="$2" here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)" foreign=""
case "$1" in
  langgraph) recipe=sql foreign=langgraph_agent.py:answer_small ;;
  openai) recipe=search foreign=openai_agent.py:answer_small ;;
  mini) recipe=repair foreign=mini_agent.py:repair_small ;;
  *) recipe="$1" ;;
esac
n=12 flags=(--local.no-std-normalization) # n iterations of n groups
case "$recipe" in search) n=8 ;; repair) flags+=(--drop-zero-variance) ;; esac
# AdamW's first step has its full size: without a warm-up two in three calls of langgraph were malformed after it
if [ "$1" = langgraph ]; then flags+=(--local.warmup-steps 4); fi
if [ "$foreign" ]; then
  model="$dir/smollm2" agent="$here/$recipe/$foreign" prompts=() flags+=(--max-new-tokens 96)
  python "$here/$recipe/${recipe}_data.py" "$dir" foreign
  mkdir -p "$model" && ln -sf "$(agl-slime model smollm2)"/* "$model" # with a template that writes calls of tools
  ln -sf "$here/tools.jinja" "$model/chat_template.jinja"
else
  model=smollm2 agent="$here/$recipe/${recipe}_agent.py:Small${recipe^}Agent" prompts=(--agent "$agent") flags+=(--max-new-tokens 64)
  python "$here/$recipe/${recipe}_data.py" "$dir" small
fi
agl-slime warm-up --model "$model" "${prompts[@]}" --demonstrations "$dir/demonstrations.jsonl" --output-dir "$dir/warm"
agl-slime train --model "$dir/warm" --agent "$agent" --tasks "$dir/train.jsonl" --eval-tasks "$dir/held_out.jsonl" \
  --output-dir "$dir/run" --rollout-batch-size "$n" --n-samples-per-prompt 8 --num-iterations "$n" \
  --eval-interval "$n" --eval-rollouts 192 --local.lr 4e-5 --local.n-minibatches 1 "${flags[@]}" "${@:3}"
