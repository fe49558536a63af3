#!/usr/bin/env bash
# Set up a virtual environment with an unmodified SGLang that runs on a CPU (x86-64, no AMX, no GPU), for tests and for trying a run against the real server.
#
#   scripts/sglang_cpu.sh [--dry-run] [--version 0.5.15.post1|0.5.23] [VENV_DIR]      # default: .venv-sglang in the repository
#
# Needs Python 3.11 (PYTHON names another one) and about 3.3 GB; takes some minutes. Afterwards:
#
#   scripts/serve_sglang_cpu.sh MODEL_DIR PORT
#   AGL_SLIME_SGLANG_PYTHON=VENV_DIR/bin/python pytest -m sglang
#   AGL_SLIME_SGLANG_PYTHON=VENV_DIR/bin/python python train.py --engine sglang
#
# Its own environment, because its pins (torch, transformers, openai) clash with this package's. pip prints resolver complaints about SGLang's GPU dependencies at the end; they do not matter.
set -euo pipefail

SGLANG_VERSION=0.5.15.post1 # the version that slime pins; 0.5.23 is supported too: docs/engines.md says what differs
TORCH_VERSION=2.13.0
TORCHVISION_VERSION=0.28.0
# PyPI's torch for Linux may bring CUDA libraries, which are not needed; TORCH_INDEX_URL names an index that holds CPU builds only.
TORCH_INDEX_URL="${TORCH_INDEX_URL:-}"

# What differs between the versions, by their own requirements.
declare -A PINS=(
  [0.5.15.post1]="llguidance>=0.7.11,<0.8.0 openai==2.6.1 transformers==5.12.1 xgrammar==0.2.1"
  [0.5.23]="llguidance>=1.7.6,<2.0.0 openai==2.8.0 transformers==5.19.0 xgrammar==0.2.7 xxhash regex python-dateutil"
)
# What SGLang imports on the CPU path. Its own requirements would pull CUDA kernels, so it is installed with --no-deps.
DEPENDENCIES=(
  aiohttp "anthropic>=0.20.0" apache-tvm-ffi==0.1.11 blobfile==3.0.0 compressed-tensors datasets distro einops easydict fastapi gguf interegular IPython
  "mistral_common>=1.11.5" msgspec numpy nvidia-ml-py openai-harmony==0.0.4 orjson outlines==0.1.11 packaging
  partial_json_parser pillow "prometheus-client>=0.20.0" psutil pybase64 pydantic python-multipart "pyzmq>=25.1.2" requests scipy sentencepiece setproctitle
  soundfile==0.13.1 tiktoken tqdm uvicorn uvloop watchfiles zstandard accelerate
)

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
pip_flags=()
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) pip_flags+=(--dry-run) && shift ;;
    --version) SGLANG_VERSION="${2:?--version needs a version of SGLang}" && shift 2 ;;
    *) break ;;
  esac
done
if [ -z "${PINS[$SGLANG_VERSION]:-}" ]; then
  echo "error: --version $SGLANG_VERSION is not known; the versions are ${!PINS[*]}" >&2
  exit 2
fi
venv="${1:-$here/../.venv-sglang}"
python="${PYTHON:-python3.11}"
if ! command -v "$python" > /dev/null; then
  echo "error: $python not found: install Python 3.11, or name one with PYTHON=..." >&2
  exit 1
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
install() { "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "${pip_flags[@]}" "$@"; }

install "torch==$TORCH_VERSION" ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}
# torch is named again so that no dependency replaces it
read -ra pins <<< "${PINS[$SGLANG_VERSION]}"
install "torch==$TORCH_VERSION" "${DEPENDENCIES[@]}" "${pins[@]}"
install --no-deps "torchvision==$TORCHVISION_VERSION" "sglang==$SGLANG_VERSION"

if [ ${#pip_flags[@]} -eq 0 ]; then
  # the import that every start makes, with the stand-ins that the server gets
  PYTHONPATH="$here/../agl_slime/engine/sglang_cpu" SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c "import sglang.srt.entrypoints.http_server, sglang; print('SGLang', sglang.__version__, 'is ready')"
fi
echo "serve with: AGL_SLIME_SGLANG_PYTHON=$venv/bin/python $here/serve_sglang_cpu.sh MODEL_DIR PORT"
