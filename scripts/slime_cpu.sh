#!/usr/bin/env bash
# Makes a Python environment in which slime's own code runs on a CPU, its Megatron actors included:
#   scripts/slime_cpu.sh SLIME_DIR [VENV]        (VENV defaults to .venv-slime; needs python3.10 to 3.12 as PYTHON)
# Then, for example:
#   .venv-slime/bin/python -m agl_slime.tools.rehearse.megatron                      # slime's train.py, the lookup agent, 8 steps
#   SLIME_DIR=… .venv-slime/bin/python -m pytest tests/train/slime tests/tools tests/house -m "slime or ray"
# Megatron-LM is copied from MEGATRON_DIR, or unpacked from AGL_SLIME_SOURCES, or cloned; MEGATRON_DIR=none leaves it out. It lies in VENV/megatron with
# slime's patches. An importable SGLang is not installed: agl_slime/tools/rehearse/standins has the few names of it that slime imports.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
slime_dir=$(cd "${1:?usage: scripts/slime_cpu.sh SLIME_DIR [VENV]}" && pwd)
venv=${2:-$here/.venv-slime}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[ -d "$slime_dir/slime/ray" ] || { echo "$slime_dir is no slime checkout: git clone https://github.com/THUDM/slime" >&2; exit 2; }

megatron() { # into $venv/megatron: the commit of slime's image, with slime's patches
  local commit=1dcf0dafa8 to=$venv/megatron archive=${AGL_SLIME_SOURCES:-/nowhere}/megatron-lm-1dcf0dafa8.tar.xz patch
  rm -rf "$to" "$to.new"
  if [ -n "${MEGATRON_DIR:-}" ]; then
    mkdir -p "$to.new" && cp -r "$MEGATRON_DIR/megatron" "$to.new"
  elif [ -f "$archive" ]; then
    mkdir -p "$to.new" && tar xJf "$archive" -C "$to.new" --strip-components 1
  else
    git clone -q --filter=blob:none --no-checkout https://github.com/NVIDIA/Megatron-LM "$to.new"
    git -C "$to.new" checkout -q "$commit"
  fi
  for patch in megatron megatron-sglang-aligned; do
    patch=$slime_dir/docker/patch/latest/$patch.patch
    # without a repository above, of which git would patch nothing; a checkout may have the patch already
    (cd "$to.new" && export GIT_CEILING_DIRECTORIES=$venv && { git apply "$patch" 2> /dev/null || git apply --reverse --check "$patch"; })
  done
  mv "$to.new" "$to"
  ln -sfn "$slime_dir" "$venv/slime"
}

"$python" -m venv "$venv"
venv=$(cd "$venv" && pwd)
"$venv/bin/pip" install -q -c "$here/constraints.txt" torch "ray[default]" transformers numpy httpx tqdm pillow pylatexenc sympy aiohttp pybase64 \
  setproctitle wandb sglang-router==0.3.2 safetensors pyarrow pyyaml pytest pytest-asyncio hypothesis einops
"$venv/bin/pip" install -q -c "$here/constraints.txt" -e "$here"
PYTHONPATH="$slime_dir:$here/agl_slime/tools/rehearse/standins" "$venv/bin/python" -c "
import ray, slime, agl_slime.types as types
import slime.ray.rollout
assert types.HAS_SLIME
print('slime from', slime.__path__[0], 'runs here with ray', ray.__version__, 'and torch', __import__('torch').__version__)"
[ "${MEGATRON_DIR:-}" = none ] || megatron
echo "SLIME_DIR=$slime_dir $venv/bin/python -m pytest tests/train/slime tests/tools tests/house -m 'slime or ray'"
