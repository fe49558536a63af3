"""One card beside the CPU, in one command and within ten minutes: the trainer, an engine with the gateway, the loop.

    python -m benchmarks.gpu                           # SmolLM2-135M, cuda beside cpu
    python -m benchmarks.gpu --model lookup            # the tiny policy; without a card its CPU rows, in a minute
    python -m benchmarks.gpu --model DIR --sglang-url http://127.0.0.1:30000 --out figures.json

*Trainer*: the same batch on each device and in each dtype, a process per row. Its old log-probs are those of the first
row (float32 on the CPU) with a noise of 0.1, so that the loss is not that of equal policies. *Loss* and *gradient* are
those of the first step; the difference is that of the tokens' log-probs to the first row's before any step; *seconds*
is the median of the steps after the first one.

*Calls*: 8 tokens from the engine itself and through the gateway (``benchmarks.gateway``). The embedded engine has no
CUDA: a card's engine is an SGLang that serves the model at ``--sglang-url``.

*Loop*: ``train.py`` with the trainer on each device and the embedded engine on the CPU (or the SGLang).

A section that cannot run, or that the time does not allow, is a line with the reason. Exit code 1 if a row failed or
its log-probs differ by more than the dtype's bound.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.common import REPO, console, print_table

DTYPES = ("float32", "bfloat16")
BOUNDS = {"float32": 1e-3, "bfloat16": 0.5}  # largest difference of a log-prob to float32 on the CPU
NOISE, STEPS = 0.1, 4
LOOPS = {  # flags of train.py by model, and the iterations of a whole curve
    "lookup": ([], 20),
    "smollm2": (
        [
            *("--agent", "agents/reverse_text.py:ReverseText", "--rollout-batch-size", "8"),
            *("--n-samples-per-prompt", "16", "--max-new-tokens", "16", "--local.lr", "2e-5"),
            *("--local.n-minibatches", "1"),
        ],
        20,
    ),
}


@dataclass(frozen=True)
class Budget:
    """Seconds of the whole command, and the moment at which it began."""

    seconds: float
    began: float

    def left(self, share: float = 1.0) -> float:
        """The remaining seconds, at most ``share`` of the whole."""
        return min(self.seconds * share, self.seconds - (time.monotonic() - self.began))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, lookup (the tiny policy), or a directory")
    parser.add_argument("--device", default="cuda", help="the device beside the CPU")
    parser.add_argument("--rollouts", type=int, default=32, help="of the trainer's batch, in groups of 8")
    parser.add_argument("--iterations", type=int, help="of the loop; by default a whole curve")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--sections", nargs="*", default=["trainer", "calls", "loop"])
    parser.add_argument("--sglang-url", help="an SGLang that serves the model")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--row", nargs=2, metavar=("DEVICE", "DTYPE"), help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    model = model_directory(options.model)
    if options.row:
        print(json.dumps(trainer_row(options, model)))
        return 0
    budget = Budget(options.minutes * 60, time.monotonic())
    card, missing = describe(options.device)
    console.print(card, highlight=False)
    figures: dict[str, Any] = {"card": card, "model": options.model}
    sections = {"trainer": trainer, "calls": calls, "loop": loop}
    for name in options.sections:
        figures[name] = sections[name](options, model, budget, missing)
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(row.get("failed") for name in options.sections for row in figures[name]))


def model_directory(name: str) -> Path:
    from agl_slime.cli.demo import LOOKUP_POLICY
    from agl_slime.cli.models import find_model

    return Path(LOOKUP_POLICY) if name == "lookup" else Path(find_model(Path(name), lambda text: console.print(text)))


def describe(device: str) -> tuple[str, str | None]:
    """A line on the device, and the reason for which it cannot be used."""
    import torch

    from agl_slime.errors import ConfigError
    from agl_slime.train.local.trainer import torch_device

    versions = f"torch {torch.__version__}"
    try:
        torch_device(device)
    except ConfigError:
        return f"{versions}: rows of {device} are not run", f"torch sees no {device}"
    if device.startswith("cuda"):
        facts = torch.cuda.get_device_properties(device)
        memory = f"{facts.total_memory / 2**30:.0f} GiB"
        return f"{facts.name}, {memory}, CUDA {torch.version.cuda}, {versions}", None
    return f"{device}, {versions}", None


def not_run(section: str, reason: str) -> dict[str, Any]:
    console.print(f"{section}: not run, {reason}", highlight=False)
    return {"row": section, "not run": reason}


# -- the trainer -----------------------------------------------------------------------------------------------------


def trainer(options: argparse.Namespace, model: Path, budget: Budget, missing: str | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        for device in dict.fromkeys(("cpu", options.device)):
            for dtype in DTYPES:
                section = f"trainer, {device} {dtype}"
                if device != "cpu" and missing:
                    found.append(not_run(section, missing))
                    continue
                flags = ["--model", str(model), "--rollouts", str(options.rollouts), "--directory", directory]
                command = [sys.executable, "-m", "benchmarks.gpu", *flags, "--row", device, dtype]
                found.append({"row": section, **child(section, command, budget.left(0.25))})
                check_log_probs(found[-1], dtype)
    rows = [
        [
            row["row"].removeprefix("trainer, "),
            f"{row['loss']:+.5f}",
            f"{row['gradient']:.4f}",
            f"{row['difference_max']:.1e}",
            f"{row['difference_mean']:.1e}",
            f"{row['seconds']:.3f}",
            f"{row['ids'] / row['seconds']:,.0f}",
            f"{row['memory_mb']:,.0f}",
        ]
        for row in found
        if "loss" in row
    ]
    columns = ["", "loss", "gradient", "log-prob diff max", "mean", "seconds", "ids/s", "peak MB"]
    if rows:
        print_table(f"A step of the trainer, {options.model}, {options.rollouts} rollouts", columns, rows)
    return found


def check_log_probs(row: dict[str, Any], dtype: str) -> None:
    difference = row.get("difference_max", 0.0)
    if not difference <= BOUNDS[dtype]:  # also NaN
        row["failed"] = f"log-probs differ by {difference:.2g}, the bound is {BOUNDS[dtype]:g}"
        console.print(f"{row['row']}: {row['failed']}", highlight=False)


def child(section: str, command: list[str], seconds: float) -> dict[str, Any]:
    """The last line that a process of its own prints, as JSON; else why it is not there."""
    if seconds <= 0:
        return not_run(section, "out of time")
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return not_run(section, f"it took longer than {seconds:.0f} s")
    if done.returncode == 0:
        return json.loads(done.stdout.strip().splitlines()[-1])
    reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if "no instructions for" in reason:
        return not_run(section, reason)
    return not_run(section, reason) | {"failed": reason}


def trainer_row(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """The figures of one device and dtype; the first one writes the log-probs that the batch of all rows has."""
    import resource

    import numpy as np
    import torch
    from transformers import AutoConfig

    from agl_slime.train.local import LocalTrainer, LocalTrainerSettings
    from benchmarks.trainer import make_batch

    device, dtype = options.row
    batch_options = argparse.Namespace(case="uneven", rollouts=options.rollouts)
    samples = make_batch(batch_options, AutoConfig.from_pretrained(model).vocab_size)
    settings: dict[str, Any] = {"device": device, "compute_dtype": dtype, "n_minibatches": 1, "lr": 1e-6}

    def new_trainer() -> LocalTrainer:
        return LocalTrainer(model_path=model, settings=LocalTrainerSettings(**settings))

    def first_log_probs(of: LocalTrainer) -> np.ndarray:
        assert of.scores is not None
        return np.concatenate([np.asarray(one, dtype=np.float64) for one in of.scores.log_probs])

    reference = options.directory / "log_probs.npy"
    if not reference.exists():
        scoring = new_trainer()
        scoring.train(samples, iteration=0)
        np.save(reference, first_log_probs(scoring))
        del scoring
    expected = np.load(reference)
    noisy = expected + np.random.default_rng(0).normal(0.0, NOISE, len(expected))
    ends = np.cumsum([sample.response_length for sample in samples])
    for sample, end in zip(samples, ends, strict=True):
        sample.rollout_log_probs = noisy[end - sample.response_length : end].tolist()
    running, metrics, seconds = new_trainer(), {}, []
    for step in range(STEPS):
        began = time.perf_counter()
        measured = running.train(samples, iteration=step)  # ends with numbers on the CPU: it has waited for the device
        seconds.append(time.perf_counter() - began)
        if step == 0:
            metrics, difference = measured, np.abs(first_log_probs(running) - expected)
    cuda = device.startswith("cuda")
    return {
        "loss": metrics["train/loss"],
        "gradient": metrics["train/grad_norm"],
        "difference_max": float(difference.max()),
        "difference_mean": float(difference.mean()),
        "seconds": median(seconds[1:]),
        "ids": sum(len(sample.tokens) - 1 for sample in samples),
        "memory_mb": torch.cuda.max_memory_allocated(device) / 2**20
        if cuda
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }


# -- the engine and the gateway --------------------------------------------------------------------------------------


def calls(options: argparse.Namespace, model: Path, budget: Budget, missing: str | None) -> list[dict[str, Any]]:
    engines = [("embedded engine on the CPU", [])]
    found = [not_run("calls, embedded engine on cuda", "the embedded engine computes on the CPU only")]
    if options.sglang_url:
        engines.append(("SGLang", ["--sglang-url", options.sglang_url, "--model-path", str(model)]))
    else:
        found.append(not_run("calls, SGLang", "give --sglang-url"))
    rows = []
    for name, flags in engines:
        section = f"calls, {name}"
        command = [sys.executable, "-m", "benchmarks.gateway", "--case", "calls", "--quick", *flags]
        row: dict[str, Any] = {"row": section, **child(section, command, budget.left(0.25))}
        found.append(row)
        for where in ("engine", "gateway"):
            if f"{where} 1" in row:
                figures = [f"{row[f'{where} {at_once}'][p]:.1f}" for at_once in (1, 32) for p in ("p50", "p99")]
                rows.append([name if where == "engine" else "  through the gateway", *figures])
    if rows:
        print_table("A call of 8 tokens, ms", ["", "one: p50", "p99", "32 at once: p50", "p99"], rows)
    return found


# -- the loop --------------------------------------------------------------------------------------------------------


def loop(options: argparse.Namespace, model: Path, budget: Budget, missing: str | None) -> list[dict[str, Any]]:
    flags, iterations = LOOPS.get(options.model, LOOPS["smollm2"])
    iterations = options.iterations or iterations
    devices = list(dict.fromkeys((options.device, "cpu")))  # the card first: the CPU may run out of time
    found, rows = [], []
    for number, device in enumerate(devices):
        section = f"loop, trainer on {device}"
        if device != "cpu" and missing:
            found.append(not_run(section, missing))
            continue
        seconds = budget.left() / (len(devices) - number)
        found.append({"row": section, **run_loop(section, options, model, [*flags], iterations, device, seconds)})
        if (row := found[-1]).get("rewards"):
            figures = (f"{row[name]:.2f}" for name in ("start", "end", "iteration_s", "train_s"))
            rows.append([section, str(len(row["rewards"])), *figures, f"{row['difference_max']:.1e}"])
            curve = " ".join(f"{reward:.2f}" for reward in row["rewards"])
            console.print(f"{section}: reward {curve}", highlight=False)
    columns = ["", "iterations", "reward: first", "last", "s per iteration", "of them training", "log-prob diff max"]
    if rows:
        print_table(f"train.py, {options.model}", columns, rows)
    return found


def run_loop(
    section: str,
    options: argparse.Namespace,
    model: Path,
    flags: list[str],
    iterations: int,
    device: str,
    seconds: float,
) -> dict[str, Any]:
    """``train.py`` for at most ``seconds``; the iterations that it has finished count."""
    from agl_slime.report import read_metrics

    if seconds <= 0:
        return not_run(section, "out of time")
    with tempfile.TemporaryDirectory() as directory:
        flags += ["--model-path", str(model), "--output-dir", directory, "--num-iterations", str(iterations)]
        flags += ["--eval-interval", "0", "--view", "lines", "--local.device", device]
        flags += ["--sglang-url", options.sglang_url] if options.sglang_url else []
        command = [sys.executable, "train.py", *flags]
        process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=seconds)
            failed = process.returncode != 0
        except subprocess.TimeoutExpired:
            process.terminate()
            _, errors = process.communicate()
            failed = False
        path = Path(directory) / "metrics.jsonl"
        lines = read_metrics(path) if path.exists() else []
    if failed:
        reason = (errors.strip().splitlines() or ["no output"])[-1]
        return not_run(section, reason) | {"failed": reason}
    if not lines:
        return not_run(section, f"no iteration in {seconds:.0f} s")
    rewards = [line["rollout/reward_mean"] for line in lines]
    return {
        "rewards": rewards,
        "start": rewards[0],
        "end": rewards[-1],
        "iteration_s": fmean(line["perf/iteration_s"] for line in lines),
        "train_s": fmean(line["perf/train_s"] for line in lines),
        "difference_max": max(line["train/logprob_diff_max"] for line in lines),
    }


if __name__ == "__main__":
    sys.exit(main())
