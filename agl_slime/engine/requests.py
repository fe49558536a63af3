"""Requests and their validation: sampling parameters and ``/generate``, with SGLang's names, defaults and errors."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from reprlib import repr as shortened
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError, model_validator

M = TypeVar("M", bound=BaseModel)
Encode = Callable[..., list[int]]
"""A tokenizer's ``encode``."""

# Parameters of SGLang that change sampling and are refused here unless they have the value that turns them off.
UNSUPPORTED: Mapping[str, Any] = {
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "min_new_tokens"), 0),
    **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "logit_bias")),
    "repetition_penalty": 1.0,
}
# Accepted without effect: spaces_between_special_tokens concerns slow tokenizers; a stock SGLang ignores the others as
# well unless it is started for them.
_WITHOUT_EFFECT = ("spaces_between_special_tokens", "custom_params", "stream_interval")


MOST_SEQUENCES = 4096
"""The limit of prompts times ``n`` in one request."""
Name = Annotated[str, StringConstraints(max_length=256)]
Start = Annotated[int, Field(ge=-1)]
Top = Annotated[int, Field(ge=0, le=100)]  # as many pairs are kept for each sampled token
_Stop = Annotated[str, StringConstraints(max_length=1024)]


class BadRequest(ValueError):
    """The request cannot be served; its text goes to the client with status 400."""


