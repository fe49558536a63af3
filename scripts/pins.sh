#!/usr/bin/env bash
# Renew the pinned versions, on purpose; then run the tests. Needs uv (pip install uv) and a package index.
#
#   scripts/pins.sh                          # constraints.txt: every package that the extras below bring, within constraints.in
#   SLIME_DIR=slime scripts/pins.sh slime    # constraints-slime*.txt and requirements-slime.txt, with a Python that has agl-slime
set -euo pipefail
cd "$(dirname "$0")/.."

extras_of_this_package() {
  local extras=() extra
  for extra in local smollm2 lora report parquet slime browser dev; do extras+=(--extra "$extra"); done
  printf '# Made by scripts/pins.sh from constraints.in: the versions that the test suite was last run against, so that the same command installs\n'
  printf '# the same packages next year and pip has nothing to search for. [peers], [clients] and [docs] bring more and are not pinned here.\n'
  uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --no-python-downloads -c constraints.in "${extras[@]}" --no-annotate --no-header
}

# The packages of an environment with this version of SGLang and slime's requirements, and further pins of slime's image.
environment_of_slime() {
  local version=$1
  shift
  printf '# For Python 3.12 only. Made by scripts/pins.sh: the packages of an environment with SGLang %s and slime, as resolved from their own requirements. The dry run\n' "$version"
  printf '# of .ci/nightly installs agl-slime beside them. A real image has other versions where SGLang and slime pin none:\n'
  printf '# scripts/install_in_slime.sh takes what it finds as constraints, and not this list.\n'
  { echo "sglang==$version"; sed 's/#.*//' "$SLIME_DIR/requirements.txt"; printf '%s\n' "$@"; } |
    uv pip compile - --quiet --python-version 3.12 --python-platform x86_64-manylinux_2_34 --no-python-downloads \
      --prerelease if-necessary-or-explicit --no-annotate --no-header
}

case "${1:-}" in
  "")
    extras_of_this_package > constraints.new
    mv constraints.new constraints.txt
    ;;
  slime)
    : "${SLIME_DIR:?names a checkout of slime}"
    # numpy and scipy as slime's Dockerfile pins them; mcp below 2, which agents written for the image expect
    environment_of_slime 0.5.15.post1 numpy==1.26.4 scipy==1.17.1 'mcp<2' > constraints.new
    mv constraints.new constraints-slime.txt
    environment_of_slime 0.5.23 'mcp<2' > constraints.new
    mv constraints.new constraints-slime-0.5.23.txt
    python3 scripts/slime_requirements.py > constraints.new
    mv constraints.new requirements-slime.txt
    ;;
  *) echo "usage: scripts/pins.sh [slime]" >&2 && exit 2 ;;
esac
