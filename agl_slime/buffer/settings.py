"""Settings of the Rollout Buffer. The command line is derived from this class: a field is a flag, its docstring the
help text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agl_slime.buffer.pipeline import PipelineSettings
from agl_slime.errors import ConfigError

# Addresses that other machines cannot reach; anything else needs a token.
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, kw_only=True)
class BufferSettings:
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

    group_size: int = 16
    """Items per group until /start_rollout says num_repeat_per_sample."""
    default_task_type: str = "math"
    """Task type of items that come before any /start_rollout."""
    min_valid_group_size_ratio: float = 1.0
    """Share of the group size that must be there for a group to be valid."""
    min_valid_item_size_ratio: float = 0.7
    """Share of the group size that must be left after filtering."""
    group_timeout_seconds: float = 300.0
    """Seconds since its last item after which an incomplete group is used or dropped."""
    min_timeout_group_size_ratio: float = 0.7
    """Share of the group size that a group must have to be used after the timeout."""
    max_buffer_size: int = 1_000_000_000
    """Items that the buffer holds at most; writers are told to come back later."""
    reward_range: tuple[float, float] | None = None
    """Rewards outside of it mark failed items for the default stages; None takes any finite reward."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal."""

    max_body_mb: float = 64.0
    """Largest request body in megabytes."""
    request_timeout_s: float = 60.0
    """Seconds within which a request must have arrived and a batch must have been made."""
    generator_stall_s: float = 3600.0
    """End a generator that has not asked anything of the buffer for so many seconds; 0 is never."""
    generator_restarts: int = 3
    """How often a run whose generator failed or stalled is taken up again, where its items end."""
    keep_delivered_groups: int | None = None
    """Groups that were handed out and are kept for a trainer that lost them; 4096 with --run-dir and 256 without when
    not given."""

    def __post_init__(self) -> None:
        if self.host not in _LOOPBACK and not self.token:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines; set --token, or listen on 127.0.0.1"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must lie in 0..65535, got {self.port}")
        if self.generators is not None and not self.generators.is_dir():
            raise ConfigError(f"--generators {self.generators}: there is no such directory")
        for directory in self.input_dir:
            if not directory.is_dir():
                raise ConfigError(f"--input-dir {directory}: there is no such directory")
        for name in ("max_buffer_size", "max_body_mb", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {getattr(self, name)}")
        if self.generator_restarts < 0:
            raise ConfigError(f"--generator-restarts must not be negative, got {self.generator_restarts}")
        if self.generator_stall_s < 0:
            raise ConfigError(f"--generator-stall-s must be 0 (never) or more, got {self.generator_stall_s}")
        if (self.keep_delivered_groups or 0) < 0:
            raise ConfigError(f"--keep-delivered-groups must not be negative, got {self.keep_delivered_groups}")
        self.pipeline(group_size=self.group_size, task_type=self.default_task_type)

    @property
    def delivered_window(self) -> int:
        if self.keep_delivered_groups is not None:
            return self.keep_delivered_groups
        return 256 if self.run_dir is None else 4096

    @property
    def input_directories(self) -> tuple[Path, ...]:
        return self.input_dir or (Path.cwd(),)

    def pipeline(self, *, group_size: int, task_type: str) -> PipelineSettings:
        """The part that decides over groups."""
        return PipelineSettings(
            group_size=group_size,
            task_type=task_type,
            min_valid_group_size_ratio=self.min_valid_group_size_ratio,
            min_valid_item_size_ratio=self.min_valid_item_size_ratio,
            group_timeout_seconds=self.group_timeout_seconds,
            min_timeout_group_size_ratio=self.min_timeout_group_size_ratio,
            reward_range=self.reward_range,
            drop_zero_variance=self.drop_zero_variance,
        )
