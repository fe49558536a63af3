"""Settings of the Rollout Buffer. The command line is derived from these classes: a field is a flag, its docstring the
help text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from agl_slime.errors import ConfigError
from agl_slime.support.net import require_token
from agl_slime.support.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class PipelineSettings:
    """What decides over a group. Names and defaults are those of slime's Rollout Buffer documentation; ours are
    ``reward_range`` and ``drop_zero_variance``."""

    group_size: int = 16
    """Items per group until /start_rollout says num_repeat_per_sample."""
    min_valid_group_size_ratio: float = 1.0
    """Share of the group size that must be there for a group to be valid."""
    min_valid_item_size_ratio: float = 0.7
    """Share of the group size that must be left after filtering."""
    group_timeout_seconds: float = 300.0
    """Seconds since its last item after which an incomplete group is used or dropped."""
    min_timeout_group_size_ratio: float = 0.7
    """Share of the group size that a group must have to be used after the timeout."""
    reward_range: tuple[float, float] | None = None
    """Rewards outside of it mark failed items for the default stages; without it -1 does, and any other finite reward
    is trained on."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal: they teach a group-relative method nothing."""

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
    """Serve a Rollout Buffer: generators write rollouts to it, the trainer takes groups from it."""

    host: str = "127.0.0.1"
    """Address to listen on. Other machines reach it only with another address, which needs --token."""
    port: int = 8889
    """Port to listen on; 0 takes a free one."""
    token: str | None = None
    """Secret that clients send as `Authorization: Bearer TOKEN`; AGL_SLIME_BUFFER_TOKEN is read when the flag is not
    given."""
    generators: Path | None = None
    """Directory with *_generator.py files. Their code is run: name only what you trust. Without it the generators
    shipped with agl-slime are used."""
    input_dir: tuple[Path, ...] = ()
    """Directories that input files may lie in; the working directory when none is given."""
    run_dir: Path | None = None
    """Directory for the buffer's database and the generators' logs. With it, nothing written is lost when the buffer
    dies; without it, all is in memory."""
    resume: bool = True
    """Start generators again that were running when the buffer died (needs --run-dir)."""

    default_task_type: str = "math"
    """Task type of items that come before any /start_rollout."""
    max_buffer_size: int = 1_000_000_000
    """Items that the buffer holds at most; writers are told to come back later."""
    max_body_mb: float = 64.0
    """Largest request body in megabytes."""
    request_timeout_s: float = 60.0
    """Seconds within which a batch must have been made; a request that stops arriving for so long is cut off."""
    generator_stall_s: float = 3600.0
    """End a generator that has not asked anything of the buffer for so many seconds; 0 is never."""
    generator_restarts: int = 3
    """How often a run whose generator failed or stalled is taken up again, where its items end."""
    keep_delivered_groups: int | None = None
    """Groups that were delivered and are kept for a trainer that lost them; 4096 with --run-dir and 256 without when
    not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_token(self.host, self.token, setting="--token")
        check_ranges(
            self,
            ("port", lambda value: 0 <= value <= 65535, "in 0..65535"),
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
