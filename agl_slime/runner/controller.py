"""``ControllerPool``: rollouts executed by Agent Lightning 1.0's controller, as processes or Kubernetes Jobs."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from agl_slime.errors import ConfigError, LoopError
from agl_slime.gateway.agl1.schemas import Config, K8sConfig, LocalConfig
from agl_slime.gateway.agl1.server import ControllerGateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.runner.base import RunnerPlan, RunnerPool, RunnerSettings
from agl_slime.runner.controller_process import KEY_REFERENCE, ControllerProcess, check_python, end_agents
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LightningStore, Rollout
from agl_slime.support.child import Supervisor
from agl_slime.support.threads import run_blocking

logger = logging.getLogger(__name__)

# Rollouts wait this long without any controller before a warning.
_NO_CONTROLLER_S = 30.0
_POLL_S = 0.2


class ControllerPool(RunnerPool):
    """Serves Agent Lightning 1.0's API for the rollouts of ``store``. Starts a controller if the plan names a Python
    that has one, or the plan's worker commands; otherwise waits for a controller started elsewhere."""

    def __init__(self, *, plan: RunnerPlan, store: LightningStore) -> None:
        if plan.controller is None:
            raise ConfigError("runners controller: the plan needs ControllerSettings, which name the agent")
        if not isinstance(store, BridgeStore):
            raise ConfigError("runners controller need another store: pass store=agl_slime.BridgeStore()")
        self._store = store
        settings = plan.controller
        if settings.python is not None and settings.key is None:
            settings = replace(settings, key=secrets.token_urlsafe(18))
        self._settings = settings
        self._limits = plan.settings or RunnerSettings()
        template = settings.job_template.read_text() if settings.job_template is not None else None
        self.gateway = ControllerGateway(
            store=store,
            key=settings.key,
            config=Config(
                local=LocalConfig(agent_class=settings.agent, env_map=settings.env_paths) if settings.agent else None,
                k8s=K8sConfig(job_template=template) if template is not None else None,
            ),
            settings=replace(self._limits.gateway or GatewaySettings(), host=settings.host, port=settings.port),
        )
        self._numbers = itertools.count(1)
        self._supervisor = Supervisor(
            launch=self._new_child,
            follow=self._follow,
            on_lost=self._lost,
            kill=ControllerProcess.stop,
            restarts=settings.max_restarts,
        )
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None
        self._unsubscribe: Callable[[], object] = lambda: None

    @property
    def failure(self) -> BaseException | None:
        return self._supervisor.failure

    @property
    def url(self) -> str:
        """The API's address for controllers and agents."""
        return self.gateway.url

    @property
    def command(self) -> str:
        kind = "local" if self._settings.agent is not None else "k8s"
        key = f" 'agl_server.key={KEY_REFERENCE}'" if self._settings.key else ""
        return f"agl-controller runner_type={kind} agl_server.url={self.url}{key}"

    def start(self) -> Self:
        if self._watcher is not None:
            raise LoopError("The controller's pool was started already; make a new one to run again.")
        worker, python = self._settings.worker, self._settings.python
        if python is not None and worker is None:
            check_python(python)
        try:
            self.gateway.start()
            self._supervisor.start(worker.count if worker is not None else int(python is not None))
        except BaseException:
            self._end_children()
            self.gateway.stop()
            raise
        self._unsubscribe = self._store.subscribe_finished(self._has_ended)
        self._watcher = threading.Thread(target=self._watch, name="agl-slime-controller", daemon=True)
        self._watcher.start()
        if not self._supervisor.supervised:
            logger.warning("Rollouts wait for a controller of Agent Lightning 1.0: %s", self.command)
        return self

    def wake(self) -> None:
        """Does nothing: controllers poll."""

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        deadline = time.monotonic() + timeout_s
        while not cancel and self._store.running() and time.monotonic() < deadline:
            self._stopping.wait(_POLL_S)
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        self._end_children()
        unfinished = self._store.running()
        for rollout in unfinished:
            run_blocking(self._store.update_rollout(rollout.rollout_id, status="cancelled"))
        self._unsubscribe()
        self.gateway.stop()
        return not unfinished or cancel

    def _end_children(self) -> None:
        self._supervisor.stop()
        children = self._supervisor.unended_after(0.0)
        for child in children:
            child.stop()
        self._supervisor.join()
        if children:
            end_agents(self.url)

    def _new_child(self) -> tuple[str, ControllerProcess]:
        """Start a child under a new name, which tells late requests of an earlier child's agents from its own."""
        name = f"child-{next(self._numbers)}"
        child = ControllerProcess(self._settings, url=f"{self.url}/controller/{name}")
        return name, child.start()

    def _follow(self, name: str, child: ControllerProcess) -> str:
        child.wait()
        reason = f"{child.name} has ended: {child.ending()}"
        child.stop()
        if not self._supervisor.stopping:
            end_agents(f"{self.url}/controller/{name}")
            self.gateway.fail_rollouts_of(name)
            logger.warning("%s", reason[0].upper() + reason[1:])
        return reason

    def _lost(self, reason: str) -> None:
        if not self._supervisor.stopping:
            self._supervisor.fail(LoopError(reason))

    def _has_ended(self, rollout: Rollout) -> None:
        if rollout.status == "succeeded":
            self._supervisor.restore_restarts()

    def _watch(self) -> None:
        """Warn once that rollouts wait without a controller."""
        waiting_since, warned = time.monotonic(), False
        while not self._stopping.wait(_POLL_S):
            if self.gateway.polls or not self._store.waiting(1):
                waiting_since = time.monotonic()
            elif not warned and time.monotonic() - waiting_since > _NO_CONTROLLER_S:
                warned = True
                fix = f"start one: {self.command}"
                if self._supervisor.supervised:  # of this run, and a slow machine's takes longer
                    fix = "the one that this run started has not begun; its output is in the run's controller.log"
                logger.warning("No controller has asked for a rollout in %g s; %s", _NO_CONTROLLER_S, fix)
