"""A recipe of ``examples/slime`` run as it stands, without GPUs, Ray cluster, Slurm or Kubernetes: programs of their
names come first on the path and pass the command on."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from agl_slime.tools.rehearse.megatron.flags import model_flags
from tests.harness.slime_programs import REPOSITORY, environment

RECIPES = REPOSITORY / "examples" / "slime"
# in place of the python that would start slime's script: one that only parses, or runs it with our trainer
_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m agl_slime.train.slime.launch") shift 3; exec {python} -m agl_slime.train.slime.launch {parse} "$@" ;;
  -*) exec {python} "$@" ;;
  *) exec {python} -m tests.programs.slime.{program} "$@" ;;
esac
"""
# "ray job submit ... -- COMMAND" runs COMMAND with the variables of its runtime_env only, as a node's worker has them
_RAY = """#!{python}
import json, os, sys
if sys.argv[1:3] == ["job", "submit"] and "--runtime-env-json" in sys.argv:
    at = sys.argv.index("--")
    given = json.loads(sys.argv[sys.argv.index("--runtime-env-json") + 1])["env_vars"]
    kept = {{name: os.environ[name] for name in ("PATH", "HOME", "HF_HUB_OFFLINE", "WANDB_MODE") if name in os.environ}}
    os.execvpe(sys.argv[at + 1], sys.argv[at + 1 :], kept | given)
print("ray", *sys.argv[1:], file=sys.stderr)
"""
_SCONTROL = '#!/bin/sh\nprintf "node1\\nnode2\\nnode3\\nnode4\\n"\n'
_SRUN = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
[ "$1" != hostname ] || exec echo 10.0.0.1
SLURM_PROCID=0 exec "$@"
"""


def programs(directory: Path, *, program: str, cluster: bool = False) -> Path:
    """A directory for the front of the path; with ``cluster`` also ray, srun and scontrol are ours."""
    parse = REPOSITORY / "tests" / "programs" / "slime" / "parse.py"
    texts = {"python": _PYTHON.format(python=sys.executable, parse=parse, program=program)}
    if cluster:
        texts |= {"ray": _RAY.format(python=sys.executable), "srun": _SRUN, "scontrol": _SCONTROL}
    directory.mkdir(exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return directory


def variables(root: Path, directory: Path, policy: Path) -> dict[str, str]:
    """The variables that the recipes read, for the model ``policy``."""
    model_args = directory / "model.sh"
    model_args.write_text(f"MODEL_ARGS=({' '.join(model_flags(policy))})\n")
    if not (model := directory / "model").exists():
        model.symlink_to(policy)
    files = {"MODEL": model, "MODEL_TORCH_DIST": directory, "MODEL_ARGS_FILE": model_args, "SAVE": directory / "saved"}
    files |= {"SLIME_DIR": root, "EVAL_DATA": directory / "eval.jsonl"}
    return {name: str(file) for name, file in files.items()} | {"EVAL_NAME": "lookup", "NUM_GPUS": "4"}


def parsed(command: Sequence[str | Path], root: Path, path: Path, extra: dict[str, str]) -> dict[str, Any]:
    """slime's reading of the command line that a recipe makes."""
    finished = subprocess.run(
        [str(part) for part in command],
        cwd=REPOSITORY,
        env={**environment(root), "PATH": f"{path}{os.pathsep}{os.environ['PATH']}", **extra},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def ray_job() -> dict[str, Any]:
    """The ``spec`` of the RayJob, with its runtime environment read."""
    spec = yaml.safe_load((RECIPES / "rayjob.yaml").read_text())["spec"]
    return spec | {"env": yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]}
