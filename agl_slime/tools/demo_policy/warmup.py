"""Making the tiny policy: supervised warm-up on demonstrations, in two phases.

1. Clean demonstrations until a teacher-forced probe on unseen ones is passed. The number of steps differs from seed to
   seed, so the criterion decides, never a count.
2. Imperfect demonstrations for a fixed number of steps. They blur the format, so that reinforcement starts from a
   low reward that is not zero.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from agl_slime.cli.demo import Demonstration, DemonstrationSource
from agl_slime.errors import ConfigError, TrainerError
from agl_slime.support.files import whole_directory
from agl_slime.tools.demo_policy.tokenizer import DEFAULT_SOURCES, make_tokenizer

SPEC_FILE = "agl_slime_policy.json"
"""A file beside the checkpoint: the hash of its inputs, the machine, and the warm-up's report."""

_REPORT_EVERY = 25  # steps between lines of progress
_LR_WARMUP_STEPS, _GRAD_CLIP, _IMPERFECT_LEARNING_RATE = 10, 0.3, 1e-3
_FORMAT = 2  # raise when the code changes the result of a spec

# Two layers and hidden 64 are the smallest shape that learned to copy (one layer, or hidden 48, did not).
# initializer_range is four times the usual one: at 0.02 the copying had not formed after 400 steps. A low rope_theta
# suits the short contexts here and speeds it up; it is a field in transformers 4 and a converted keyword in 5.
_SHAPE: dict[str, Any] = {
    "vocab_size": 460,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.08,
    "rope_theta": 1000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
}


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """How the model is warmed up. Steps are optimiser steps of ``batch_size`` conversations."""

    batch_size: int = 16
    learning_rate: float = 4e-3
    probe_size: int = 64
    """Conversations, drawn once and never trained on."""
    probe_every: int = 5
    target: float = 0.9
    """Share of the probe's assistant turns in which every token is the model's first choice; reached, phase 1 ends."""
    max_steps: int = 600
    """Phase 1 gives up here with an error; it is a bound, not a schedule."""
    decay_steps: int = 30
    """Steps over which the learning rate then falls to 0, still on clean ones: the share of sampled turns that are
    right rises from 0.6 to 0.9."""
    imperfect_steps: int = 60


