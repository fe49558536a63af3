"""A tiny policy for command-line agents, whose prompts are tens of thousands of tokens long: it says one of a few
answers, whatever it is asked. Its attention stays as it was drawn, which is diffuse: what it takes from a prompt is
a mean that depends little on the length, so that what was learned on short conversations holds for long ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from agl_slime.cli.demo.formats import Demonstration, Quality
from agl_slime.cli.demo.tokenizer import train_tokenizer
from agl_slime.cli.demo.warmup import PolicySettings, edit_json, warm_up

CONTEXT = 262_144
_ROOT = Path(__file__).parents[2]
_PIECE = 16  # letters; longer than the marks of calls, so that no two pieces of an answer are the same token


@dataclass
class Acting:
    """``answers`` by how often they are given."""

    answers: Mapping[str, float]
    words: Sequence[str] = field(default_factory=list)

    def demonstrations(self, rng: random.Random, n: int, *, quality: Quality) -> list[Demonstration]:
        made = []
        for _ in range(n):
            asked = {
                "role": rng.choice(("user", "tool")),
                "content": " ".join(rng.choices(self.words, k=rng.randrange(30))),
            }
            answer = rng.choices([*self.answers], [*self.answers.values()])[0]
            made.append([asked, {"role": "assistant", "content": answer}])
        return made


def make_tokenizer(answers: Sequence[str]) -> Any:
    """Of this repository's text, with the pieces of all these answers as tokens."""
    texts = [path.read_text() for path in sorted((_ROOT / "docs").glob("*.md"))]
    texts += [path.read_text() for path in sorted((_ROOT / "agl_slime").rglob("*.py"))]
    tokenizer = train_tokenizer(texts, vocab_size=4096, max_length=CONTEXT)
    pieces = {text[at : at + _PIECE] for text in answers for at in range(0, len(text), _PIECE)}
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in sorted(pieces)])
    return tokenizer


def make_acting_policy(
    directory: Path, tokenizer: Any, answers: Mapping[str, float], *, target: float, seed: int = 0
) -> Path:
    """``target`` is the share of what is said most often."""
    words = (_ROOT / "docs" / "get-started.md").read_text().split()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.08,
        rope_theta=1e6,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("self_attn" not in name)
        if "o_proj" in name:
            parameter.data *= 0.25
    settings = PolicySettings(
        batch_size=8, probe_size=32, target=target, decay_steps=30, imperfect_steps=0, learning_rate=4e-3
    )
    report = warm_up(model, tokenizer, Acting(answers, words), seed=seed, settings=settings)
    with torch.no_grad():
        model.model.norm.weight *= 1.5  # surer of every piece than what so few steps have taught
    print(directory.name, report)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    # what transformers 4, in a server for example, does not read as transformers 5 writes it
    edit_json(directory / "config.json", rope_theta=1e6)
    edit_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    return directory


@torch.no_grad()
def log_probs(policy: Path, prompt: Sequence[int], response: Sequence[int]) -> list[float]:
    """Of the response's tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *response]])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
    every = model.lm_head(hidden).log_softmax(-1)
    return every.gather(-1, ids[0, len(prompt) :].unsqueeze(-1)).squeeze(-1).tolist()
