"""Reverse-text at the size of SmolLM2-135M: four words in the opposite order.

python train.py --model smollm2 --agent agents/reverse_text.py:ReverseText

The original (prime-rl's reverse-text) reverses character by character, here ``unit = "character"``: Qwen3-0.6B after
supervised fine-tuning, 8 prompts x 16 samples, up to 128 new tokens, learning rate 3e-6, 15 to 20 steps, to a reward of
about 0.8; it passes with a reward of at least 0.6 and a mismatch KL below 0.01, each over the last three steps. The
reward is the original's: the similarity of the answer and the reversed text (twice the matching length over both
lengths).

How its reward rose: docs/trainer.md.
"""

from __future__ import annotations

import random
from difflib import SequenceMatcher
from typing import Any, Literal

from agl_slime import SGLangLitAgent

_WORDS = """air bird boat bread chair cloud dog door fire fish flower garden glass gold hand horse house king lake light
milk moon paper rain river road sea ship snow stone summer table tree water wind winter"""
WORDS = _WORDS.split()


class ReverseText(SGLangLitAgent):
    unit: Literal["word", "character"] = "word"
    n_words = 4

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        words = rng.sample(WORDS, self.n_words)
        text = " ".join(words)
        return {"text": text, "label": " ".join(reversed(words)) if self.unit == "word" else text[::-1]}

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {
                "role": "system",
                "content": f"Reverse the text {self.unit} by {self.unit}. Answer with it and nothing else.",
            },
            {"role": "user", "content": task["text"]},
        ]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        answer, label = response.strip(), task["label"]
        if self.unit == "word":
            answer, label = answer.split(), label.split()
        return SequenceMatcher(None, answer, label, autojunk=False).ratio()
