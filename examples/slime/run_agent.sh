#!/usr/bin/env bash
# slime's own train.py on an Agent Lightning agent: the part that all recipes here share, and by itself one machine with GPUs that both train and sample.
# Needs a slime installation (Megatron, SGLang) and a checkpoint in both forms (docs/slime-8-gpus.md):
#
#   SLIME_DIR=~/slime MODEL=~/Qwen3-0.6B MODEL_TORCH_DIST=~/Qwen3-0.6B_torch_dist examples/slime/run_agent.sh
#
# MODEL_ARGS_FILE: the file in slime's scripts/models for the model. AGL_CONFIG: settings without a slime flag (agl.yaml). AGENT_PATH: a directory with the
# agent's module. EVAL_DATA: a file of evaluation tasks (JSON lines); EVAL_NAME: its name in slime. GPU_ARGS: the assignment of GPUs. SCRIPT: slime's training
# script. RAY_JOB_ADDRESS: submit the run as a job to this Ray (http://HEAD:8265); JOB_ENV: more variables for it. Further arguments are passed to slime and
# override these. With BUFFER_URL rollouts come from a Rollout Buffer; run_agent_buffer.sh starts one.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
repository="$(cd "$here/../.." && pwd)"
: "${SLIME_DIR:?set SLIME_DIR to the checkout of slime}" "${MODEL:?set MODEL to the Hugging Face checkpoint}"
: "${MODEL_TORCH_DIST:?set MODEL_TORCH_DIST to the same checkpoint as tools/convert_hf_to_torch_dist.py of slime writes it}"
save="${SAVE:-$PWD/runs/slime}"
num_gpus="${NUM_GPUS:-$(nvidia-smi -L | wc -l)}"
# shellcheck disable=SC1090
source "${MODEL_ARGS_FILE:-$SLIME_DIR/scripts/models/qwen3-0.6B.sh}"

CKPT_ARGS=(--hf-checkpoint "$MODEL" --ref-load "$MODEL_TORCH_DIST" --load "$save" --save "$save" --save-interval 20)
CKPT_ARGS+=(--override-opt_param-scheduler) # a resume with another --num-rollout has another schedule

# slime's hooks. Tasks come from the agent's make_task(rng); with --prompt-data FILE.jsonl every line is a task.
AGL_ARGS=(
  --data-source-path agl_slime.AGLDataSource
  --rollout-function-path agl_slime.slime_hooks.generate_rollout
  --eval-function-path agl_slime.slime_hooks.generate_rollout
  --custom-reward-post-process-path agl_slime.slime_hooks.normalize_rewards
  --dynamic-sampling-filter-path agl_slime.slime_hooks.keep_nonzero_variance
  --custom-rollout-log-function-path agl_slime.slime_hooks.log_rollout
  --custom-eval-rollout-log-function-path agl_slime.slime_hooks.log_eval_rollout
  --custom-config-path "${AGL_CONFIG:-$here/agl.yaml}"
)
launcher=()
if [ -n "${BUFFER_URL:-}" ]; then
  launcher=(-m agl_slime.train.slime.launch) # its parser has --agent-rollout-buffer-url and custom loss masks
  AGL_ARGS=(
    --rollout-function-path agl_slime.buffer.agent_rollout.generate_rollout
    --agent-rollout-buffer-url "$BUFFER_URL"
    --rollout-task-type "${TASK_TYPE:-math}"
    --prompt-data "${DATA:?set DATA to the tasks: JSON lines with prompt and instance_id}" --input-key prompt
    --loss-mask-type "${LOSS_MASK_TYPE:-auto}"
    --disable-rewards-normalization
  )
fi
EVAL_ARGS=()
if [ -n "${EVAL_DATA:-}" ]; then
  EVAL_ARGS=(--eval-interval 20 --eval-prompt-data "${EVAL_NAME:-held_out}" "$EVAL_DATA" --n-samples-per-eval-prompt 1 --eval-max-response-len 1024 --eval-temperature 0)
fi
ROLLOUT_ARGS=(
  --num-rollout 200
  --rollout-batch-size 32
  --n-samples-per-prompt 8
  --global-batch-size 256
  --rollout-max-response-len 1024
  --rollout-temperature 1
  --rollout-num-gpus-per-engine 1
  --sglang-mem-fraction-static 0.7
)
TRAIN_ARGS=(
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
  --use-dynamic-batch-size --max-tokens-per-gpu 9216
  --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
)

export PYTHONPATH="${AGENT_PATH:+$AGENT_PATH:}$repository:$SLIME_DIR:${MEGATRON_DIR:-$HOME/Megatron-LM}${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_DEVICE_MAX_CONNECTIONS=1 PYTHONUNBUFFERED=1
job=()
if [ -n "${RAY_JOB_ADDRESS:-}" ]; then
  # a job's actors have the environment of its runtime_env, on every node, and not this shell's
  runtime_env="$(python -c '
import json, os
names = {"PYTHONPATH", "CUDA_DEVICE_MAX_CONNECTIONS", "PYTHONUNBUFFERED", *os.environ.get("JOB_ENV", "").split()}
print(json.dumps({"env_vars": {name: value for name, value in os.environ.items() if name in names or name.startswith("AGL_")}}))')"
  job=(ray job submit --address "$RAY_JOB_ADDRESS" --runtime-env-json "$runtime_env" --)
fi
read -ra gpu_args <<<"${GPU_ARGS:---actor-num-nodes 1 --actor-num-gpus-per-node $num_gpus --num-gpus-per-node $num_gpus --colocate}"
exec "${job[@]}" python "${launcher[@]}" "$SLIME_DIR/${SCRIPT:-train.py}" "${gpu_args[@]}" \
  "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${AGL_ARGS[@]}" "${EVAL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${TRAIN_ARGS[@]}" "$@"
