#!/usr/bin/env bash
# Install agl-slime into an environment that has SGLang and slime, such as slime's image, and leave each package there at its version.
#
#   scripts/install_in_slime.sh [--dry-run]      # with python3, or the one named by PYTHON
#
# The installed packages are the constraints, so pip ends with an error instead of replacing one. LiteLLM is not installed: it is not
# imported as long as a program imports agl_slime before agentlightning. `pip check` names it as missing, and AgentOps' bounds of packaging
# and psutil, which are older than SGLang's.
set -euo pipefail
cd "$(dirname "$0")/.."

pip() { "${PYTHON:-python3}" -m pip "$@"; }
before=$(mktemp)
trap 'rm -f "$before"' EXIT

pip list --format=freeze > "$before"
reports=${AGL_SLIME_PIP_REPORTS:-} # a directory, for scripts/slime_dry_run.py
pip install "$@" ${reports:+--report "$reports/needs.json"} -c "$before" -r requirements-slime.txt
pip install "$@" ${reports:+--report "$reports/packages.json"} --no-deps agentlightning==0.3.0 agentops==0.4.21 .
if moved=$(pip list --format=freeze | grep -v '^agl.slime==' | grep -vxF -f - "$before" | grep -v '^agl.slime=='); then
  printf 'No longer at its version: %s\n' $moved >&2
  exit 1
fi
