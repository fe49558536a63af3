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
export AGL_SLIME_SGLANG_PYTHON="${AGL_SLIME_SGLANG_PYTHON:-$here/../.venv-sglang/bin/python}"
if [ ! -x "$AGL_SLIME_SGLANG_PYTHON" ]; then
  echo "error: no Python with SGLang at $AGL_SLIME_SGLANG_PYTHON: run scripts/sglang_cpu.sh, or set AGL_SLIME_SGLANG_PYTHON" >&2
  exit 1
fi
# beside what `train.py --engine sglang` starts: the flags are the same
exec "$here/../agl_slime/engine/sglang_cpu/serve.sh" "$@"
