"""``Turn``: one model call with the exact tokens. ``Trajectory``: a rollout for its agent, reward and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agl_slime.engine.client.generation import WeightSpan
from agl_slime.engine.client.replay import Nucleus, RoutedExperts
from agl_slime.errors import TraceError
from agl_slime.tokens.codec import LogProbArray, TokenArray, log_prob_array, token_array
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.images import Image
from agl_slime.tokens.replay import FiledReplay

if TYPE_CHECKING:
    from agl_slime.engine.client.generation import Generation


Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Turn:
    """One model call: the prompt and the response sampled after it.

    ``prompt_ids`` and ``response_ids`` become read-only int32 arrays and ``log_probs`` a read-only float32 array
    (natural log, one per response id; ``None`` when the source has none), from any sequences of numbers.
    ``response_ids`` has the stop token. ``weight_versions`` names the version that sampled each response token.
    ``messages`` are the chat messages of the request and ``text`` the engine's answer: for reading, never for training.
    ``latency_s`` is the time the call took in seconds.

    The prompt begins with the first ``kept_tokens`` tokens (prompt and response) of turn number ``base_turn`` of the
    rollout; ``fork`` is the reason when these are not all of them. A turn of another recorder has ``None``, 0 and
    ``None``. ``untrained`` is the reason why the response is context only (``role:judge``, ``constrained``), or empty.

    ``experts`` are the routed experts of the tokens for which ``base_turn`` has none; ``nucleus`` has an entry per
    response id. Both are ``None`` unless they were requested; ``filed`` is the place of large ones in a file.
    ``speculated`` counts tokens accepted, tokens drafted and verifications under speculative decoding. ``images`` are
    the prompt's images, in the order of their tokens.

    Raises ``TraceError`` when ids are not non-negative int32, log-probs are not finite, or the lengths do not fit.
    """

    prompt_ids: TokenArray
    response_ids: TokenArray
    log_probs: LogProbArray | None = None
    finish_reason: str = "stop"
    weight_versions: tuple[WeightSpan, ...] = ()
    cached_tokens: int = 0
    request_id: str = ""
    text: str = ""
    messages: Messages | None = None
    latency_s: float = 0.0
    resumed: int = 0
    token_source: Literal["engine", "retokenized"] = "engine"
    base_turn: int | None = None
    kept_tokens: int = 0
    fork: ForkReason | None = None
    untrained: str = ""
    experts: RoutedExperts | None = None
    nucleus: Nucleus | None = None
    filed: FiledReplay | None = None
    speculated: tuple[int, int, int] = (0, 0, 0)
    images: tuple[Image, ...] = ()

    def __post_init__(self) -> None:
        for name in ("prompt_ids", "response_ids"):
            ids = token_array(getattr(self, name), name=name)
            if ids.size and ids.min() < 0:
                raise TraceError(f"{name} must not be negative, got {int(ids.min())}")
            object.__setattr__(self, name, ids)
        n = len(self.response_ids)
        if self.log_probs is not None:
            probs = log_prob_array(self.log_probs, name="log_probs")
            if len(probs) != n:
                raise TraceError(f"a turn needs one log-prob per response id, got {len(probs)} log-probs for {n} ids")
            object.__setattr__(self, "log_probs", probs)
        object.__setattr__(self, "weight_versions", tuple(self.weight_versions))
        for span in self.weight_versions:
            if not 0 <= span.start <= span.end <= n:
                place = f"tokens {span.start} to {span.end} of a response of {n}"
                raise TraceError(f"weight version {span.version!r} covers {place}")
        if self.token_source not in ("engine", "retokenized"):
            raise TraceError(f"token_source must be engine or retokenized, got {self.token_source!r}")
        limit = 0 if self.base_turn is None else len(self.prompt_ids)
        if not 0 <= self.kept_tokens <= limit:
            raise TraceError(f"kept_tokens must lie between 0 and {limit}, got {self.kept_tokens}")
        if self.experts_end > self.length:
            raise TraceError(f"routed experts end at token {self.experts_end} of a turn of {self.length}")
        if self.nucleus is not None and len(self.nucleus) != n:
            raise TraceError(f"a nucleus is there for {len(self.nucleus)} of {n} sampled tokens")
        if self.messages is not None:
            object.__setattr__(self, "messages", tuple(self.messages))

    @classmethod
    def from_generation(cls, prompt_ids: Sequence[int] | TokenArray, generation: Generation, **details: Any) -> Turn:
        """The turn of a ``/generate`` call that was sent ``prompt_ids``; ``details`` are further fields."""
        return cls(
            prompt_ids=token_array(prompt_ids, name="prompt_ids"),
            response_ids=token_array(generation.output_ids, name="response_ids"),
            log_probs=log_prob_array(generation.log_probs, name="log_probs"),
            finish_reason=generation.finish_reason,
            weight_versions=generation.weight_versions,
            cached_tokens=generation.cached_tokens,
            request_id=generation.request_id,
            text=generation.text,
            latency_s=generation.latency_s,
            resumed=generation.resumed,
            speculated=generation.speculated,
            **({"experts": generation.experts, "nucleus": generation.nucleus} if details.get("filed") is None else {}),
            **details,
        )

    @property
    def token_ids(self) -> TokenArray:
        """Prompt and response in one array."""
        return np.concatenate((self.prompt_ids, self.response_ids))

    @property
    def experts_end(self) -> int:
        """The first token without routed experts here; 0 without any."""
        if self.filed is not None:
            return self.filed.experts_end
        return 0 if self.experts is None else self.experts.end

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        return all(_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]  # arrays are compared by value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    return bool(a == b)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The course of one attempt of a rollout.

    ``task`` is the rollout's input. ``reward`` and ``rewards`` (by name) are ``None`` and empty until there is a
    reward. ``stop_reason`` is the agent's, or else the finish reason of the last call. ``metadata`` is the rollout's,
    and ``metadata["gateway"]`` has the counts of the gateway, such as ``refused/400``, the number of refused requests.
    ``metadata["tools"]`` has the counts of tools. ``tools``, in an agent's ``score``, are the rollout's tools by name.
    ``mode`` is ``"train"``, ``"val"``, ``"test"`` or not set.
    """

    rollout_id: str
    attempt_id: str
    task: Any
    mode: str | None = "train"
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Any] = field(default_factory=dict)

    @property
    def response(self) -> str:
        """The text of the last answer, including the part that the last call continued; empty without an answer."""
        if not self.turns:
            return ""
        messages = self.turns[-1].messages
        start = str(messages[-1].get("content") or "") if messages and messages[-1].get("role") == "assistant" else ""
        return start + self.turns[-1].text

    @property
    def messages(self) -> Messages:
        """The last call's messages with its answer, if recorded; else the answers alone."""
        if not self.turns:
            return ()
        messages = self.turns[-1].messages
        if messages is None:
            return tuple({"role": "assistant", "content": turn.text} for turn in self.turns)
        if messages and messages[-1].get("role") == "assistant":
            return (*messages[:-1], {**messages[-1], "content": self.response})
        return (*messages, {"role": "assistant", "content": self.response})

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled in all turns."""
        return sum(len(turn.response_ids) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Whether the rollout was cut off and did not end by itself."""
        return is_truncated(self.stop_reason) or (bool(self.turns) and is_truncated(self.turns[-1].finish_reason))


_TRUNCATING = {"length", "abort", "aborted", "max_turns", "max_tokens", "max_trajectory_tokens", "context_overflow"}


def is_truncated(stop_reason: str) -> bool:
    """Whether a rollout (or a call) that stopped for ``stop_reason`` was cut off."""
    return stop_reason in _TRUNCATING
