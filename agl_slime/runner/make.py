"""``make_runners``: the runner pool of a plan."""

from __future__ import annotations

from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.runner.base import FinishedListener, RunnerPlan, RunnerPool
from agl_slime.runner.thread import RunnerThread
from agl_slime.support.agl import LightningStore, LitAgent


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
        return RunnerThread(agent=agent, store=store, settings=plan.settings, on_finished=on_finished)
    if plan.kind == "process":
        from agl_slime.runner.processes import ProcessPool as Pool
    else:
        from agl_slime.runner.ray import RayPool as Pool
    return Pool(plan=plan, agent=agent, store=store)
