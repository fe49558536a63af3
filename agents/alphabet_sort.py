"""Alphabet-sort at the size of SmolLM2-135M: three words, one turn, a handful of tokens.

python train.py --model smollm2 --agent agents/alphabet_sort.py:AlphabetSort

After the task of the same name in prime-rl's public environments. Its reward is the similarity of the answer and the
sorted list, to the power of 4; with three words a policy of this size then learns to leave one out (0.41) or to copy
the question (mean 0.2), and stops there. Here an answer with other words earns nothing, and any other the squared share
of positions with the right word: copying earns 0.07 on average, a random order 0.2.

How its reward rose: docs/trainer.md.
"""

from __future__ import annotations

import random
from typing import Any

from agl_slime import SGLangLitAgent

# one word for each letter, so that the first letter decides
_WORDS = """apple bread chair dance eagle fruit grape house island juice king lemon moon night ocean paper queen river
sugar table uncle voice water yellow"""
WORDS = _WORDS.split()


class AlphabetSort(SGLangLitAgent):
    n_words = 3

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        words = rng.sample(WORDS, self.n_words)
        while words == sorted(words):  # otherwise the question is the answer
            rng.shuffle(words)
        return {"words": words, "label": " ".join(sorted(words))}

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": "Answer with the sorted words and nothing else."},
            # without an example a model of this size talks about the task: 48 answers had a mean reward of 0.007
            {"role": "user", "content": "Sort these words alphabetically: lemon apple house"},
            {"role": "assistant", "content": "apple house lemon"},
            {"role": "user", "content": f"Sort these words alphabetically: {' '.join(task['words'])}"},
        ]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        words, label = response.split(), task["label"].split()
        if sorted(words) != label:  # label is sorted
            return 0.0
        return (sum(word == wanted for word, wanted in zip(words, label, strict=True)) / len(label)) ** 2
