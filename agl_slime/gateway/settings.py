"""``GatewaySettings``: the address of a gateway, which answers are trained, and limits of a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agl_slime.errors import ConfigError
from agl_slime.support.net import shown_url
from agl_slime.support.ranges import check_ranges
from agl_slime.tokens.images import ImageSettings

Branches = Literal["all", "used", "last"]
Constraints = Literal["mask", "drop", "refuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """A gateway's address, the answers that are trained, and the limits of one rollout."""

    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = 0
    """Port to bind; 0 takes a free one."""
    public_url: str | None = None
    """URL at which agents reach the gateway, through a tunnel or a port of their container, say; needs a port. By
    default it is the host's, or for a wildcard host the address of this machine (``net.public_host``)."""
    branches: Branches = "used"
    """Which answers of gateway agents are trained: used (skip answers that were requested again and never continued),
    all, or last (the conversation with the last answer)."""
    constraints: Constraints = "drop"
    """JSON schemas, regular expressions and forced tool calls, under which the engine's log-probs are not the policy's:
    drop (sampled freely and trained), mask (obeyed and not trained) or refuse (answered with 400)."""
    untrained_models: tuple[str, ...] = ()
    """Model names of requests that the policy answers and that are not trained: a judge, a user simulator."""
    trained_models: tuple[str, ...] = ()
    """Further roles that are trained: names of LLM resources beside main_llm, or model names of requests."""
    max_turns: int | None = None
    """Most answers of one rollout; later ones are empty."""
    max_trajectory_tokens: int | None = None
    """Most tokens of one conversation; later answers are empty."""
    max_in_flight: int = 64
    """Most concurrent requests of a rollout; more get 429."""
    max_body_mb: float = 8.0
    """Largest request body, in MB."""
    max_messages: int = 10_000
    """Most messages of one request; more get 413."""
    images: ImageSettings = field(default_factory=ImageSettings)
    """Limits of images in requests."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("branches", lambda value: value in ("all", "used", "last"), "one of all, used, last"),
            ("constraints", lambda value: value in ("mask", "drop", "refuse"), "one of mask, drop, refuse"),
            ("max_turns max_trajectory_tokens max_in_flight", lambda value: value > 0, "above 0"),
            ("public_url", lambda value: value.startswith(("http://", "https://")), "an http:// or https:// URL"),
            ("max_body_mb max_messages", lambda value: value > 0, "above 0"),
            ("untrained_models", lambda value: not {*value} & {*self.trained_models}, "other models than the trained"),
        )
        if self.public_url is not None and not self.port:
            raise ConfigError(f"public_url {shown_url(self.public_url)} leads to one port: give that as port")
