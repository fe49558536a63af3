"""Runners execute the rollouts of a store: where, as one word on the command line (``inproc``, ``process:4``,
``ray:16``), and what each kind can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from typing_extensions import Self

from agl_slime.errors import ConfigError

if TYPE_CHECKING:
    from agl_slime.runner.concurrent import RunnerSettings
    from agl_slime.support.agl import LightningStore, LitAgent

RunnerKind = Literal["inproc", "process", "ray"]
FinishedListener = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """``count`` runners, each with its own event loop: one thread of this process, processes of this machine, or Ray
    actors. ``settings`` are those of each; ``store_host`` is the address on which the store is served to those that are
    outside of this process."""

    kind: RunnerKind = "inproc"
    count: int = 1
    settings: RunnerSettings | None = None
    store_host: str = "127.0.0.1"

    @classmethod
    def parse(cls, text: str) -> RunnerPlan:
        """Read ``inproc``, ``process:N`` or ``ray:N``. Raises ``ConfigError``."""
        kind, colon, count = text.partition(":")
        number = int(count) if count.isascii() and count.isdigit() else 0
        if kind not in get_args(RunnerKind) or (kind == "inproc") == bool(colon) or (colon and number < 1):
            raise ConfigError(f"--runners {text!r}: expected inproc, process:N or ray:N with N at least 1")
        return cls(kind=kind, count=number or 1)  # type: ignore[arg-type]  # checked above

    def __str__(self) -> str:
        return self.kind if self.kind == "inproc" else f"{self.kind}:{self.count}"


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

    @abstractmethod
    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        """End all runners, with what is in flight cancelled or finished; nothing is left running. ``False`` when it was
        not enough to ask: workers are ended by force, a thread stays whose agent blocks its event loop."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def make_runners(
    plan: RunnerPlan | str,
    *,
    agent: LitAgent[Any],
    store: LightningStore,
    on_finished: FinishedListener | None = None,
) -> RunnerPool:
    """The runners of a plan (``inproc``, ``process:N``, ``ray:N``), not started yet.

    ``on_finished`` is told about each rollout that a thread of this process has executed; workers elsewhere tell the
    ``store``, a ``BridgeStore`` (then served over HTTP) or a client of one.
    """
    plan = RunnerPlan.parse(plan) if isinstance(plan, str) else plan
    if plan.kind == "inproc":
        from agl_slime.runner.thread import RunnerThread

        return RunnerThread(agent=agent, store=store, settings=plan.settings, on_finished=on_finished)
    if plan.kind == "process":
        from agl_slime.runner.processes import ProcessPool as Pool
    else:
        from agl_slime.runner.ray import RayPool as Pool
    return Pool(agent=agent, store=store, count=plan.count, settings=plan.settings, store_host=plan.store_host)
