"""Rollouts of an engine in this process with known weights, and their autopsy."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl_slime.engine.engine import Engine
from agl_slime.engine.requests import Request, Sampling
from agl_slime.report.autopsy import Candidate, Diagnosis, KeptSample, explain
from agl_slime.train.local.counterfactual import Conditions, Counterfactuals
from tests.harness.moe_policy import save_moe

NOW, BEFORE, BASE = "v000003", "v000002", "base"
OTHERS = "the weights of version 2"


def noisy(source: Path, target: Path, *, seed: int, share: float) -> Path:
    """A copy of a checkpoint with noise on its weights."""
    shutil.copytree(source, target)
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += share * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(target)
    return target


def run_engine(model: Any, tokenizer: Any, prompts: Sequence[Any], *, start: Any, **sampling: Any) -> Any:
    """The requests after an engine of this process has served them; ``start`` is a number, or one for each."""
    engine = Engine(copy.deepcopy(model), tokenizer, seed=1)
    try:
        return serve(engine, prompts, start=start, **sampling)
    finally:
        engine.close()


def serve(engine: Engine, prompts: Sequence[Any], *, start: Any = -1, **sampling: Any) -> list[Request]:
    starts = start if isinstance(start, list) else [start] * len(prompts)
    done: list[Future[Request]] = [Future() for _ in prompts]
    engine.submit(
        *(
            Request(
                rid=str(number),
                input_ids=[int(i) for i in prompt],
                sampling=Sampling.model_validate(sampling),
                return_logprob=True,
                logprob_start_len=first,
                experts_start=0 if engine.returns_routed_experts else None,
                on_finish=done[number].set_result,
            )
            for number, (prompt, first) in enumerate(zip(prompts, starts, strict=True))
        )
    )
    return [one.result(60) for one in done]


@dataclass
class Bench:
    """Weights of three versions, and rollouts of two turns that the newest sampled."""

    directory: Path
    tokenizer: Any
    samples: list[KeptSample]

    def model(self, version: str = NOW) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.directory / version).eval()

    def scored(self, edit: Callable[[np.ndarray], np.ndarray] | None = None, *, model: Any = None) -> list[np.ndarray]:
        """The log-probs of an engine that was asked with edited ids; a recorded token that was edited away keeps
        its own."""
        edit = edit or (lambda ids: ids)
        edited = [edit(one.ids) for one in self.samples]
        requests = run_engine(model or self.model(), self.tokenizer, edited, start=0, max_new_tokens=0)
        scores = []
        for one, ids, request in zip(self.samples, edited, requests, strict=True):
            every = np.array([np.nan if value is None else value for value, _ in request.input_log_probs])
            values = one.sampler.copy()
            for a, b, size in SequenceMatcher(
                None, one.ids.tolist(), ids.tolist(), autojunk=False
            ).get_matching_blocks():
                at = (one.places >= a) & (one.places < a + size)
                values[at] = every[one.places[at] - a + b]
            scores.append(values.astype(np.float32))
        return scores

    def diagnosis(self, recorded: list[np.ndarray], **conditions: Any) -> Diagnosis:
        others = {OTHERS: self.directory / BEFORE}
        given = Conditions(**{"others": others, **conditions})
        what = Counterfactuals(self.directory / NOW, self.samples, conditions=given, tokenizer=self.tokenizer)
        return explain(self.samples, recorded, what.expected, (Candidate(*fault) for fault in what.faults(recorded)))


def sample_rollouts(model: Any, tokenizer: Any, **sampling: Any) -> list[KeptSample]:
    """Two turns each, with a message of another between them."""
    asked = [
        [
            {"role": "system", "content": "Call lookup in a <tool_call> block."},
            {"role": "user", "content": f'What is stored under "{key}"?'},
        ]
        for key in ("vm", "ab", "qz", "kk")
    ]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in asked]
    told = "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
    between = tokenizer.encode(told, add_special_tokens=False)
    limits = {"temperature": 1.0, "max_new_tokens": 12, **sampling}
    first = run_engine(model, tokenizer, prompts, start=-1, **limits)
    middles = [[*one.input_ids, *one.output_ids, tokenizer.eos_token_id, *between] for one in first]
    second = run_engine(model, tokenizer, middles, start=-1, **limits)
    return [
        KeptSample(
            rollout_id=f"r{number}",
            iteration=4,
            version="3",
            ids=np.array([*two.input_ids, *two.output_ids]),
            prompt_length=len(one.input_ids),
            places=np.r_[
                len(one.input_ids) : len(one.input_ids) + len(one.output_ids),
                len(two.input_ids) : len(two.input_ids) + len(two.output_ids),
            ],
            sampler=np.array([*one.log_probs, *two.log_probs], dtype=np.float32),
            trainer=np.zeros(len(one.output_ids) + len(two.output_ids), dtype=np.float32),
            messages=[*messages, {"role": "assistant", "content": tokenizer.decode(one.output_ids)}],
            experts=None if two.experts is None else two.experts[: len(two.input_ids) + len(two.output_ids) - 1],
        )
        for number, (messages, one, two) in enumerate(zip(asked, first, second, strict=True))
    ]


def dense_bench(policy_dir: Path, directory: Path) -> Bench:
    shutil.copytree(policy_dir, directory / BASE)
    noisy(policy_dir, directory / BEFORE, seed=2, share=0.2)
    noisy(directory / BEFORE, directory / NOW, seed=3, share=0.1)
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    model = AutoModelForCausalLM.from_pretrained(directory / NOW).eval()
    return Bench(directory, tokenizer, sample_rollouts(model, tokenizer))


def routed_bench(policy_dir: Path, directory: Path) -> Bench:
    """Of a mixture of experts, with the experts that its engine used."""
    save_moe(directory / BEFORE)
    noisy(directory / BEFORE, directory / NOW, seed=3, share=0.1)
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    model = AutoModelForCausalLM.from_pretrained(directory / NOW).eval()
    return Bench(directory, tokenizer, sample_rollouts(model, tokenizer))