def parse(model: type[M], body: Any) -> M:
    """``body`` as ``model``; ``BadRequest`` names the field and the value."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        custom = first.get("ctx", {}).get("error")
        field_name = ".".join(map(str, first["loc"])) or "The body"
        message = f"{field_name}: {first['msg']}, got {shortened(first['input'])}"
        raise BadRequest(str(custom) if custom else message) from None


class Sampling(BaseModel):
    """Sampling parameters of one request. ``max_new_tokens`` None means: up to the context length."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    temperature: FiniteFloat = 1.0
    top_p: FiniteFloat = 1.0
    top_k: int = Field(default=-1, le=2**31 - 1)  # as in SGLang, whose tensor of them is of int32
    max_new_tokens: int | None = 128
    stop: tuple[_Stop, ...] = Field(default=(), max_length=256)
    stop_token_ids: tuple[int, ...] = Field(default=(), max_length=4096)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    n: int = Field(default=1, le=MOST_SEQUENCES)
    """Answers to one prompt."""
    sampling_seed: int | None = None
    """Decides the draws, with the place of each token; the n-th answer to a prompt has this seed plus n."""
    nucleus: bool = False
    """Report what top_p and top_k leave of each token; log-probs are then of that."""

    @model_validator(mode="before")
    @classmethod
    def _take(cls, params: Any) -> Any:
        given = (params or {}).items()
        settings = {name: value for name, value in given if value is not None or name == "max_new_tokens"}
        for name, off in UNSUPPORTED.items():
            if settings.pop(name, off) not in (off, [], {}):
                raise ValueError(f"{name} is not supported by the embedded engine: leave it out or use a real SGLang")
        custom = settings.get("custom_params")
        if isinstance(custom, Mapping) and custom.get("return_top_p_token_ids"):  # as slime's SGLang takes it
            settings["nucleus"] = True
        for name in _WITHOUT_EFFECT:
            settings.pop(name, None)
        for name in ("stop", "stop_token_ids"):
            if isinstance(value := settings.get(name, ()), (str, list)):
                settings[name] = (value,) if isinstance(value, str) else tuple(value)
        return settings

    @model_validator(mode="after")
    def _in_range(self) -> Sampling:
        for is_valid, words in (
            (self.temperature >= 0, f"temperature must be a non-negative finite number, got {self.temperature}."),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}."),
            (self.top_k >= 1 or self.top_k == -1, f"top_k must be -1 (disable) or at least 1, got {self.top_k}."),
            ((self.max_new_tokens or 0) >= 0, f"max_new_tokens must be at least 0, got {self.max_new_tokens}."),
            (self.n >= 1, f"n must be at least 1, got {self.n}."),
            (all(self.stop), f"stop must hold no empty string, got {self.stop!r}."),
        ):
            if not is_valid:
                raise ValueError(words)
        return self


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence on its way through the engine, whose thread fills the second half, then calls ``on_finish`` once."""

    rid: str
    input_ids: list[int]
    sampling: Sampling
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First place of the prompt to report a log-prob for; -1 reports none."""
    top_logprobs: int = 0
    """How many of the likeliest tokens to report for each sampled one."""
    experts_start: int | None = None
    """First token to report the routed experts of; ``None`` reports none."""
    seed: int | None = None
    """The seed of its draws; the engine chooses one where there is none."""
    on_finish: Callable[[Request], object] = lambda _: None
    on_token: Callable[[], object] | None = None
    """Called after each step that sampled a token of this request."""

    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    """Log-probs and ids of the likeliest tokens of each place, the likeliest first."""
    nucleus: list[list[int]] = field(default_factory=list)
    """The ids that top_p and top_k kept at each place; empty where they cut nothing."""
    experts: Any = None
    """``[tokens, layers, experts per token]``, set when it leaves its row."""
    input_log_probs: list[tuple[float | None, int]] = field(default_factory=list)
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(weight version, index of the first output token that it sampled), in order."""
    finish: dict[str, Any] | None = None
    created: float = field(default_factory=time.perf_counter)
    latency_s: float | None = None
    """From when it was made to its end."""
    retractions: int = 0
    """How often it was queued again."""
    started: bool = False
    cached_tokens: int = 0
    """Tokens of the prompt whose KV cache was there already."""
    limit: int = 0
    """Output tokens at which it ends, the context length considered; set on submission."""
    ends: frozenset[int] = frozenset()
    """Tokens that end it; set on submission."""
    stop_tail: int = 0
    """Number of last tokens that can hold a stop string's end; set on submission."""

    def check(self, *, context_length: int, vocab_size: int, eos_ids: Set[int]) -> None:
        """Raises ``BadRequest`` unless an engine of this context and vocabulary can serve it; sets what ends it."""
        length = len(self.input_ids)
        if length == 0:
            raise BadRequest("input_ids cannot be empty.")
        if length >= context_length:
            most = f"the model's context length ({context_length} tokens)"
            raise BadRequest(f"The input ({length} tokens) is longer than {most}.")
        if max(self.input_ids) >= vocab_size or min(self.input_ids) < 0:
            ids = f"{self.input_ids!s:.100}"
            raise BadRequest(f"The input_ids {ids} contains values greater than the vocab size ({vocab_size}).")
        limit = self.sampling.max_new_tokens
        room = context_length - length
        if limit is not None and limit > room:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {context_length} tokens. "
                f"You requested a total of {length + limit} tokens: {length} tokens from the input messages and "
                f"{limit} tokens for the completion. Please reduce one of them."
            )
        self.limit = room if limit is None else limit
        # as in SGLang, ignore_eos switches stop_token_ids off as well
        self.ends = frozenset() if self.sampling.ignore_eos else frozenset((*eos_ids, *self.sampling.stop_token_ids))
        # every token of a byte-level vocabulary holds at least one byte, so a stop string ends within this many of the
        # last tokens; 3 more complete a character that was cut
        self.stop_tail = max((len(text.encode()) + 3 for text in self.sampling.stop), default=0)

    def may_end(self, token: int) -> bool:
        """Whether ``reason_to_end`` is to be asked after the sampled ``token``."""
        return len(self.output_ids) >= self.limit or self.stop_tail > 0 or token in self.ends

    def reason_to_end(self, token: int, tokenizer: Any) -> dict[str, Any] | None:
        """SGLang's reasons in its order: length, stop strings, stop tokens."""
        if len(self.output_ids) >= self.limit:
            if self.limit == 0:  # SGLang samples one token all the same and reports none
                for sampled in (self.output_ids, self.log_probs, self.tops, self.nucleus, self.versions):
                    sampled.clear()
            return {"type": "length", "length": self.limit}
        if self.sampling.stop:
            tail = str(tokenizer.decode(self.output_ids[-self.stop_tail :], skip_special_tokens=False))
            if matched := next((text for text in self.sampling.stop if text in tail), None):
                return {"type": "stop", "matched": matched}
        return {"type": "stop", "matched": token} if token in self.ends else None


