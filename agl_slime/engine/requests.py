"""What a client asks for, checked: the sampling parameters and the body of ``/generate``, with SGLang's names, defaults
and error texts."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_slime.engine.sampling import ALL_TOKENS, normalize_temperature

DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's default for ``/generate``."""

# Parameters of SGLang that change what is sampled and are not built here: refused when set, never ignored. The value is
# what leaves them off.
_UNSUPPORTED: Mapping[str, Any] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "stop_regex": None,
    "logit_bias": None,
}
# Accepted without effect: spaces_between_special_tokens concerns slow tokenizers; a stock SGLang ignores the others as
# well unless it is started for them.
_WITHOUT_EFFECT = frozenset({"spaces_between_special_tokens", "custom_params", "stream_interval", "sampling_seed", "n"})


class BadRequest(ValueError):
    """The request cannot be served; its text goes to the client with status 400."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of one request, normalised. ``max_new_tokens`` None means: up to the context length."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = ALL_TOKENS
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> Sampling:
        """SGLang's ``sampling_params``; raises ``BadRequest`` for values out of range and for parameters that this
        engine does not have."""
        given = {name: value for name, value in (params or {}).items() if value is not None or name == "max_new_tokens"}
        for name, off in _UNSUPPORTED.items():
            if given.pop(name, off) not in (off, [], {}):
                raise BadRequest(f"{name} is not supported by the embedded engine: leave it out or use a real SGLang")
        known = {name: given.pop(name) for name in list(given) if name in cls.__dataclass_fields__}
        unknown = sorted(set(given) - _WITHOUT_EFFECT)
        if unknown:
            raise BadRequest(f"Unknown sampling parameter {unknown[0]!r}.")
        stop = known.get("stop", ())
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        if not all(isinstance(text, str) and text for text in stop):
            raise BadRequest(f"stop must be a non-empty string or a list of them, got {known['stop']!r}.")
        temperature = _number(known, "temperature", 1.0)
        top_p = _number(known, "top_p", 1.0)
        top_k = _integer(known.get("top_k", -1), "top_k")
        maximum = known.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        maximum = None if maximum is None else _integer(maximum, "max_new_tokens")
        if temperature < 0:
            raise BadRequest(f"temperature must be a non-negative finite number, got {temperature}.")
        if not 0.0 < top_p <= 1.0:
            raise BadRequest(f"top_p must be in (0, 1], got {top_p}.")
        if top_k < 1 and top_k != -1:
            raise BadRequest(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        if maximum is not None and maximum < 0:
            raise BadRequest(f"max_new_tokens must be at least 0, got {maximum}.")
        temperature, top_k = normalize_temperature(temperature, top_k)
        return cls(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            max_new_tokens=maximum,
            stop=stop,
            stop_token_ids=frozenset(_integer(item, "stop_token_ids") for item in known.get("stop_token_ids", ())),
            ignore_eos=bool(known.get("ignore_eos", False)),
            skip_special_tokens=bool(known.get("skip_special_tokens", True)),
            no_stop_trim=bool(known.get("no_stop_trim", False)),
        )


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence on its way through the engine; the engine's thread fills the second half and then calls
    ``on_finish`` once."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First place of the prompt to report a log-prob for; -1 reports none."""
    on_finish: Callable[[Request], None] = lambda _: None
    created: float = field(default_factory=time.perf_counter)

    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    input_log_probs: list[tuple[float | None, int]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of the first output token that it sampled), in order."""
    finish: dict[str, Any] | None = None
    started: bool = False
    limit: int = 0
    """Output tokens at which it ends, the context length considered; set on submission."""
    stop_tail: int = 0
    """Number of last tokens that can hold a stop string's end; set on submission."""


