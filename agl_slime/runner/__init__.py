"""Runners: what executes the rollouts of a store, in a thread, in processes of this machine or on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_slime.runner.base import FinishedListener, RunnerPlan, RunnerPool
    from agl_slime.support.agl import LightningStore, LitAgent


def make_runners(
    plan: RunnerPlan | str,
    *,
    agent: LitAgent[Any],
    store: LightningStore,
    on_finished: FinishedListener | None = None,
) -> RunnerPool:
    """The runners of a plan (``inproc``, ``process:N``, ``ray:N``), not started yet.

    Args:
        store: a ``BridgeStore``, which is then served over HTTP to workers outside of this process; or a client of one
            that is served elsewhere.
        on_finished: told about each rollout that a thread of this process has executed; workers elsewhere tell the
            store.
    """
    from agl_slime.runner.base import RunnerPlan

    plan = RunnerPlan.parse(plan) if isinstance(plan, str) else plan
    if plan.kind == "inproc":
        from agl_slime.runner.thread import RunnerThread

        return RunnerThread(agent=agent, store=store, settings=plan.settings, on_finished=on_finished)
    from agl_slime.runner.worker import StoreAccess

    if plan.kind == "process":
        from agl_slime.runner.processes import ProcessPool as Pool
    else:
        from agl_slime.runner.ray import RayPool as Pool
    return Pool(agent=agent, access=StoreAccess(store, host=plan.store_host), count=plan.count, settings=plan.settings)
