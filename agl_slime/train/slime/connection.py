"""The connection of slime's data source to a store: tokenizer, and tasks and runners if configured."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agl_slime.agent.access import LLM_RESOURCE, check_replay, replay_of
from agl_slime.agent.loading import load_agent
from agl_slime.data.enqueueing import TaskGroup, enqueue_requests
from agl_slime.data.ingestor import Producer
from agl_slime.data.policy import CompleteGroup, RetryGroup, zero_variance
from agl_slime.data.source import DataSourceSettings
from agl_slime.data.teacher import Teacher, Teachers
from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.errors import ConfigError, DataSourceError, EngineError
from agl_slime.loop.tasks import TaskCursor, ValidationTasks, as_task_source, ordered_tasks, read_tasks
from agl_slime.runner.base import RunnerPool, make_runners
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.support.agl import LLM, Rollout
from agl_slime.support.files import scratch_directory
from agl_slime.support.terminal import log_plainly
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.tokenizer import set_template_kwargs
from agl_slime.train.slime.args import PluginSettings

logger = logging.getLogger(__name__)

# For the engine's weight version, which the next rollout queries again.
_QUICK = ClientSettings(control_timeout_s=5.0, max_attempts=1)
# Cached resources snapshots; a store keeps some more.
_MOST_SNAPSHOTS = 256


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation of ``tasks``, reported under ``name``; ``sampling`` is slime's own if ``None``."""

    name: str
    tasks: ValidationTasks
    sampling: Mapping[str, Any] | None = None


