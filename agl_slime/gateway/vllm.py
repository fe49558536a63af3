"""vLLM's addresses for clients that render prompts themselves: ``/inference/v1/generate`` takes and gives token ids,
``/tokenize`` has the ids of a conversation's prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.calls import GRAMMARS, IMPOSED, Call, CallResult
from agl_slime.gateway.chat import ChatCompletions, logprobs, usage
from agl_slime.gateway.completions import Completions
from agl_slime.gateway.protocol import NO_HISTORIES, Decode, Histories, token_name

_SAMPLING = frozenset(("max_tokens", "stop", "n", *GRAMMARS, *IMPOSED))
_FIXED = frozenset(("logprobs", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"))
"""The answer always has ids and log-probs."""
_ELSEWHERE = frozenset(("stop_token_ids", "routed_experts_prompt_start"))


class Generate(Completions):
    """A completion of token ids, as verifiers' training client asks for it."""

    honoured = frozenset(("model", "token_ids", "sampling_params", "cache_salt", "priority", "return_token_ids"))
    prefix = "gen-"

    def read(self, body: Mapping[str, Any], histories: Histories = NO_HISTORIES) -> Call:
        self.check_fields(body)
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, Mapping):
            message = f"sampling_params must be an object, got {sampling!r:.80}"
            raise GatewayRequestError(message, param="sampling_params")
        for name in sorted(sampling.keys() - _SAMPLING - _FIXED - _ELSEWHERE):
            if sampling[name] not in (None, False, 0, "", [], {}):
                param = f"sampling_params.{name}"
                raise GatewayRequestError(f"{param} is not supported here", code="unsupported_parameter", param=param)
        ids = body.get("token_ids")
        if not isinstance(ids, list) or not ids or not all(type(token) is int for token in ids):
            raise GatewayRequestError("token_ids must be the ids of a prompt", param="token_ids")
        stops = sampling.get("stop_token_ids") or []
        if not isinstance(stops, list) or not all(type(stop) is int for stop in stops):
            param = "sampling_params.stop_token_ids"
            raise GatewayRequestError(f"{param} must be a list of ids, got {stops!r:.80}", param=param)
        supported = {name: value for name, value in sampling.items() if name in _SAMPLING}
        call = _COMPLETIONS.read({"model": body.get("model"), "prompt": ids, **supported})
        return replace(call, max_tokens=self.max_tokens(supported), stop_token_ids=tuple(stops))

    def answer(self, body: Mapping[str, Any], result: CallResult, decode: Decode) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "token_ids": choice.token_ids,
                "logprobs": logprobs(choice, token_name),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(result.choices)
        ]
        ids = {"prompt_token_ids": result.prompt_ids.tolist()} if body.get("return_token_ids") else {}
        return {"request_id": result.id, "model": result.model, **ids, "choices": choices, "usage": usage(result)}


_COMPLETIONS = Completions()


class Tokenize(ChatCompletions):
    """The prompt that a conversation's next answer has, or had: with the sampled ids of earlier answers."""

    counts_only = True

    def count_answer(self, ids: list[int]) -> dict[str, Any]:
        return {"count": len(ids), "tokens": ids}
