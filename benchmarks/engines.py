"""Engines for a real model on a CPU: tokens per second with 1, 16 and 64 requests in flight, memory, start-up.

    python -m benchmarks.engines --model DIR [--sglang-python PYTHON] [--cases embedded bare …]

The prompts are 60 tokens long and shared by groups of 8; every answer has 64 tokens (``--new-tokens``), sampled at
temperature 1 with its log-probs. Each case is a process of its own with all cores; on a machine that is busy with other
things, ``--threads 1 --cpu-time`` counts CPU time instead.

- ``embedded``: the embedded engine, over HTTP, and ``embedded-one``: the same without shared prefixes.
- ``bare``: a loop over transformers' forward with its dynamic cache and sampling, all rows at once: plain torch, the
  limit for the others. ``bare-static`` has its static cache.
- ``generate``: transformers' own ``generate``; it reports no log-probs.
- ``sglang``: a real SGLang with the Python that ``--sglang-python`` names (scripts/sglang_cpu.sh), over HTTP.

For the engines also: the number of 8 greedy answers that equal ``generate``'s, and the largest difference between their
log-probs and a full forward pass's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import REPO, cpu_seconds, print_table

PROMPT_TOKENS, GROUP = 60, 8
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 7 plus 5?",
    "Say hello in Spanish.",
    "Which animal says moo?",
    "Explain what rain is in one sentence.",
    "Count from one to five.",
]
CASES = ("embedded", "embedded-one", "bare", "bare-static", "generate", "sglang")
Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description="Engines for a real model on a CPU.")
    parser.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--sglang-python", help="the Python of an environment with SGLang; without it, no such row")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[case for case in CASES if case != "bare-static"])
    parser.add_argument("--in-flight", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--cpu-time", action="store_true", help="tokens per second of CPU time: for a busy machine")
    parser.add_argument("--repeats", type=int, default=2, help="the best of these counts")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the engine that it started ends with it
        print(json.dumps(run_case(options.case, options)))
        return 0
    results: dict[str, Result] = {}
    for case in options.cases:
        if case == "sglang" and not options.sglang_python:
            continue
        print(f"{case} …", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "benchmarks.engines", *sys.argv[1:], "--case", case]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPO).stdout
        results[case] = json.loads(output.splitlines()[-1])
        print(results[case], file=sys.stderr, flush=True)
    show(results, options)
    return 0


def show(results: dict[str, Result], options: argparse.Namespace) -> None:
    limit = results.get("bare", {}).get("rates", {})
    rows = []
    for case, result in results.items():
        cells = []
        for n in map(str, options.in_flight):
            rate = result["rates"][n]
            cells.append(f"{rate:.0f}" + (f" ({rate / limit[n]:.2f})" if limit else ""))
        exact = f"{result['equal']} of 8" if "equal" in result else "–"
        difference = f"{result['difference']:.1e}" if "difference" in result else "–"
        rows.append([case, *cells, f"{result['peak'] / 2**30:.2f}", f"{result['start_s']:.1f}", exact, difference])
    print_table(
        f"{Path(options.model).name}, {options.threads} torch threads, {options.new_tokens} new tokens: "
        f"tokens per second{' of CPU time' * options.cpu_time} (and as a share of the bare loop's)",
        [
            "engine",
            *(f"{n} in flight" for n in options.in_flight),
            "peak GiB",
            "start s",
            "greedy equal",
            "log-probs differ",
        ],
        rows,
    )


def run_case(case: str, options: argparse.Namespace) -> Result:
    began = time.monotonic()
    if case in ("embedded", "embedded-one", "sglang"):
        with serving(case, options) as (url, pid):
            start_s = time.monotonic() - began
            result = asyncio.run(over_http(url, family(pid), options))
            result |= {"start_s": start_s, "peak": sum(map(peak_bytes, family(pid)))}
        return result | compared(result.pop("greedy"), options)
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model).eval().float()
    start_s = time.monotonic() - began
    loop: Callable[..., Any] = generate if case == "generate" else bare
    rates = {}
    with torch.inference_mode():
        loop(model, torch.tensor(prompts(1)), 4, static=case == "bare-static")
        for n in options.in_flight:
            ids = torch.tensor(prompts(n))
            run = partial(loop, model, ids, options.new_tokens, static=case == "bare-static")
            rates[n] = best(run, n, options)
    return {"rates": rates, "start_s": start_s, "peak": peak_bytes(os.getpid())}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Random ids, the same for each group of 8."""
    rng = random.Random(seed * 1000 + count)
    groups = [[rng.randrange(100, 400) for _ in range(PROMPT_TOKENS)] for _ in range(-(-count // GROUP))]
    return [groups[number // GROUP] for number in range(count)]


def best(run: Callable[[], object], n: int, options: argparse.Namespace) -> float:
    rates = []
    for _ in range(options.repeats):
        began = clock([os.getpid()], options)
        run()
        rates.append(n * options.new_tokens / (clock([os.getpid()], options) - began))
    return max(rates)


def clock(pids: list[int], options: argparse.Namespace) -> float:
    return sum(map(cpu_seconds, pids)) if options.cpu_time else time.monotonic()


# -- in this process -------------------------------------------------------------------------------------------------


def bare(model: Any, ids: Any, count: int, *, static: bool) -> None:
    import torch
    from transformers import DynamicCache, StaticCache

    cache: Any = DynamicCache(config=model.config)
    if static:
        cache = StaticCache(config=model.config, max_cache_len=PROMPT_TOKENS + count)
    taken = []
    for _ in range(count):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        log_probs = torch.log_softmax(logits.float(), dim=-1)
        ids = torch.multinomial(log_probs.exp(), 1)
        taken.append((ids.tolist(), log_probs.gather(1, ids).tolist()))


def generate(model: Any, ids: Any, count: int, *, static: bool) -> None:
    import torch

    length = {"min_new_tokens": count, "max_new_tokens": count}
    model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, **length)


# -- over HTTP -------------------------------------------------------------------------------------------------------


async def over_http(url: str, pids: list[int], options: argparse.Namespace) -> Result:
    import aiohttp

    chats = questions(
        options.model
    )  # before a connection is open: loading blocks this loop, and servers close idle ones
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:

        async def ask(ids: list[int], count: int, temperature: float = 1.0) -> Any:
            sampling = {"temperature": temperature, "max_new_tokens": count, "ignore_eos": True}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
            async with session.post("/generate", json=body) as answer:
                answer.raise_for_status()
                return await answer.json()

        await ask(prompts(1)[0], 4)
        rates = {}
        for n in options.in_flight:
            seen = []
            for repeat in range(options.repeats):
                async with session.post("/flush_cache"):
                    pass
                began = clock(pids, options)
                answers = await asyncio.gather(*(ask(ids, options.new_tokens) for ids in prompts(n, repeat)))
                seen.append(sum(len(answer["output_ids"]) for answer in answers) / (clock(pids, options) - began))
            rates[n] = max(seen)
        asked = await asyncio.gather(*(ask(ids, 16, 0.0) for ids in chats))
    greedy = [[pair[:2] for pair in answer["meta_info"]["output_token_logprobs"]] for answer in asked]
    return {"rates": rates, "greedy": greedy}


def questions(model: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]


def compared(greedy: list[list[tuple[float, int]]], options: argparse.Namespace) -> Result:
    """Greedy answers beside ``generate``'s, and their log-probs beside a full forward pass's."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model).eval().float()
    equal, difference = 0, 0.0
    with torch.inference_mode():
        for prompt, answer in zip(questions(options.model), greedy, strict=True):
            ids = [int(token) for _, token in answer]
            given = torch.tensor([prompt])  # an answer of generate's ends at the model's end token, the engine's go on
            mask = torch.ones_like(given)
            alone = model.generate(given, attention_mask=mask, do_sample=False, max_new_tokens=len(ids))[0].tolist()
            equal += alone[len(prompt) :] == ids[: len(alone) - len(prompt)]
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
            expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
            difference = max(difference, float((expected - torch.tensor([p for p, _ in answer])).abs().max()))
    return {"equal": equal, "difference": difference}


@contextmanager
def serving(case: str, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """The URL of the engine and the id of its process."""
    if case != "sglang":
        from agl_slime.engine import EmbeddedEngine

        flags: dict[str, Any] = {"torch_threads": options.threads}
        if case == "embedded-one":
            flags["prefix_cache"] = 0
        with EmbeddedEngine(options.model, **flags) as engine:
            assert engine.pid is not None
            yield engine.url, engine.pid
        return
    from agl_slime.engine.sglang_process import SGLangProcess

    os.environ["AGL_SLIME_SGLANG_THREADS"] = str(options.threads)
    with SGLangProcess(options.model, python=options.sglang_python) as engine:
        assert engine.pid is not None
        yield engine.url, engine.pid


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    raise SystemExit(main())