class GenerateBody(BaseModel):
    """The body of ``/generate``; what SGLang has besides is ignored where it does not change the answer."""

    model_config = ConfigDict(strict=True)

    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any] | None] | None = None
    rid: Name | list[Name] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Start | list[Start] | None = None
    top_logprobs_num: Top | list[Top] | None = None
    return_routed_experts: bool | list[bool] | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0)] = 0
    stream: bool | None = None


def parse_generate(body: Any, *, encode: Encode) -> tuple[list[Request], bool, bool]:
    """The requests of a ``/generate`` body, whether the answer is a single object rather than a list, and whether it is
    to be streamed. Raises ``BadRequest``."""
    fields = parse(GenerateBody, body)
    if (fields.text is None) == (fields.input_ids is None):
        raise BadRequest("Either text, input_ids or input_embeds should be provided: here text or input_ids.")
    inputs: Any = fields.input_ids if fields.text is None else fields.text
    batched = isinstance(inputs, list) and not (inputs and isinstance(inputs[0], int))
    if not inputs:
        raise BadRequest("input_ids cannot be empty.")
    count = len(inputs) if batched else 1
    params = [parse(Sampling, item) for item in _each(fields.sampling_params, count, "sampling_params")]
    if count * (n := params[0].n) > MOST_SEQUENCES:
        raise BadRequest(f"{count} prompts and n={n} are more than {MOST_SEQUENCES} sequences: send several requests.")
    prompts = [encode(item) if isinstance(item, str) else item for item in (inputs if batched else [inputs])]
    if not all(prompts):
        raise BadRequest("input_ids cannot be empty.")
    if any(item.n != n for item in params):
        raise BadRequest("The parallel_sample_num should be the same for all samples in sample params.")
    rids = iter(_rids(fields.rid, len(prompts), n, batched))
    logprobs = _each(fields.return_logprob, len(prompts), "return_logprob")
    starts = _each(fields.logprob_start_len, len(prompts), "logprob_start_len")
    routed = _each(fields.return_routed_experts, len(prompts), "return_routed_experts")
    if (first := fields.routed_experts_start_len) > min(map(len, prompts)):
        raise BadRequest(f"routed_experts_start_len={first} is higher than the prompt is long.")
    tops = _each(fields.top_logprobs_num, len(prompts), "top_logprobs_num")
    requests = [
        Request(
            rid=next(rids),
            input_ids=prompt,
            sampling=sampling,
            return_logprob=bool(logprob),
            logprob_start_len=start if logprob and start is not None else -1,
            top_logprobs=top or 0 if logprob else 0,
            experts_start=first if experts else None,
            seed=None if sampling.sampling_seed is None else sampling.sampling_seed + number,
        )
        for prompt, sampling, logprob, start, top, experts in zip(
            *(prompts, params, logprobs, starts, tops, routed), strict=True
        )
        for number in range(n)
    ]
    if fields.stream and len(requests) > 1:
        raise BadRequest("stream is supported by the embedded engine for one prompt and n=1 only: use a real SGLang")
    return requests, not batched and n == 1, bool(fields.stream)


def _each(value: Any, count: int, name: str) -> list[Any]:
    """One value for each of ``count`` prompts."""
    if isinstance(value, list) and len(value) != count:
        raise BadRequest(f"{name} must be one value or a list of {count}, got {len(value)}.")
    return value if isinstance(value, list) else [value] * count


def _rids(rid: str | list[str] | None, prompts: int, n: int, batched: bool) -> list[str]:
    if rid is None or n > 1:  # SGLang gives parallel samples ids of their own as well
        return [uuid.uuid4().hex for _ in range(prompts * n)]
    if isinstance(rid, str):
        return [f"{rid}_{index}" for index in range(prompts)] if batched else [rid]
    if len(rid) != prompts:
        raise BadRequest("The specified rids length mismatch with the batch_size for batch processing.")
    if duplicates := sorted(item for item, count in Counter(rid).items() if count > 1):
        raise BadRequest(f"Duplicate request IDs detected within the request: {shortened(duplicates)}")
    return rid
