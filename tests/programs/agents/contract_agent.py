"""The agent that slime's contract tests reach through our hooks: real store, runner, spans and conversion; the model is
three lines.

slime's contract tests replace ``transformers`` by a stub, so the tokenizer is our byte-level one.
"""

import random
from collections.abc import Sequence
from typing import Any

from agl_slime import Generation, SamplingParams, SGLangLitAgent


class ByteTokenizer:
    """One token per byte, ``<end>`` is 256; a ChatML-like template."""

    eos_token_id: int | None = 256

    def apply_chat_template(self, conversation: Any, *, add_generation_prompt: bool = False, **_: Any) -> str:
        text = "".join(f"<{message['role']}>{message['content']}</>" for message in conversation)
        return text + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def __len__(self) -> int:
        return 257


class EchoEngine:
    """Answers every prompt with "generated"."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, **_: Any) -> Generation:
        ids = (*b"generated", 256)
        return Generation(
            output_ids=ids,
            log_probs=(-0.25,) * len(ids),
            text="generated",
            finish_reason="stop",
            prompt_tokens=len(input_ids),
            speculated=(6, 8, 2),
        )


class ContractAgent(SGLangLitAgent):
    def __init__(self) -> None:
        super().__init__(tokenizer=ByteTokenizer(), client=EchoEngine())

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {"prompt": f"say {rng.randrange(1000)}", "label": "generated"}

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 0.25 if response == "generated" else 0.0
