"""Rollouts of an engine in this process with known weights, and their autopsy."""

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
import transformers

from agl_slime.engine.engine import Engine
from agl_slime.engine.requests import Request, Sampling
from agl_slime.tools.forensics.counterfactual import Conditions, Counterfactuals
from agl_slime.tools.forensics.gaps import Diagnosis, KeptSample, explain
from agl_slime.types import Sample, sample_from_fields

NEW, OLD, BASE = "v000003", "v000002", "base"


def cause(diagnosis: Diagnosis) -> str:
    """The name of the first cause."""
    assert diagnosis.first is not None, diagnosis
    return diagnosis.first.cause


def is_clean(diagnosis: Diagnosis) -> bool:
    return not diagnosis.causes and diagnosis.first is None and diagnosis.gap < 1e-4


def noisy(source: Path, target: Path, *, seed: int, share: float) -> Path:
    """A copy of a checkpoint with noise on its weights."""
    shutil.copytree(source, target)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += share * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(target)
    return target


def run_engine(model: Any, tokenizer: Any, prompts: Sequence[Any], **sampling: Any) -> list[Request]:
    """The requests after an engine of this process has served them."""
    engine = Engine(copy.deepcopy(model), tokenizer, seed=1)
    try:
        return serve(engine, prompts, **sampling)
    finally:
        engine.close()


def serve(engine: Engine, prompts: Sequence[Any], *, start: Any = -1, **sampling: Any) -> list[Request]:
    """``start`` is the first prompt token with a log-prob, a number or one for each request."""
    starts = start if isinstance(start, list) else [start] * len(prompts)
    answers: list[Future[Request]] = [Future() for _ in prompts]
    for number, (prompt, first) in enumerate(zip(prompts, starts, strict=True)):
        request = Request(
            rid=str(number),
            input_ids=[int(i) for i in prompt],
            sampling=Sampling.model_validate(sampling),
            return_logprob=True,
            logprob_start_len=first,
            experts_start=0 if engine.returns_routed_experts else None,
            on_finish=answers[number].set_result,
        )
        engine.submit(request)
    return [answer.result(60) for answer in answers]


def prompt_log_probs(request: Request) -> np.ndarray:
    return np.array([np.nan if value is None else value for value, _ in request.input_log_probs])


@dataclass
class Bench:
    """Weights of three versions, and rollouts of two turns that the newest sampled."""

    directory: Path
    tokenizer: Any
    samples: list[KeptSample]

    def model(self, version: str = NEW) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.directory / version).eval()

    def sampled(self) -> list[np.ndarray]:
        return [sample.sampler for sample in self.samples]

    def scored(self, edit: Callable[[np.ndarray], np.ndarray] = np.copy, *, model: Any = None) -> list[np.ndarray]:
        """The log-probs of an engine that gets edited ids; a token that was edited away keeps its log-prob."""
        edited = [edit(sample.ids) for sample in self.samples]
        requests = run_engine(model or self.model(), self.tokenizer, edited, start=0, max_new_tokens=0)
        scores = []
        for sample, ids, request in zip(self.samples, edited, requests, strict=True):
            log_probs, values = prompt_log_probs(request), sample.sampler.copy()
            matcher = SequenceMatcher(None, sample.ids.tolist(), ids.tolist(), autojunk=False)
            for a, b, size in matcher.get_matching_blocks():
                inside = (sample.places >= a) & (sample.places < a + size)
                values[inside] = log_probs[sample.places[inside] - a + b]
            scores.append(values.astype(np.float32))
        return scores

    def diagnosis(self, recorded: list[np.ndarray], **conditions: Any) -> Diagnosis:
        candidates = Conditions(**{"other_weights": {"the weights of version 2": self.directory / OLD}, **conditions})
        passes = Counterfactuals(self.directory / NEW, self.samples, conditions=candidates, tokenizer=self.tokenizer)
        return explain(self.samples, recorded, passes.expected, passes.faults(recorded))


def sample_rollouts(model: Any, tokenizer: Any, **sampling: Any) -> list[KeptSample]:
    """Two turns each, with a user's message between them."""
    chats = [
        [
            {"role": "system", "content": "Call lookup in a <tool_call> block."},
            {"role": "user", "content": f'What is stored under "{key}"?'},
        ]
        for key in ("vm", "ab", "qz", "kk")
    ]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    message = "\n<|im_start|>user\n42<|im_end|>\n<|im_start|>assistant\n"
    between = [tokenizer.eos_token_id, *tokenizer.encode(message, add_special_tokens=False)]
    limits = {"temperature": 1.0, "max_new_tokens": 12, **sampling}
    first = run_engine(model, tokenizer, prompts, **limits)
    second = run_engine(model, tokenizer, [[*a.input_ids, *a.output_ids, *between] for a in first], **limits)
    samples = []
    for number, (chat, *turns) in enumerate(zip(chats, first, second, strict=True)):
        ids = np.array([*turns[1].input_ids, *turns[1].output_ids])
        places = [range(len(turn.input_ids), len(turn.input_ids) + len(turn.output_ids)) for turn in turns]
        log_probs = [value for turn in turns for value in turn.log_probs]
        sample = KeptSample(
            rollout_id=f"r{number}",
            version="3",
            ids=ids,
            prompt_length=len(turns[0].input_ids),
            places=np.concatenate(places),
            sampler=np.array(log_probs, dtype=np.float32),
            trainer=np.zeros(len(log_probs), dtype=np.float32),
            messages=[*chat, {"role": "assistant", "content": tokenizer.decode(turns[0].output_ids)}],
            experts=None if turns[1].experts is None else turns[1].experts[: len(ids) - 1],
        )
        samples.append(sample)
    return samples


def on_response(sample: KeptSample, values: np.ndarray) -> list[float]:
    """Values of the trained tokens, with zeros for the rest of the response."""
    every = np.zeros(len(sample.ids))
    every[sample.places] = values
    return every[sample.prompt_length :].tolist()


def slime_sample(sample: KeptSample, version: str = "3") -> Sample:
    mask = np.isin(np.arange(sample.prompt_length, len(sample.ids)), sample.places).astype(int)
    experts = sample.experts
    return sample_from_fields(
        index=int(sample.rollout_id[1:]),
        group_index=0,
        prompt=[*sample.messages[:2]],
        tokens=sample.ids.tolist(),
        response_length=len(mask),
        loss_mask=mask.tolist(),
        rollout_log_probs=on_response(sample, sample.sampler),
        rollout_routed_experts=None if experts is None else torch.from_numpy(experts.astype(np.int32)),
        weight_versions=[version, version],
        status=Sample.Status.COMPLETED,
        reward=1.0,
        metadata={"weight_spans": [[version, 0, len(mask)]]},
    )


def bench_of(old: Path, policy_dir: Path) -> Bench:
    """A bench of later weights than ``old``, which stands in the bench's directory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(noisy(old, old.with_name(NEW), seed=3, share=0.1)).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy_dir)
    return Bench(old.parent, tokenizer, sample_rollouts(model, tokenizer))
