"""The local trainer's step against a bare torch loop: tokens per second and peak memory.

    python benchmarks/trainer.py --model-path MODEL --variant=--checkpointing --variant="--lora-rank 16"
    python benchmarks/trainer.py --model-path MODEL --before CHECKOUT      # beside another version of the package

The *bare loop* is the limit: the same model and number of ids in rows of the mean length (no padding, no separation),
hidden states picked at as many positions as are trained, plain cross-entropy on them, backward, clipping, AdamW. Each
takes one optimizer step on the batch, in as many microbatches. Every row of the table is a separate process; they take
turns, step by step, and the median is printed, on a CPU in CPU seconds, which other programs change little. *peak* is
the largest resident memory of the process (on CUDA torch's allocations), *loaded* the memory before the first step.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

CASES = {  # prompt and response lengths, from and to
    "short": ((16, 64), (4, 64)),
    "even": ((96, 96), (64, 64)),
    "uneven": ((16, 192), (4, 192)),
    "long prompts": ((400, 400), (8, 48)),
}


def make_batch(options: argparse.Namespace, vocabulary: int) -> list[Any]:
    """Groups of 8 rollouts of random tokens with a prompt in common, made-up log-probs and rewards."""
    from agl_slime.types import sample_from_fields

    rng, samples = np.random.default_rng(0), []
    prompts, responses = CASES[options.case]
    for group in range(options.rollouts // 8):
        prompt = rng.integers(0, vocabulary, rng.integers(*prompts, endpoint=True)).tolist()
        for _ in range(8):
            response = rng.integers(0, vocabulary, rng.integers(*responses, endpoint=True)).tolist()
            given = {"loss_mask": [1] * len(response), "rollout_log_probs": [-10.0] * len(response)}
            given |= {"reward": float(rng.random()), "group_index": group, "rollout_id": len(samples)}
            samples.append(sample_from_fields(tokens=prompt + response, response_length=len(response), **given))
    return samples


def trainer_step(options: argparse.Namespace, samples: list[Any]) -> Any:
    from agl_slime.train.local import LocalTrainer, LocalTrainerSettings

    wanted = {"max_tokens_per_microbatch": options.microbatch, "device": options.device, "n_minibatches": 1, "lr": 1e-6}
    wanted |= {"lora_rank": options.lora_rank, "gradient_checkpointing": options.checkpointing}
    wanted |= {"compute_dtype": options.dtype}
    known = {field.name for field in fields(LocalTrainerSettings)}  # of an older version there are fewer
    settings = LocalTrainerSettings(**{name: value for name, value in wanted.items() if name in known})
    trainer = LocalTrainer(model_path=options.model_path, settings=settings, torch_threads=options.threads)
    return lambda: trainer.train(samples, iteration=0)


def bare_step(options: argparse.Namespace, samples: list[Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model_path, dtype=torch.float32).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    lengths = [len(sample.tokens) - 1 for sample in samples]
    trained = sum(sample.response_length for sample in samples)
    n_micro = -(-sum(lengths) // options.microbatch)
    width = round(sum(lengths) / len(lengths))
    rows = np.array_split(np.arange(round(sum(lengths) / width)), n_micro)
    generator = torch.Generator().manual_seed(0)
    work = []
    for some in rows:
        ids = torch.randint(0, model.config.vocab_size, (len(some), width), generator=generator).to(options.device)
        picked = torch.randperm(ids.numel(), generator=generator)[: round(trained * len(some) / sum(map(len, rows)))]
        work.append((ids, picked.to(options.device), ids.flatten()[picked.to(options.device)]))
    bfloat16 = options.dtype == "bfloat16" or (options.dtype == "auto" and options.device.startswith("cuda"))

    def step() -> None:
        for ids, picked, targets in work:
            with torch.autocast(options.device.partition(":")[0], dtype=torch.bfloat16, enabled=bfloat16):
                hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)[picked]
                logits = model.lm_head(hidden)
            (torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum") / trained).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(options: argparse.Namespace) -> None:
    """In a process of its own: one line of JSON."""
    # torch imports the standard library's profile, and not the one beside this file
    sys.path.remove(str(Path(__file__).resolve().parent))
    import torch
    from transformers import AutoConfig

    torch.set_num_threads(options.threads)
    samples = make_batch(options, AutoConfig.from_pretrained(options.model_path).vocab_size)
    step = {"bare": bare_step, "trainer": trainer_step}[options.only](options, samples)
    cuda = options.device.startswith("cuda")

    def memory() -> float:
        if cuda:
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    ids = sum(len(sample.tokens) - 1 for sample in samples)
    trained = sum(sample.response_length for sample in samples)
    print(json.dumps({"ids": ids, "trained": trained, "loaded": memory()}), flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        if cuda:
            torch.cuda.synchronize()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(json.dumps({"wall": wall, "cpu": cpu, "peak": memory()}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--case", choices=CASES, default="uneven")
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--microbatch", type=int, default=4096)

    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1, help="measured, after one that is not; 0 takes that one")
    parser.add_argument("--variant", action="append", default=[], help="flags of a further row, as --checkpointing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--lora-rank", type=int, default=0)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--only", choices=("bare", "trainer"))
    parser.add_argument("--before", help="a checkout of an older version, measured in turn")
    options = parser.parse_args()
    if options.only:
        measure(options)
        return 0
    variants = {"bare": ("bare", None, []), "before": ("trainer", options.before, []), "trainer": ("trainer", None, [])}
    variants |= {flags: ("trainer", None, flags.split()) for flags in options.variant}
    if not options.before:
        del variants["before"]
    running, about, found = {}, {}, {name: [] for name in variants}
    try:
        for name, (only, path, flags) in variants.items():
            environment = dict(os.environ) | ({"PYTHONPATH": path} if path else {})
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], *flags, "--only", only]
            pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            running[name] = subprocess.Popen(command, env=environment, **pipes)
            about[name] = json.loads(running[name].stdout.readline())
        for number in range(options.rounds + 1):
            for name, process in running.items():
                process.stdin.write("\n")
                done = json.loads(process.stdout.readline())
                took = f"{done['wall']:.2f} s, {done['cpu']:.2f} s of CPU, peak {done['peak']:.0f} MB"
                print(f"  round {number}, {name}: {took}", flush=True)
                found[name].append(done)
    finally:
        for process in running.values():
            process.kill()
    work, clock = about["bare"], "wall" if options.device.startswith("cuda") else "cpu"
    where = f"{options.threads} threads, {options.device}, load {os.getloadavg()[0]:.1f}"
    print(f"{options.case}: {work['ids']} ids, {work['trained']} trained; {where}; seconds of {clock}")
    seconds = {name: median(run[clock] for run in runs[1:] or runs) for name, runs in found.items()}
    for name, runs in found.items():
        speed = f"{work['ids'] / seconds[name]:8.0f} tokens/s {seconds['bare'] / seconds[name]:5.0%} of the bare loop"
        memory = f"peak {runs[-1]['peak']:6.0f} MB, {about[name]['loaded']:.0f} loaded"
        print(f"{name:24} {seconds[name]:7.2f} s {speed}  {memory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
