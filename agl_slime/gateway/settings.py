"""How a gateway treats its clients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agl_slime.support.ranges import check_ranges
from agl_slime.tokens.images import ImageSettings

Branches = Literal["all", "used", "last"]
Constraints = Literal["mask", "drop", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """``branches``: which answers of a rollout are trained: ``used`` skips answers that were requested again and
    never continued; ``all``; ``last``, the conversation with the last answer. ``constraints``: what
    becomes of JSON schemas, regular expressions and tool choices that force a call, under which the engine's log-probs
    are not the policy's: ``drop`` samples freely, ``mask`` obeys and does not train those tokens, ``refuse`` answers
    400. ``untrained_models``: requests that name one of these (a judge, a user simulator) are answered by the policy
    and not trained. ``trained_models``: names, of resources beside ``main_llm`` or of models in requests, whose answers
    are trained as roles of their own.

    Limits of one rollout: ``max_turns`` answers and ``max_trajectory_tokens`` in one conversation, after which answers
    are empty; ``max_in_flight`` requests at once and ``max_requests`` in all, after which 429 is answered. A body has
    at most ``max_body_mb``. ``keep_alive_s``: a stream is never silent for longer. ``images``:
    what those may be that requests show.
    """

    host: str = "127.0.0.1"
    port: int = 0
    branches: Branches = "used"
    constraints: Constraints = "drop"
    untrained_models: tuple[str, ...] = ()
    trained_models: tuple[str, ...] = ()
    max_turns: int | None = None
    max_trajectory_tokens: int | None = None
    max_in_flight: int = 64
    max_requests: int = 10_000
    max_body_mb: float = 8.0
    keep_alive_s: float = 15.0
    images: ImageSettings = field(default_factory=ImageSettings)

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("branches", lambda value: value in ("all", "used", "last"), "one of all, used, last"),
            ("constraints", lambda value: value in ("mask", "drop", "refuse"), "one of mask, drop, refuse"),
            ("max_turns max_trajectory_tokens max_in_flight max_requests", lambda value: value > 0, "above 0"),
            ("port", lambda value: 0 <= value <= 65_535, "from 0, which takes a free one, to 65535"),
            ("max_body_mb keep_alive_s", lambda value: value > 0, "above 0"),
        )