def make_policy(
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    demonstrations: DemonstrationSource | None = None,
    settings: PolicySettings | None = None,
    progress: Callable[[str], object] = lambda line: None,
) -> Path:
    """Make the tiny policy in ``directory``, which appears complete or not at all, and return its path. ``progress``
    takes a line now and then.

    ``demonstrations`` are the training data of the warm-up, by default the lookup task. The same seed, demonstrations
    and settings give the same policy on one machine and library version. Raises ``ConfigError`` when the directory has
    other files, ``TrainerError`` when the warm-up does not pass its probe.
    """
    target = Path(directory).expanduser().resolve()
    source, settings = demonstrations or DEFAULT_SOURCES[0], settings or PolicySettings()
    if target.exists() and any(target.iterdir()) and not (target / SPEC_FILE).exists():
        raise ConfigError(f"the policy's directory {target} holds no tiny policy: name another directory")
    with whole_directory(target, durable=False) as fresh:
        report = {"spec": spec_of(seed, source, settings), "seed": seed}
        report |= train_policy(fresh, seed=seed, source=source, settings=settings, progress=progress)
        (fresh / SPEC_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return target


def spec_of(seed: int, source: DemonstrationSource, settings: PolicySettings) -> str:
    """A hash of all that a policy is made from; the conversations themselves stand for the source."""
    sample = [source.demonstrations(random.Random(1), 16, quality=quality) for quality in ("clean", "imperfect")]
    text = json.dumps([_FORMAT, seed, asdict(settings), sample], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def train_policy(
    directory: Path,
    *,
    seed: int,
    source: DemonstrationSource,
    settings: PolicySettings,
    progress: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:
    """Make the policy and write its checkpoint into ``directory``; returns the report of the warm-up, and the libraries
    that the weights depend on to the last bit."""
    tokenizer = make_tokenizer(source)
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = transformers.Qwen3Config(**_SHAPE, **ends)
    with torch.random.fork_rng(devices=[]), _on_one_thread():
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(config).float()
        report = warm_up(model, tokenizer, source, seed=seed, settings=settings, progress=progress)
        model.generation_config = transformers.GenerationConfig(**ends, do_sample=True, temperature=1.0)
        transformers.utils.logging.disable_progress_bar()
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # transformers 5 writes what transformers 4, in a server for example, does not read
    edit_json(directory / "config.json", rope_theta=_SHAPE["rope_theta"])
    edit_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    cpu = torch.backends.cpu.get_cpu_capability()
    made_with = f"torch {torch.__version__} {cpu}, transformers {transformers.__version__}"
    return {"warmup": report, "made_with": made_with}


def encode(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> tuple[list[int], list[int]]:
    """Token ids of a conversation and, for each token, the number (from 0) of the assistant turn that it belongs to, or
    -1 for context.

    An assistant turn is its content and the end token, which a model has to sample.
    """
    ids: list[int] = []
    turns: list[int] = []
    rendered = 0
    text = str(tokenizer.apply_chat_template(demonstration, tokenize=False))
    for index, message in enumerate(demonstration):
        if message["role"] != "assistant":
            continue
        prompt = str(tokenizer.apply_chat_template(demonstration[:index], tokenize=False, add_generation_prompt=True))
        context = tokenizer.encode(text[rendered : len(prompt)], add_special_tokens=False)
        answer = [*tokenizer.encode(str(message["content"]), add_special_tokens=False), int(tokenizer.eos_token_id)]  # type: ignore[arg-type]
        ids += context + answer
        turns += [-1] * len(context) + [max(turns, default=-1) + 1] * len(answer)
        rendered = len(prompt) + len(str(message["content"])) + len(str(tokenizer.eos_token))
    return ids, turns


def warm_up(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    source: DemonstrationSource,
    *,
    seed: int,
    settings: PolicySettings,
    progress: Callable[[str], object] = lambda line: None,
) -> dict[str, float]:
    """Train ``model`` in place; deterministic for a seed on one machine. Returns the steps of each phase and the
    probe's value when each ended. Raises ``TrainerError`` when the probe is not passed within ``max_steps``."""
    rng = random.Random(seed)
    probe = _batch(tokenizer, source.demonstrations(rng, settings.probe_size, quality="clean"))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0, fused=True)

    def step(quality: Any, learning_rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        batch = _batch(tokenizer, source.demonstrations(rng, settings.batch_size, quality=quality))
        loss = functional.cross_entropy(*_answer_logits(model, batch))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _GRAD_CLIP)
        optimizer.step()

    model.train()
    score, steps = 0.0, 0
    while score < settings.target:
        if steps >= settings.max_steps:
            raise TrainerError(
                f"the warm-up's probe is at {score:.2f} after {steps} steps and the target is {settings.target}: "
                "try another seed or simpler demonstrations"
            )
        step("clean", settings.learning_rate * min(1.0, (steps + 1) / _LR_WARMUP_STEPS))
        steps += 1
        if steps % settings.probe_every == 0:
            score = _probe(model, probe)
            if steps % _REPORT_EVERY == 0:
                progress(f"step {steps}: {score:.0%} of new answers are right (goal {settings.target:.0%})")
    for n in range(settings.decay_steps):
        step("clean", settings.learning_rate * (1 - (n + 1) / (settings.decay_steps + 1)))
    clean_probe = _probe(model, probe)
    for _ in range(settings.imperfect_steps):
        step("imperfect", _IMPERFECT_LEARNING_RATE)
    model.eval()
    return {
        "clean_steps": steps,
        "clean_probe": clean_probe,
        "imperfect_steps": settings.imperfect_steps,
        "final_probe": _probe(model, probe),
    }


def _batch(tokenizer: PreTrainedTokenizerBase, demonstrations: Sequence[Demonstration]) -> torch.Tensor:
    """Right-padded conversations, [2, conversations, tokens]: ids, and the turn of each as in ``encode``."""
    encoded = [encode(tokenizer, demonstration) for demonstration in demonstrations]
    width = max(len(ids) for ids, _ in encoded)
    return torch.tensor([[row[n] + [-n] * (width - len(row[n])) for row in encoded] for n in range(2)])


def _answer_logits(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # the output layer is a large part of a tiny model: it runs only where an assistant wrote. Right padding needs no
    # mask under causal attention.
    ids, turns = batch
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    written = turns[:, 1:] >= 0
    return model.lm_head(hidden[:, :-1][written]), ids[:, 1:][written]


@torch.no_grad()
def _probe(model: Any, batch: torch.Tensor) -> float:
    """Share of the assistant turns in which every token is the model's first choice."""
    logits, labels = _answer_logits(model, batch)
    rows, places = (batch[1, :, 1:] >= 0).nonzero(as_tuple=True)
    turns = list(zip(rows.tolist(), batch[1, rows, places + 1].tolist(), strict=True))
    wrong = {turn for turn, right in zip(turns, (logits.argmax(-1) == labels).tolist(), strict=True) if not right}
    return 1 - len(wrong) / len(set(turns))


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Tensors this small are slower on several threads, and sums in another order would give another policy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **fields}, indent=2) + "\n")
