"""One rollout through the whole bridge, in seconds: no GPU, no server, no torch.

Agent Lightning's store, the runner, the tracer and a tokenizer (trained here, in memory) are real; a script plays the
model. The result is the Sample that slime would train on. Run it with ``python examples/smoke_test.py``.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agl_slime import AGLDataSource, Generation, RunnerThread, SamplingParams, SGLangLitAgent
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, InMemoryLightningStore

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Any:
    """A byte-level BPE with a ChatML template, trained on a few words."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        ["Hello world, hello again"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    bpe.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=CHATML)


class ScriptedEngine:
    """Replaces SGLang: always answers "Hello again", as token ids with log-probs."""

    def __init__(self, tokenizer: Any) -> None:
        self._ids = (*tokenizer.encode("Hello again"), tokenizer.eos_token_id)

    async def generate(self, input_ids: Any, sampling: SamplingParams, **_: Any) -> Generation:
        log_probs = tuple(-0.1 * (i + 1) for i in range(len(self._ids)))
        return Generation(
            output_ids=self._ids,
            log_probs=log_probs,
            text="Hello again",
            finish_reason="stop",
            prompt_tokens=len(input_ids),
        )


class GreetingAgent(SGLangLitAgent):
    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if "hello" in response.lower() else 0.0


async def main() -> None:
    store = InMemoryLightningStore()
    tokenizer = make_tokenizer()
    agent = GreetingAgent(tokenizer=tokenizer, client=ScriptedEngine(tokenizer))

    # Rollouts need a model resource: the runner fails them in a store that has none.
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:0", model="scripted")})
    [rollout] = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input={"prompt": "Hello world", "label": "test"})]
    )

    data_source = AGLDataSource(
        store=store, tokenizer=tokenizer, args=Namespace(reward_key=None), n_samples_per_prompt=1
    )
    with RunnerThread(agent=agent, store=store):
        # get_samples blocks until a group is ready, so it must not run on an event loop
        [[sample]] = await asyncio.to_thread(data_source.get_samples, 1)
    data_source.stop()

    prompt_length = len(sample.tokens) - sample.response_length
    print(f"rollout   {rollout.rollout_id}: status {sample.status.name}, reward {sample.reward}")
    print(f"prompt    {sample.tokens[:prompt_length]}")
    print(f"response  {sample.tokens[prompt_length:]}  {sample.response!r}")
    print(f"loss mask {sample.loss_mask}")
    print(f"log-probs {[round(value, 3) for value in sample.rollout_log_probs or []]}")
    assert sample.reward == 1.0
    assert sample.status == sample.Status.COMPLETED
    assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length  # type: ignore[arg-type]
    print("ok: the Sample is what slime trains on")


if __name__ == "__main__":
    asyncio.run(main())
