"""Runners execute the rollouts of a store: where, as one word on the command line (``inproc``, ``process:4``,
``ray:16``), and what each kind can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from agl_slime.agl1.settings import ControllerSettings
from agl_slime.errors import ConfigError
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.ranges import check_ranges

RunnerKind = Literal["inproc", "process", "ray", "controller"]
FinishedListener = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """How one process executes rollouts.

    ``max_concurrent``: rollouts in flight; a rollout that waits for the engine costs tens of kilobytes.
    ``max_sync_threads``: rollouts in flight of an agent that is not async, each in a thread. ``claim_batch``: most
    rollouts claimed in one store call; a runner begins with few and doubles as long as it gets all it asks for, so that
    several runners share a short queue. ``poll_interval_s``: pause between looks at an empty queue, cut short by
    ``wake``. ``timeout_s``: time limit of rollouts whose own configuration has none. ``heartbeat_interval_s``: as Agent
    Lightning's; 0 is off. ``flush_interval_s``: spans of an attempt that still runs wait at most so long to be written,
    and at most a third of the rollout's ``unresponsive_seconds``. ``lag_warning_s``: a warning names the agent that
    blocks the event loop for so long; 0 is off. ``stuck_after_s``: a worker process is killed and replaced when for so
    long no Python code has run in it, because some holds the interpreter lock, or its event loop has stood still; a
    process that is more than a worker says where it is stuck; 0 is off. ``max_restarts``: dead workers that a pool of
    processes or Ray actors replaces in all; ``None`` is three per worker, enough for accidents, not for an agent that
    kills every process it runs in. ``gateway``: what agents that are no ``SGLangLitAgent`` find in the place of the
    engine; ``None`` shows them the engine itself.
    """

    max_concurrent: int = 1024
    max_sync_threads: int = 256
    claim_batch: int = 128
    poll_interval_s: float = 0.05
    timeout_s: float | None = None
    heartbeat_interval_s: float = 10.0
    flush_interval_s: float = 30.0
    lag_warning_s: float = 1.0
    stuck_after_s: float = 60.0
    max_restarts: int | None = None
    gateway: GatewaySettings | None = field(default_factory=GatewaySettings)

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("max_concurrent max_sync_threads claim_batch", lambda value: value >= 1, "at least 1"),
            ("poll_interval_s flush_interval_s timeout_s", lambda value: value > 0, "above 0 seconds"),
            ("heartbeat_interval_s lag_warning_s stuck_after_s", lambda value: value >= 0, "0 (off) or more seconds"),
            ("max_restarts", lambda value: value >= 0, "0 or more, or None for three per worker"),
        )


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """``count`` runners, each with its own event loop: one thread of this process, processes of this machine, or Ray
    actors. ``settings`` are those of each; ``store_host`` is the address on which the store is served to those that are
    outside of this process. ``controller`` runners are those of Agent Lightning 1.0, as its settings say."""

    kind: RunnerKind = "inproc"
    count: int = 1
    settings: RunnerSettings | None = None
    store_host: str = "127.0.0.1"
    controller: ControllerSettings | None = None

    @classmethod
    def parse(cls, text: str, *, named: str = "--runners") -> RunnerPlan:
        """Read ``inproc``, ``controller``, ``process:N`` or ``ray:N`` of the setting ``named``. Raises
        ``ConfigError``."""
        kind, colon, count = text.partition(":")
        number = int(count) if count.isascii() and count.isdigit() else 0
        alone = kind in ("inproc", "controller")
        if kind not in get_args(RunnerKind) or alone == bool(colon) or (colon and number < 1):
            raise ConfigError(f"{named} {text!r}: expected inproc, controller, process:N or ray:N with N at least 1")
        return cls(kind=kind, count=number or 1)  # type: ignore[arg-type]  # checked above

    def __str__(self) -> str:
        return self.kind if self.kind in ("inproc", "controller") else f"{self.kind}:{self.count}"


class RunnerPool(ABC):
    """Runners that execute the rollouts of one store; a context manager that leaves nothing running."""

    failure: BaseException | None = None
    """Why no rollouts are executed any more, when ``stop`` is not the reason."""

    @abstractmethod
    def start(self) -> Self:
        """Returns when rollouts can be executed, after seconds where processes start. Raises ``LoopError`` or
        ``ConfigError``."""

    @abstractmethod
    def wake(self) -> None:
        """Look at the queue now."""

    @property
    def in_flight(self) -> int:
        """Rollouts that are being executed, where that can be told here."""
        raise ConfigError(f"{type(self).__name__} cannot tell how many rollouts are in flight: use --runners inproc")

    def set_limit(self, limit: int) -> None:
        """From now on as many rollouts in flight, where that can be changed from here."""
        raise ConfigError(f"{type(self).__name__} cannot change how many rollouts are in flight: use --runners inproc")

    @abstractmethod
    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        """End all runners, with what is in flight cancelled or finished; nothing is left running. ``False`` when it was
        not enough to ask: workers are ended by force, a thread stays whose agent blocks its event loop."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()
