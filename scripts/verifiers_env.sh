#!/usr/bin/env bash
# Set up a virtual environment with verifiers, and with the packages of this package's own tasksets, for --env.
#
#   scripts/verifiers_env.sh [VENV_DIR]      # default: .venv-verifiers in the repository
#
# Needs Python 3.12, or another one of 3.11 to 3.14 (PYTHON names it), and about 1 GB; takes some minutes. Afterwards:
#
#   python train.py --env reasoning-gym:chain_sum --env-python VENV_DIR/bin/python --model smollm2
#
# Its own environment, because its pins (mcp, openai, numpy) clash with those of Agent Lightning 0.3.
set -euo pipefail

VERIFIERS_VERSION=0.4.0 # the version that the tests marked environments were run on
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-}"
for candidate in python3.12 python3.13 python3.11 python3.14; do # a shim of pyenv may exist and not run
  if [ -z "$python" ] && "$candidate" -c "import venv" 2> /dev/null; then python=$candidate; fi
done
[ -n "$python" ] || { echo "verifiers needs Python 3.11 to 3.14: name one with PYTHON=" >&2 && exit 1; }
target="${1:-$here/../.venv-verifiers}"

echo "installing verifiers $VERIFIERS_VERSION with $("$python" --version) into $target: about 1 GB, some minutes"
"$python" -m venv "$target"
"$target/bin/pip" install -q "verifiers==$VERIFIERS_VERSION" "reasoning-gym==0.1.25" "textarena==0.7.4"
"$target/bin/pip" install -q --no-deps "$here/.." # its tasksets, and workers that are started by hand
"$target/bin/python" -c "import verifiers.v1, reasoning_gym, textarena; print('verifiers $VERIFIERS_VERSION in $target')"
