#!/usr/bin/env bash
# Makes a Python environment in which slime's own code runs on a CPU, for the tests marked slime and ray:
#   scripts/slime_cpu.sh SLIME_DIR [VENV]        (VENV defaults to .venv-slime; needs python3.10 to 3.12 as PYTHON)
# Then, for example:
#   SLIME_DIR=… .venv-slime/bin/python -m pytest tests/train/slime tests/tools tests/house -m "slime or ray"
# Megatron and an importable SGLang are not installed: agl_slime/tools/rehearse/standins has the few names of theirs that slime imports.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
slime_dir=$(cd "${1:?usage: scripts/slime_cpu.sh SLIME_DIR [VENV]}" && pwd)
venv=${2:-$here/.venv-slime}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
[ -d "$slime_dir/slime/ray" ] || { echo "$slime_dir is no slime checkout: git clone https://github.com/THUDM/slime" >&2; exit 2; }

"$python" -m venv "$venv"
"$venv/bin/pip" install -q -c "$here/constraints.txt" torch "ray[default]" transformers numpy httpx tqdm pillow pylatexenc sympy aiohttp pybase64 \
  setproctitle wandb sglang-router==0.3.2 safetensors pyarrow pyyaml pytest pytest-asyncio hypothesis
"$venv/bin/pip" install -q -c "$here/constraints.txt" -e "$here"
PYTHONPATH="$here/agl_slime/tools/rehearse/standins:$slime_dir" "$venv/bin/python" -c "
import ray, slime, agl_slime.types as types
import slime.ray.rollout
assert types.HAS_SLIME
print('slime from', slime.__path__[0], 'runs here with ray', ray.__version__, 'and torch', __import__('torch').__version__)"
echo "SLIME_DIR=$slime_dir $venv/bin/python -m pytest tests/train/slime tests/tools tests/house -m 'slime or ray'"
