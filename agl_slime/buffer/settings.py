"""Settings of the Rollout Buffer, and its command line: each field is a flag, each docstring its help text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from agl_slime.errors import ConfigError
from agl_slime.support.net import require_token
from agl_slime.support.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """Rules for groups, with the names and defaults of slime's Rollout Buffer documentation, plus ``reward_range`` and
    ``drop_zero_variance``."""

    group_size: int = 16
    """Items per group until /start_rollout sets num_repeat_per_sample."""
    min_valid_group_size_ratio: float = 1.0
    """Share of the group size that makes a group valid."""
    min_valid_item_size_ratio: float = 0.7
    """Share of the group size that must remain after filtering."""
    group_timeout_seconds: float = 300.0
    """Seconds since its last item after which an incomplete group is used or dropped."""
    min_timeout_group_size_ratio: float = 0.7
    """Share of the group size needed to use a group after the timeout."""
    reward_range: tuple[float, float] | None = None
    """Range of valid rewards for the default stages; other rewards mark failed items. By default only -1 does."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal: their advantages are 0."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("group_size", lambda value: value >= 1, "at least 1"),
            ("min_valid_group_size_ratio min_valid_item_size_ratio", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("min_timeout_group_size_ratio", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("group_timeout_seconds", lambda value: value > 0, "above 0"),
            ("reward_range", lambda value: value[0] <= value[1], "(lowest, highest)"),
        )

    def items_for(self, ratio: float) -> int:
        return max(1, math.ceil(ratio * self.group_size - 1e-9))  # 0.07 * 100 is 7.000000000000001

    @property
    def min_valid_group_size(self) -> int:
        return self.items_for(self.min_valid_group_size_ratio)


@dataclass(frozen=True, kw_only=True)
class BufferSettings(PipelineSettings):
    """Serve a Rollout Buffer: generators write rollouts to it, the trainer reads groups from it."""

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines can reach needs --token."""
    port: int = 8889
    """Port to listen on; 0 takes a free one."""
    token: str | None = None
    """Secret that clients send as `Authorization: Bearer TOKEN`; default: AGL_SLIME_BUFFER_TOKEN."""
    generators: Path | None = None
    """Directory with *_generator.py files, whose code is run: use only files that you trust. Default: the generators
    shipped with agl-slime."""
    input_dir: tuple[Path, ...] = ()
    """Allowed directories of input files; default: the working directory."""
    run_dir: Path | None = None
    """Directory for the buffer's database and the generators' logs, which survive a crash; default: in memory."""
    resume: bool = True
    """Restart the generators that were running when the buffer died (needs --run-dir)."""

    max_buffer_size: int = 1_000_000_000
    """Most items in the buffer; when it is full, writers get 503."""
    max_body_mb: float = 64.0
    """Largest request body in megabytes."""
    request_timeout_s: float = 60.0
    """Longest time for a batch, and longest stall of an incoming request, in seconds."""
    generator_stall_s: float = 3600.0
    """Seconds without a request after which a generator is killed; 0 is never."""
    generator_restarts: int = 3
    """Restarts of a run whose generator failed or stalled; each continues after the items written so far."""
    keep_delivered_groups: int | None = None
    """Delivered groups kept for a trainer that lost them; default: 4096 with --run-dir, 256 without."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token(self.host, self.token, setting="--token")
        check_ranges(
            self,
            ("max_buffer_size max_body_mb request_timeout_s", lambda value: value > 0, "above 0"),
            ("generator_restarts generator_stall_s keep_delivered_groups", lambda value: value >= 0, "0 or more"),
            named=lambda name: f"--{name.replace('_', '-')}",
        )
        for flag, paths in (("--generators", (self.generators,)), ("--input-dir", self.input_dir)):
            for path in paths:
                if path is not None and not path.is_dir():
                    raise ConfigError(f"{flag} {path}: there is no such directory")

    @property
    def delivered_window(self) -> int:
        if self.keep_delivered_groups is not None:
            return self.keep_delivered_groups
        return 256 if self.run_dir is None else 4096
