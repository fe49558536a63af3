#!/usr/bin/env bash
# Renew constraints.txt, on purpose: every package that the extras below bring, per Python version and system, as resolved today within constraints.in.
#
#   scripts/pins.sh        # needs uv (pip install uv) and a package index; then run the tests
set -euo pipefail
cd "$(dirname "$0")/.."

extras=()
for extra in local smollm2 lora report slime browser dev; do extras+=(--extra "$extra"); done
{
  printf '# Made by scripts/pins.sh from constraints.in: the versions that the test suite was last run against, so that the same command installs\n'
  printf '# the same packages next year and pip has nothing to search for. [peers], [clients] and [docs] bring more and are not pinned here.\n'
  uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-python-downloads -c constraints.in "${extras[@]}" --no-annotate --no-header
} > constraints.new
mv constraints.new constraints.txt