class Connection(Producer):
    """A remote store, whose runners are elsewhere, or a store in this process with its runners, which ``start`` and
    ``stop``. ``tasks`` is ``None`` when another process enqueues rollouts."""

    def __init__(self, settings: PluginSettings) -> None:
        log_plainly()  # failures of rollouts have texts of models
        self.settings = settings
        self.store: RemoteStore | BridgeStore
        self._runner: RunnerPool | None = None
        make_task: Any = None
        if settings.store_url is not None:
            self.store = RemoteStore(settings.store_url, token=settings.store_token)
        else:
            plan, agent = settings.plan(), None
            if plan.kind != "controller":  # a controller's agent is imported by another Python
                assert settings.agent is not None
                agent = load_agent(settings.agent)
                make_task = getattr(agent, "make_task", None)
            self.store = BridgeStore()
            self._runner = make_runners(plan, agent=agent, store=self.store)
        tokenizer, data = self.tokenizer(), settings.prompt_data
        tasks: list[Any] = read_tasks(settings.tasks, flag="agl_tasks") if settings.tasks is not None else []
        if data is not None:
            tasks = data.read(tokenizer)
        self.epoch_size = len(tasks) or None
        seed, learnable = settings.loop.seed, settings.loop.learnable
        in_order = data is not None and not data.shuffle and not learnable
        source = ordered_tasks(tasks) if in_order else tasks or make_task
        self.tasks: TaskCursor | None = None
        if source is not None:
            self.tasks = TaskCursor(as_task_source(source, seed=seed, learnable=learnable), named=False)
        self.evals: list[Evaluation] = []
        for eval_set in settings.eval_sets:
            rows = eval_set.data.read(tokenizer, flag=f"evaluation data set {eval_set.name}:")
            # the rollouts of a row in succession, as slime's pass rate counts them
            eval_tasks = ValidationTasks(ordered_tasks(rows), n=len(rows), times=eval_set.samples)
            self.evals.append(Evaluation(eval_set.name, eval_tasks, eval_set.sampling))
        path, n, times = settings.eval_tasks, settings.loop.eval_rollouts, settings.eval_samples
        eval_source = make_task if path is None else read_tasks(path, flag="agl_eval_tasks")
        if eval_source is not None and not self.evals:
            if n % times:
                raise ConfigError(f"agl_eval_rollouts {n} is no multiple of --n-samples-per-eval-prompt {times}")
            eval_tasks = ValidationTasks(as_task_source(eval_source, seed=seed + 1), n=n // times, times=times)
            self.evals.append(Evaluation("agl", eval_tasks))
        if self._runner is not None and self.tasks is None:
            fix = "" if settings.runners == "controller" else ", or give it make_task(rng)"
            agent_name = settings.agent or settings.controller.job_template
            raise ConfigError(f"{agent_name} has no tasks: set agl_tasks or --prompt-data{fix}")
        if settings.max_staleness is not None and self.tasks is None:
            reason = "limits how many groups are enqueued, and here another process enqueues them"
            raise ConfigError(f"agl_max_staleness {settings.max_staleness} {reason}: set agl_tasks, or leave it out")
        self._scratch = ExitStack()
        self.replay_files = settings.replay_files
        if self.replay_files is None and settings.store_url is None and replay_of(settings.sampling or {}):
            scratch = scratch_directory(Path(tempfile.gettempdir()).resolve(), "agl-slime-replay")
            self.replay_files = self._scratch.enter_context(scratch)
        teachers = [Teacher.parse(text) for text in settings.teacher_url]
        self.teachers = Teachers(teachers) if teachers else None
        self._resources: dict[str, str] = {}
        self._checked = False  # whether the engine was checked to send replay data

    def data_source_settings(self) -> DataSourceSettings:
        """Settings for groups of exactly ``n_samples_per_prompt`` rollouts, as slime needs them: failed rollouts are
        run again, incomplete groups replaced."""
        settings = self.settings
        retries, timeout_s = settings.group.max_retries, settings.group.timeout_s
        complete = CompleteGroup(timeout_s=timeout_s)
        return DataSourceSettings(
            get_timeout_s=settings.get_timeout_s,
            blocking=settings.blocking,
            policy=RetryGroup(max_retries=retries, timeout_s=timeout_s) if retries else complete,
            group_filter=zero_variance if settings.drop_zero_variance else None,
        )

    def tokenizer(self) -> Any:
        """The tokenizer of slime's ``--hf-checkpoint``; ``None`` without such a directory (samples then keep the
        engine's text)."""
        model = self.settings.model
        if not model or not Path(model).is_dir():
            return None
        tokenizer = load_tokenizer(model)
        set_template_kwargs(tokenizer, (self.settings.sampling or {}).get("chat_template_kwargs", {}))
        return tokenizer

    def start(self) -> None:
        if self._runner is not None:
            self._runner.start()

    def stop(self) -> None:
        if self._runner is not None:
            self._runner.stop(timeout_s=3.0)
        self._scratch.close()

    def store_restarted(self) -> None:
        self._resources.clear()  # published again before the next rollout

    async def enqueue(
        self,
        groups: Sequence[TaskGroup],
        *,
        size: int,
        mode: Literal["train", "val"],
        sampling: Mapping[str, Any] | None = None,
        **metadata: Any,
    ) -> list[Rollout]:
        """Enqueue ``size`` rollouts per group, with ``sampling`` or slime's sampling parameters."""
        default = self.settings.sampling if mode == "train" else self.settings.eval_sampling
        sampling = dict(sampling if sampling is not None else default or {})
        if self.replay_files is not None and replay_of(sampling):
            sampling["replay_files"] = str(self.replay_files)
        requests = enqueue_requests(
            groups,
            size=size,
            mode=mode,
            resources_id=await self._publish(sampling),
            timeout_s=self.settings.loop.rollout_timeout_s,
            max_attempts=self.settings.loop.max_attempts,
            seed=self.settings.loop.seed,
            **metadata,
        )
        rollouts = [*await self.store.enqueue_many_rollouts(requests)]
        if self._runner is not None:
            self._runner.wake()
        return rollouts

    async def _publish(self, sampling: dict[str, Any]) -> str:
        """The id of a resources snapshot with the engine and these sampling parameters, added on first use."""
        if not self._checked and self.settings.llm_url and replay_of(sampling):
            self._checked = await check_replay(self.settings.llm_url, sampling)
        key = json.dumps(sampling, sort_keys=True, default=str)
        if key not in self._resources:
            if len(self._resources) >= _MOST_SNAPSHOTS:
                self._resources.clear()
            url, model = self.settings.llm_url or "", self.settings.model or ""
            llm = LLM(endpoint=url, model=model, sampling_parameters=sampling)
            self._resources[key] = (await self.store.add_resources({LLM_RESOURCE: llm})).resources_id
        return self._resources[key]

    async def weight_version(self) -> str | None:
        """The weight version of the agents' engine; ``None`` when the engine does not report it."""
        try:
            async with SGLangClient(base_url=self.settings.llm_url or "", settings=_QUICK) as client:
                urls = await client.workers()
            async with SGLangClient(base_url=urls[0], settings=_QUICK) as worker:
                return await worker.weight_version()
        except (EngineError, ConfigError) as error:
            logger.debug("The engine did not report its weight version: %s", error)
            return None

    def raise_if_dead(self) -> None:
        if self._runner is not None and self._runner.failure is not None:
            raise DataSourceError(f"the runner ended: {self._runner.failure}") from self._runner.failure
