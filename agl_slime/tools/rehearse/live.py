"""A few steps of the run for real: slime's driver, placement, manager, router, rollout function and data source, on a
Ray of logical nodes on one host, at speeds that are scaled to fit a time."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.loop.task_files import split_slice
from agl_slime.support.child import Child
from agl_slime.tools.rehearse.checks import Arguments, Nodes
from agl_slime.tools.rehearse.engine import REQUEST
from agl_slime.tools.rehearse.forecast import Forecast, Shape, Speeds, forecast
from agl_slime.tools.rehearse.megatron.small import described, values_of
from agl_slime.tools.rehearse.parsing import STANDINS
from agl_slime.tools.rehearse.script import Training

PROGRAM = Path(__file__).parent / "programs" / "live.py"
WORKER_BYTES = 400e6  # of a Ray worker with torch and slime
_STORE_BYTES = 150_000_000  # of a node's object store
_TOKENS = 64  # mean length of live responses: shorter ones decode more slowly
_READ = ("AGL_", "SLIME_", "ADAPTER_")  # variables of the script that its live steps get: of slime and of this package
_NOT_STARTED = "Exception raised in creation task"  # Ray's words
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_POLL_S = 1.0
_ALONE = ("--use-wandb", "--use-tensorboard", "--use-mlflow")  # flags that the live run leaves out


@dataclass(frozen=True)
class Live:
    """Measured seconds per step, at ``scale`` of the real time, and the forecast at the same scale."""

    steps: int
    step_s: float
    expected: Forecast
    scale: float


def play_live(
    args: Arguments,
    training: Training,
    nodes: Nodes,
    speeds: Speeds,
    shape: Shape,
    *,
    steps: int,
    seconds: float,
    slime_dir: Path,
    python: str,
    tokenizer: Path,
    scratch: Path,
) -> Live:
    """Run ``steps`` steps, scaled to about ``seconds`` in total. ``tokenizer`` is a model's directory that stands for a
    missing one. Raises ``AglSlimeError`` when slime's driver fails."""
    _check_memory(args, nodes)
    short = max(1.0, shape.mean_tokens / _TOKENS)
    once = forecast(speeds, shape, steps=steps)
    scale = min(1.0, seconds / (once.steps[-1].synced or 1.0))
    live_shape = replace(shape, mean_tokens=shape.mean_tokens / short, max_tokens=round(shape.max_tokens / short))
    times = {name: value * scale for name, value in asdict(speeds).items()}
    for name in ("token_s", "token_s_per_sequence", "train_token_s"):
        times[name] *= short
    live_speeds = Speeds(**times)
    events = scratch / "events.jsonl"
    content = {"nodes": nodes.count, "gpus": nodes.gpus, "store_bytes": _STORE_BYTES, "events": str(events)}
    content |= {"script": str(slime_dir / Path(training.script).name), "speeds": asdict(live_speeds)}
    content |= {"flags": _flags(args, training, live_shape, steps, tokenizer, scratch), "shape": asdict(live_shape)}
    env = live_env(training, [STANDINS, slime_dir], scratch, content)
    timeout_s = 300 + 20 * seconds
    run_driver([python, str(PROGRAM)], env, args.path(""), scratch / "live.log", timeout_s=timeout_s)
    records = [json.loads(line) for line in events.read_text().splitlines()] if events.is_file() else []
    synced = [row["ended"] for row in records if row["event"] == "update"][1:]  # without the first, before any rollout
    if len(synced) < min(steps, 3):
        raise AglSlimeError(f"the live rehearsal made {len(synced)} of {steps} steps; its log is live.log")
    expected = forecast(live_speeds, live_shape, steps=steps)
    measured = (synced[-2] - synced[0]) / (len(synced) - 2)  # nothing is sampled beside the last step
    return Live(len(synced), measured, expected, scale)


def live_env(training: Training, path: Sequence[Path], scratch: Path, request: Mapping[str, Any]) -> dict[str, str]:
    """The variables of slime's driver, for a request that is written to ``scratch``."""
    (file := scratch / "live.json").write_text(json.dumps(request))
    places = [*map(str, path), str(Path(__file__).parents[3]), training.env.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), REQUEST: str(file)}
    env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
    env |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    env.pop("CUDA_VISIBLE_DEVICES", None)  # an empty one forbids logical GPUs
    env |= {name: value for name, value in training.env.items() if name.startswith(_READ)}
    return env | {"SLIME_HOST_IP": "127.0.0.1"}


