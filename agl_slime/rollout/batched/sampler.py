"""What a batched rollout asks of an engine, and SGLang as such."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agl_slime.sglang.client import SGLangClient
from agl_slime.sglang.generation import Generation, SamplingParams
from agl_slime.sglang.transport import ClientSettings
from agl_slime.support.threads import run_blocking

InputFeature = Mapping[str, Any]
"""``input_ids``: the prompt's token ids."""


class Sampler(Protocol):
    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> Sequence[Generation]:
        """One answer per input, in their order, all sampled at the same time; ``sampling_params`` has one entry per
        input."""
        ...


class SGLangSampler:
    """A ``Sampler`` over a running SGLang server or router. Holds no connection between calls, so it can be sent to
    another process."""

    def __init__(
        self, *, base_url: str, settings: ClientSettings | None = None, eos_token_ids: Sequence[int] = ()
    ) -> None:
        self._base_url = base_url
        self._settings = settings
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]) -> list[Generation]:
        """Raises the client's typed errors when one of the requests fails for good."""
        return run_blocking(self._sample(inputs, sampling_params))

    async def _sample(
        self, inputs: Sequence[InputFeature], sampling_params: Sequence[SamplingParams]
    ) -> list[Generation]:
        async with SGLangClient(
            base_url=self._base_url, settings=self._settings, eos_token_ids=self._eos_token_ids
        ) as client:
            calls = (
                client.generate(each["input_ids"], params) for each, params in zip(inputs, sampling_params, strict=True)
            )
            return list(await asyncio.gather(*calls))