def parse_generate(body: Any, *, encode: Callable[[str], list[int]]) -> tuple[list[Request], bool]:
    """The requests of a ``/generate`` body and whether the answer is a single object rather than a list. Raises
    ``BadRequest``."""
    if not isinstance(body, Mapping):
        raise BadRequest(f"The body must be a JSON object, got {type(body).__name__}.")
    if body.get("stream"):
        raise BadRequest("stream is not supported by the embedded engine: leave it out or use a real SGLang")
    prompts, batched = _prompts(body, encode)
    params = body.get("sampling_params")
    per_prompt = list(params) if isinstance(params, list) else [params] * len(prompts)
    if len(per_prompt) != len(prompts) or not all(item is None or isinstance(item, Mapping) for item in per_prompt):
        raise BadRequest(f"sampling_params must be an object, or a list of {len(prompts)} objects.")
    copies = {_integer(_or(item, "n", 1), "n") for item in per_prompt}
    if len(copies) > 1:
        raise BadRequest("The parallel_sample_num should be the same for all samples in sample params.")
    n = copies.pop()
    if n < 1:
        raise BadRequest(f"n must be at least 1, got {n}.")
    rids = _rids(body.get("rid"), len(prompts), n, batched)
    requests = []
    for index, (prompt, item) in enumerate(zip(prompts, per_prompt, strict=True)):
        sampling = Sampling.parse(item)
        wanted = bool(_nth(body.get("return_logprob"), index, len(prompts), "return_logprob"))
        start = _nth(body.get("logprob_start_len"), index, len(prompts), "logprob_start_len")
        start = -1 if start is None else _integer(start, "logprob_start_len")
        for copy in range(n):
            requests.append(
                Request(
                    rid=rids[index * n + copy],
                    input_ids=prompt,
                    sampling=sampling,
                    return_logprob=wanted,
                    logprob_start_len=start if wanted else -1,
                )
            )
    return requests, not batched and n == 1


def _prompts(body: Mapping[str, Any], encode: Callable[[str], list[int]]) -> tuple[list[list[int]], bool]:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest(
            "Either text, input_ids or input_embeds should be provided. The embedded engine takes text or input_ids, one of them."
        )
    if text is not None:
        texts = text if isinstance(text, list) else [text]
        if not all(isinstance(item, str) for item in texts):
            raise BadRequest("text must be a string or a list of strings.")
        prompts = [encode(item) for item in texts]
        batched = isinstance(text, list)
    else:
        if not isinstance(ids, list):
            raise BadRequest("input_ids must be a list of integers or a list of such lists.")
        batched = bool(ids) and isinstance(ids[0], list)
        prompts = ids if batched else [ids]
    if not prompts or not all(prompts):
        raise BadRequest("input_ids cannot be empty.")
    for prompt in prompts:
        if not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
            raise BadRequest("input_ids must be a list of integers or a list of such lists.")
    return prompts, batched


def _rids(rid: Any, prompts: int, n: int, batched: bool) -> list[str]:
    if rid is None or n > 1:  # SGLang gives parallel samples ids of their own as well
        return [uuid.uuid4().hex for _ in range(prompts * n)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(prompts)] if batched else [rid]
    if not (isinstance(rid, list) and all(isinstance(item, str) for item in rid)):
        raise BadRequest("The rid should be a string or a list of strings.")
    if len(rid) != prompts:
        raise BadRequest("The specified rids length mismatch with the batch_size for batch processing.")
    duplicates = sorted({item for item in rid if rid.count(item) > 1})
    if duplicates:
        raise BadRequest(f"Duplicate request IDs detected within the request: {duplicates}")
    return rid


def _or(params: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    value = (params or {}).get(name)
    return default if value is None else value


def _nth(value: Any, index: int, count: int, name: str) -> Any:
    if not isinstance(value, list):
        return value
    if len(value) != count:
        raise BadRequest(f"{name} must be one value or a list of {count}.")
    return value[index]


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a finite number, got {value!r}.")
    return float(value)


def _integer(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadRequest(f"{name} must be an integer, got {value!r}.")
    return value
