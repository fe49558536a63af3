# shellcheck shell=bash
# Sourced by run and nightly: a working directory that is removed at the end, and steps whose times make a table.
work=$(mktemp -d)
# 0 means --no-compile, whose variable counts in reverse: a module is compiled when it is first imported, and its compiled file is kept
export PIP_NO_COMPILE=0
unset PYTHONDONTWRITEBYTECODE # which images often set
export PIP_DISABLE_PIP_VERSION_CHECK=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=1
SKIPPED=77 # exit code of a step that this machine cannot run
keep_going=no
lanes=() # process groups of steps that run beside the others

finish() {
  local code=$?
  trap - EXIT
  for pid in "${lanes[@]}"; do kill -- "-$pid" 2> /dev/null || true; done
  if [ -s "$work/steps" ]; then
    printf '\n== times of the steps, %s s in all\n' "$SECONDS"
    cat "$work/steps"
    if grep -q '  failed ' "$work/steps"; then printf '\n== failed\n' && grep '  failed ' "$work/steps" && code=1; fi
  fi
  rm -rf "$work"
  exit "$code"
}
trap finish EXIT
trap 'exit 143' TERM HUP
trap 'exit 130' INT

step() { # NAME COMMAND…: in a subshell, so that an exit or a failure ends the step alone
  local name=$1 begin=$SECONDS code outcome
  printf '\n== %s (%s s, %s free)\n' "$name" "$SECONDS" "$(df -Ph "$work" | awk 'END { print $4 }')"
  set +e
  (
    trap - EXIT TERM HUP INT
    set -e
    "${@:2}"
  )
  code=$?
  set -e
  case $code in 0) outcome=passed ;; "$SKIPPED") outcome=skipped ;; *) outcome=failed ;; esac
  printf '%6s s  %-8s %s\n' $((SECONDS - begin)) "$outcome" "$name" >> "$work/steps"
  [ "$outcome" != failed ] || [ $keep_going = yes ] || exit "$code"
}

skip() { echo "skipped: $*" && exit "$SKIPPED"; } # ends a step

# The tests of a marker, the first word of $1. Only files that name it are imported; "sglang" also comes from a fixture.
# pytest ends with 5 when a marker selects no test.
marked() {
  local files=tests code=0
  [[ $1 = sglang* ]] || files=$(grep -rlE "mark\.${1%% *}\b" --include='test_*.py' tests)
  # shellcheck disable=SC2086
  python -m pytest $files -m "$@" || code=$?
  [ $code -eq 0 ] || [ $code -eq 5 ] || exit $code
}

# The README's Nth command: the Nth of its lines that make an environment.
readme_command() { grep -E '^    python3 -m venv ' README.md | sed -n "$1p"; }

first_command() { PIP_QUIET=1 eval "$(readme_command 1) --output-dir '$work/run' --view lines"; }

second_command() { PIP_QUIET=1 PYTEST_ADDOPTS="${1:-}" eval "$(readme_command 2)"; }

enter_environment() { # the one that the README's commands made
  # shellcheck disable=SC1091
  source .venv/bin/activate
}

lint() {
  ruff check .
  ruff format --check .
  lint-imports
  pyright
}

find_python() { # VERSION
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/python; do
    if "$candidate" -c "import venv" 2> /dev/null; then echo "$candidate" && return; fi
  done
  return 1
}

wheel() { # as a release makes it, and alone in an environment
  python3 -m venv "$work/release"
  "$work/release/bin/pip" install -q build twine
  "$work/release/bin/python" -m build -o "$work/dist" . > /dev/null # the wheel from the sdist
  "$work/release/bin/twine" check --strict "$work"/dist/*
  "$work/release/bin/pip" install -q --no-deps "$work"/dist/*.whl
  (cd "$work" && release/bin/python -c "import agl_slime, importlib.metadata as m; assert agl_slime.__version__ == m.version('agl-slime')")
}

site() {
  python3 -m venv "$work/docs"
  "$work/docs/bin/pip" install -q "mkdocs-material>=9.5" "mkdocstrings[python]>=0.26" # the extra [docs], without the package
  "$work/docs/bin/mkdocs" build --strict -d "$work/site" # with -q it would count no warning, and pass
}

# Archives of slime and Megatron-LM beside the clone; tests take SLIME_DIR and MEGATRON_DIR, or this folder.
if [ -z "${AGL_SLIME_SOURCES:-}" ] && [ -d ../shared/sources ]; then
  AGL_SLIME_SOURCES=$(cd ../shared/sources && pwd)
  export AGL_SLIME_SOURCES
fi

slime_environment() { # what slime, Ray and SmolLM2 need, in the environment that is active
  local root
  pip install -q -c constraints.txt -e ".[dev,smollm2,slime]"
  root=$(python -m tests.harness.sources slime) || skip "$root"
  PYTHON=python bash scripts/slime_cpu.sh "$root" "$VIRTUAL_ENV"
}

controller_environment() { # of Agent Lightning 1.0
  local other
  other=$(find_python 3.12) || skip "this machine has no Python 3.12"
  "$other" -m venv "$work/agl1"
  "$work/agl1/bin/pip" install -q "agentlightning==1.0.2"
}
