#!/usr/bin/env bash
# What SGLang's server needs on a CPU without AMX: serve.sh MODEL_DIR PORT [more sglang flags], with the Python that
# AGL_SLIME_SGLANG_PYTHON names and as many cores for a forward pass as AGL_SLIME_SGLANG_THREADS says, by default one.
set -euo pipefail
model="$1" port="$2"
shift 2
# The shims are for this process only; they stand in for what SGLang's CPU path imports and a PyPI install lacks.
export PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${AGL_SLIME_SGLANG_THREADS:-1}"
# Requests' seeds count with SGLang's deterministic sampling alone, whose hash is a Triton kernel: interpreted, slowly.
if [[ " $* " == *" --enable-deterministic-inference "* ]]; then
  export TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1
  # the first is one that SGLang accepts with that flag, the others are used
  set -- "$@" --attention-backend triton --prefill-attention-backend torch_native --decode-attention-backend torch_native
fi
# --sleep-on-idle: else one core spins. --max-total-tokens: else the key-value cache takes gigabytes.
exec "$AGL_SLIME_SGLANG_PYTHON" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" --device cpu \
  --attention-backend torch_native --sampling-backend pytorch --dtype float32 \
  --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled --disable-overlap-schedule --sleep-on-idle \
  --max-total-tokens 65536 --max-running-requests 64 --mem-fraction-static 0.2 --random-seed 0 "$@"
