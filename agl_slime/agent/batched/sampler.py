"""``Sampler``, the engine interface of batched rollouts, and its implementation for SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.describe import end_token_ids
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.errors import ConfigError, ContextOverflowError
from agl_slime.support.threads import run_blocking

InputFeature = Mapping[str, Any]
"""``input_ids``: the prompt's token ids."""

Answers = Sequence[Generation | ContextOverflowError]

_TWINKLE_FIELDS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p", "num_samples")


def as_sampling(params: Any) -> SamplingParams | None:
    """``SamplingParams`` from themselves or from an object with twinkle's fields. Raises ``ConfigError``."""
    if params is None or isinstance(params, SamplingParams):
        return params
    if not all(hasattr(params, name) for name in _TWINKLE_FIELDS):
        raise ConfigError(f"sampling_params must be SamplingParams of agl_slime or twinkle, got {params!r:.99}")
    if getattr(params, "prompt_logprobs", None) is not None:
        raise ConfigError(
            f"prompt_logprobs is {params.prompt_logprobs}: rollouts have log-probs of answers only; leave it out"
        )
    penalty = getattr(params, "repetition_penalty", 1.0)
    fields = {name: getattr(params, name) for name in _TWINKLE_FIELDS}
    return SamplingParams(**fields, repetition_penalty=None if penalty == 1 else penalty)


class Sampler(Protocol):
    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        """One answer per input, in order, sampled together; ``sampling_params`` has one entry per input. The answer to
        a prompt that does not fit into the model's context is the error; if the error is raised instead, the caller
        bisects the batch."""
        ...


class SGLangSampler:
    """A ``Sampler`` over a running SGLang server or router. It keeps no connection between calls, so it can be pickled.
    ``tokenizer`` is needed to find the end and the text of answers that a weight update aborted."""

    def __init__(self, *, base_url: str, settings: ClientSettings | None = None, tokenizer: Any = None) -> None:
        ends = end_token_ids(getattr(tokenizer, "name_or_path", ""), tokenizer)
        self._options: dict[str, Any] = {"base_url": base_url, "settings": settings, "eos_token_ids": ends}
        self._options["decode"] = getattr(tokenizer, "decode", None)

    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        """Sample all inputs. Raises the client's error when the retries of a request fail."""
        return run_blocking(self._sample(inputs, sampling_params))

    async def _sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        async with SGLangClient(**self._options) as client:

            async def generate(input_ids: Sequence[int], params: SamplingParams) -> Generation | ContextOverflowError:
                try:
                    return await client.generate(input_ids, params)
                except ContextOverflowError as error:
                    return error

            pairs = zip(inputs, sampling_params, strict=True)
            return list(await asyncio.gather(*(generate(each["input_ids"], params) for each, params in pairs)))
