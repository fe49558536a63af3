"""Plans, settings and the interface of runners, which execute the rollouts of a store. A plan is one word on the
command line: ``inproc``, ``process:4``, ``ray:16``, ``controller``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.ranges import check_ranges

if TYPE_CHECKING:  # seconds to import, which --help does not need
    from agl_slime.support.agl import LightningStore, LitAgent

RunnerKind = Literal["inproc", "process", "ray", "controller"]
FinishedListener = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Settings of the runner of one process."""

    max_concurrent: int = 1024
    """Rollouts in flight; a rollout that waits for the engine costs tens of kilobytes."""
    max_sync_threads: int = 256
    """Rollouts in flight of an agent that is not async; each has a thread."""
    claim_batch: int = 128
    """Most rollouts claimed in one store call. A runner begins with fewer and doubles while it gets all it asks for, so
    that several runners share a short queue."""
    poll_interval_s: float = 0.05
    """Pause between polls of an empty queue; ``wake`` ends it."""
    timeout_s: float | None = None
    """Time limit of rollouts whose configuration has none."""
    heartbeat_interval_s: float = 10.0
    """Interval of Agent Lightning's heartbeats; 0 = off."""
    flush_interval_s: float = 30.0
    """Longest time before spans of a running attempt are written; at most a third of ``unresponsive_seconds``."""
    lag_warning_s: float = 1.0
    """Block of the event loop after which a warning names the agent; 0 = off."""
    stuck_after_s: float = 40.0
    """Time without progress (interpreter lock held, or event loop blocked) after which a worker process is killed and
    replaced. Other processes may hold the lock for this long, or for the longest time limit of their rollouts. 0 =
    off."""
    max_restarts: int | None = None
    """Dead workers that a pool replaces in total; ``None`` = three per worker: enough for accidents, not for an agent
    that kills every process."""
    gateway: GatewaySettings | None = field(default_factory=GatewaySettings)
    """The gateway that replaces the engine for agents other than ``SGLangLitAgent``; ``None`` = the engine itself."""

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
    """``count`` runners with the same ``settings``, each with its own event loop: a thread of this process, processes
    of this machine, or Ray actors; the store is served to other processes on ``store_host``, the value of the setting
    ``store_setting``. Kind ``controller``: Agent Lightning 1.0's controller executes the rollouts."""

    kind: RunnerKind = "inproc"
    count: int = 1
    settings: RunnerSettings | None = None
    store_host: str = "127.0.0.1"
    store_setting: str = "--store-host"
    controller: ControllerSettings | None = None

    @classmethod
    def parse(cls, text: str, *, named: str = "--runners") -> RunnerPlan:
        """Parse ``inproc``, ``controller``, ``process:N`` or ``ray:N``. Raises ``ConfigError`` about ``named``."""
        kind, colon, count = text.partition(":")
        number = int(count) if count.isascii() and count.isdigit() else 0
        alone = kind in ("inproc", "controller")
        if kind not in get_args(RunnerKind) or alone == bool(colon) or (colon and number < 1):
            raise ConfigError(f"{named} {text!r}: expected inproc, controller, process:N or ray:N with N at least 1")
        return cls(kind=kind, count=number or 1)  # type: ignore[arg-type]  # checked above

    def __str__(self) -> str:
        return self.kind if self.kind in ("inproc", "controller") else f"{self.kind}:{self.count}"


class RunnerPool(ABC):
    """The runners of one store; a context manager that ends them all."""

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """The error that ended the runners."""

    @abstractmethod
    def start(self) -> Self:
        """Start the runners and wait until one can execute rollouts; processes take seconds. Raises ``LoopError`` or
        ``ConfigError``."""

    @abstractmethod
    def wake(self) -> None:
        """Poll the queue now."""

    @abstractmethod
    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        """End all runners after their rollouts were cancelled, or have finished. Returns ``False`` when some did not
        end within ``timeout_s``: workers are killed then, a thread whose agent blocks its event loop is left behind."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def make_runners(
    plan: RunnerPlan | str,
    *,
    agent: LitAgent[Any] | None,
    store: LightningStore,
    on_finished: FinishedListener | None = None,
) -> RunnerPool:
    """The runners of a plan, not started yet. A controller's runners load their agent themselves.

    ``on_finished`` is called for each rollout that a thread of this process has executed. Workers in other processes
    report to the ``store``: a ``BridgeStore``, which is then served over HTTP, or a client of one.
    """
    plan = RunnerPlan.parse(plan) if isinstance(plan, str) else plan
    if plan.kind == "controller":
        from agl_slime.runner.controller import ControllerPool

        return ControllerPool(plan=plan, store=store)
    if agent is None:
        raise ConfigError(f"runners {plan}: there is no agent for them to run")
    if plan.kind == "inproc":
        from agl_slime.runner.concurrent import RunnerThread

        return RunnerThread(agent=agent, store=store, settings=plan.settings, on_finished=on_finished)
    if plan.kind == "process":
        from agl_slime.runner.process_pool import ProcessPool as Pool
    else:
        from agl_slime.runner.ray import RayPool as Pool
    return Pool(plan=plan, agent=agent, store=store)
