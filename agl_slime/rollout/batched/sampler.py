"""What a batched rollout asks of an engine, and SGLang as such."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agl_slime.errors import ConfigError, ContextOverflowError
from agl_slime.sglang.client import SGLangClient
from agl_slime.sglang.describe import end_token_ids
from agl_slime.sglang.generation import Generation, SamplingParams
from agl_slime.sglang.transport import ClientSettings
from agl_slime.support.threads import run_blocking

InputFeature = Mapping[str, Any]
"""``input_ids``: the prompt's token ids."""


Answers = Sequence[Generation | ContextOverflowError]

_TWINKLES = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p", "num_samples")


def as_sampling(given: Any) -> SamplingParams | None:
    """Sampling parameters as they are, or an object with twinkle's fields. Raises ``ConfigError`` naming a field."""
    if given is None or isinstance(given, SamplingParams):
        return given
    if not all(hasattr(given, name) for name in _TWINKLES):
        raise ConfigError(f"sampling_params must be SamplingParams of agl_slime or twinkle, got {given!r:.99}")
    if getattr(given, "prompt_logprobs", None) is not None:
        raise ConfigError(f"prompt_logprobs is {given.prompt_logprobs}: rollouts have those of answers; leave it out")
    penalty = getattr(given, "repetition_penalty", 1.0)
    fields = {name: getattr(given, name) for name in _TWINKLES}
    return SamplingParams(**fields, repetition_penalty=None if penalty == 1 else penalty)


class Sampler(Protocol):
    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        """One answer per input, in their order, all sampled at the same time; ``sampling_params`` has one entry per
        input. A prompt that does not fit into the model's context has the error in the place of its answer; where it is
        raised, the prompts are asked for in smaller and smaller batches."""
        ...


class SGLangSampler:
    """A ``Sampler`` over a running SGLang server or router. Holds no connection between calls, so it can be sent to
    another process. ``tokenizer`` tells where an answer ends that a weight update aborted, and what its text is."""

    def __init__(self, *, base_url: str, settings: ClientSettings | None = None, tokenizer: Any = None) -> None:
        ends = end_token_ids(getattr(tokenizer, "name_or_path", ""), tokenizer)
        self._options: dict[str, Any] = {"base_url": base_url, "settings": settings, "eos_token_ids": ends}
        self._options["decode"] = getattr(tokenizer, "decode", None)

    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        """Raises the client's other errors when one of the requests fails for good."""
        return run_blocking(self._sample(inputs, sampling_params))

    async def _sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Answers:
        async with SGLangClient(**self._options) as client:

            async def one(input_ids: Sequence[int], params: SamplingParams) -> Generation | ContextOverflowError:
                try:
                    return await client.generate(input_ids, params)
                except ContextOverflowError as error:
                    return error

            pairs = zip(inputs, sampling_params, strict=True)
            return list(await asyncio.gather(*(one(each["input_ids"], params) for each, params in pairs)))
