#!/usr/bin/env bash
# Serve a small checkpoint with a real SGLang on a CPU, on 127.0.0.1, until interrupted.
#
#   scripts/serve_sglang_cpu.sh MODEL_DIR PORT [more sglang flags]
#
# AGL_SLIME_SGLANG_THREADS is how many cores a forward pass takes, by default one, which is best for a tiny model.
# The Python with SGLang is AGL_SLIME_SGLANG_PYTHON, or the one that scripts/sglang_cpu.sh set up in .venv-sglang.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
if [ $# -lt 2 ]; then
  echo "usage: $0 MODEL_DIR PORT [more sglang flags]" >&2
  exit 2
fi
model="$1" port="$2"
shift 2
python="${AGL_SLIME_SGLANG_PYTHON:-$here/../.venv-sglang/bin/python}"
if [ ! -x "$python" ]; then
  echo "error: no Python with SGLang at $python: run scripts/sglang_cpu.sh, or set AGL_SLIME_SGLANG_PYTHON" >&2
  exit 1
fi
# The shims are for this process only; they stand in for what SGLang's CPU path imports and a PyPI install lacks.
export PYTHONPATH="$here/sglang_cpu"
export SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${AGL_SLIME_SGLANG_THREADS:-1}"
# --sleep-on-idle: else one core spins. --max-total-tokens: else the key-value cache takes gigabytes.
exec "$python" -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "$port" --device cpu \
  --attention-backend torch_native --sampling-backend pytorch --dtype float32 \
  --cuda-graph-backend-decode=disabled --cuda-graph-backend-prefill=disabled --disable-overlap-schedule --sleep-on-idle \
  --max-total-tokens 65536 --max-running-requests 64 --mem-fraction-static 0.2 --random-seed 0 "$@"