def _check_memory(args: Arguments, nodes: Nodes) -> None:
    engines = (args.rollout_num_gpus or 0) // (args.rollout_num_gpus_per_engine or 1)
    workers = args.actor_gpus + 2 * engines + args.gpus_needed / 4 + 4
    need, free = workers * WORKER_BYTES, psutil.virtual_memory().available
    if args.gpus_needed > nodes.total:
        need = f"{args.gpus_needed} GPUs of {nodes.total}"
        raise ConfigError(f"--live-steps: slime needs {need} and would wait for ever; give --nodes as the run has")
    if need > free:
        sizes = f"{need / 2**30:.0f} GiB of memory for its processes, and {free / 2**30:.0f} GiB are free"
        raise ConfigError(f"--live-steps needs {sizes}; give fewer GPUs to the script, or leave it out")


def _flags(args: Arguments, training: Training, shape: Shape, steps: int, tokenizer: Path, scratch: Path) -> list[str]:
    """The script's flags; those given last count."""
    flags = [flag for flag in training.flags if flag not in _ALONE]
    overrides = {"num-rollout": steps, "rollout-max-response-len": shape.max_tokens, "save": scratch / "saved"}
    overrides |= {"save-interval": 10**6, "num-gpus-per-node": args.num_gpus_per_node}
    if args.eval_interval is not None:
        overrides |= {"eval-interval": 10**6} if args.eval_datasets else {}  # else --custom-config-path gives it
    if not args.hf_checkpoint or not args.path(args.hf_checkpoint).is_dir():
        overrides["hf-checkpoint"] = _model(flags, tokenizer, scratch)
    if not args.ref_load or not args.path(args.ref_load).is_dir():
        overrides["ref-load"] = scratch
    if args.update_weight_disk_dir:
        overrides["update-weight-disk-dir"] = scratch / "weights"
    if args.colocate or args.offload_train:
        flags.append("--no-offload-train")  # which needs a library for GPUs
    return live_flags(flags, overrides, args, scratch)


def live_flags(flags: list[str], overrides: Mapping[str, object], args: Arguments, scratch: Path) -> list[str]:
    """``flags`` and then ``overrides``: tasks of its own where the script's are missing here."""
    overrides = {**overrides}
    if args.eval_interval is not None:
        overrides["skip-eval-before-train"] = ""
    if args.prompt_data and not args.path(split_slice(args.prompt_data)[0]).is_file():
        overrides["prompt-data"] = _tasks(args, scratch)
    return [*flags, *(part for name, value in overrides.items() for part in (f"--{name}", str(value)) if part)]


def _model(flags: Sequence[str], tokenizer: Path, scratch: Path) -> Path:
    """A tiny model's tokenizer, with the configuration that the flags describe."""
    model = Path(shutil.copytree(tokenizer, scratch / "model", dirs_exist_ok=True))
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(described(values_of(flags))))
    return model


def _tasks(args: Arguments, scratch: Path) -> Path:
    keys = {args.input_key or "input": "1 + 1 = ?", args.label_key or "label": "2"}
    (path := scratch / "tasks.jsonl").write_text((json.dumps(keys) + "\n") * 1000)
    return path


def run_driver(command: list[str], env: Mapping[str, str], cwd: Path, log: Path, *, timeout_s: float) -> None:
    child = Child(command, name="slime's driver", env=env, log=log, cwd=cwd)  # Ray's daemons are in its group
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the group would outlive this process
    try:
        with child:
            code = _ended(child, log, time.monotonic() + timeout_s)
    finally:
        signal.signal(signal.SIGTERM, previous)
    if code != 0:
        text = _COLOURS.sub("", log.read_text(errors="replace"))
        last = (re.findall(".*(?:Error|Exception:).*", text) or ["see live.log"])[-1].strip()
        ending = f"ended with code {code}"
        if code is None:
            ending = "waits for an actor that did not start" if _NOT_STARTED in text else "did not end in time"
        raise AglSlimeError(f"slime's driver {ending} in the live rehearsal: {last}")


def _ended(child: Child, log: Path, deadline: float) -> int | None:
    """The driver's exit code; ``None`` at the deadline, or when an actor did not start, for which the driver may wait
    without an end: a manager whose start failed lives on for its router."""
    text = ""
    with log.open(errors="replace") as written:
        while (code := child.wait(_POLL_S)) is None and time.monotonic() < deadline:
            text = text[-len(_NOT_STARTED) :] + written.read()  # since the last look
            if _NOT_STARTED in text:
                return child.wait(_POLL_S * 5)  # the error itself follows
    return code
