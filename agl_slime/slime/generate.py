"""One Agent Lightning rollout for one slime prompt: what ``agl_slime.slime_hooks.generate`` does.

A data source of this process, made with the first rollout, learns of the ends; slime's event loop only waits. slime
does not say when it has no more prompts, so its thread, and the runner where the agent is in this process, live as long
as the process, or until ``stop_rollouts``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from agl_slime.datasource.ingestor import Producer
from agl_slime.datasource.source import GroupSource
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.groups.results import MemberResult
from agl_slime.loop.tasks import TaskGroup
from agl_slime.slime.args import PluginSettings
from agl_slime.slime.connection import Connection
from agl_slime.slime.replay import replay_sampling, with_tensors, with_train_inputs
from agl_slime.support.threads import run_in_thread
from agl_slime.types import ARRAY_FIELDS, Sample

logger = logging.getLogger(__name__)

# What a finished rollout says about a sample; the rest (index, group_index, prompt, label, session …) stays slime's.
_FROM_ROLLOUT = (
    *("tokens", "response", "response_length", "loss_mask", "rollout_log_probs"),
    *("reward", "status", "weight_versions", "prefix_cache_info"),
    *ARRAY_FIELDS,
    *("multimodal_inputs", "multimodal_train_inputs"),
)


async def run_rollout(
    args: Any, sample: Sample, sampling_params: Mapping[str, Any], *, evaluation: bool
) -> Sample | list[Sample]:
    """See ``agl_slime.slime_hooks.generate``."""
    task = {**(sample.metadata or {}), "prompt": sample.prompt, "label": sample.label}
    sampling = {**sampling_params, **({} if evaluation else replay_sampling(args))}
    rollouts = _rollouts_for(args)
    future = rollouts.run(task, sampling, mode="val" if evaluation else "train")
    member = await asyncio.wrap_future(future)
    if not member.ok:
        return _failed(sample, member)
    samples = await run_in_thread(with_train_inputs, with_tensors(member.samples), rollouts.tokenizer)
    completed = [_completed(sample, own) for own in samples]
    if len(completed) == 1:
        return completed[0]
    for sibling in completed:
        sibling.rollout_id = sample.index
    return completed


def _completed(sample: Sample, own: Sample) -> Sample:
    result = Sample.from_dict(sample.to_dict())
    for name in _FROM_ROLLOUT:
        if hasattr(own, name):
            setattr(result, name, getattr(own, name))
    result.metadata = {**(sample.metadata or {}), **own.metadata}
    return result


def _failed(sample: Sample, member: MemberResult) -> Sample:
    """The sample as FAILED, out of the loss. slime's batches need a reward and a response token of each sample: both
    are 0 here, and ``metadata["agl_failure"]`` says why."""
    failure = f"{member.failure}: {member.failure_message}"
    logger.warning("Rollout %s failed: %s", member.rollout_id, failure)
    result = Sample.from_dict(sample.to_dict())
    result.status, result.reward, result.remove_sample = Sample.Status.FAILED, 0.0, True
    result.tokens, result.response, result.response_length = [*(sample.tokens or [0]), 0], "", 1
    result.loss_mask, result.rollout_log_probs = [0], [0.0]
    result.metadata = {**(sample.metadata or {}), "agl_rollout_id": member.rollout_id, "agl_failure": failure}
    return result


@dataclass(frozen=True, slots=True)
class _Run:
    group: TaskGroup
    sampling: Mapping[str, Any]
    mode: Literal["train", "val"]
    result: Future[MemberResult] = field(default_factory=Future)
    enqueued: list[str] = field(default_factory=list)


class SingleRollouts(Producer):
    """Runs rollouts and gives each result to whoever asked for it, from any thread, until ``stop``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._runs: dict[str, _Run] = {}  # by group id
        self.tokenizer = tokenizer = connection.tokenizer()
        self.source = GroupSource(store=connection.store, tokenizer=tokenizer, convert_validation=True, producer=self)
        self.source.listen(on_member=self._ended)
        self.source.follower.begin()
        connection.start()

    def run(
        self, task: dict[str, Any], sampling_params: Mapping[str, Any], *, mode: Literal["train", "val"]
    ) -> Future[MemberResult]:
        """Enqueue one rollout; the future has its result, succeeded or failed. Cancelled, it has the rollout cancelled
        in the store."""
        run = _Run(TaskGroup(uuid.uuid4().hex, task), dict(sampling_params), mode)
        run.result.add_done_callback(lambda result: self._give_up(run) if result.cancelled() else None)
        with self.source.changed:
            self.source.raise_if_dead()
            self._runs[run.group.group_id] = run
        self.source.follower.submit(self._enqueue, run)
        return run.result

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the runner of this process and the thread; whoever still waits for a rollout gets ``DataSourceError``.
        Safe to call twice."""
        self._connection.stop()
        self.source.stop(timeout_s)
        self._refuse("the rollouts of this process were stopped")

    async def _enqueue(self, run: _Run) -> None:
        self.source.expect(run.group.group_id, size=1, mode="single")  # never in a group to be trained on
        enqueue = self._connection.enqueue
        rollouts = await self.source.follower.with_retries(
            lambda: enqueue([run.group], size=1, mode=run.mode, sampling=run.sampling)
        )
        self.source.opened(rollouts)
        run.enqueued.extend(rollout.rollout_id for rollout in rollouts)
        if run.result.cancelled():
            self._give_up(run)

    def _give_up(self, run: _Run) -> None:
        """Nobody waits for this rollout any more; one that is not in the store yet is given up when it is."""
        if run.enqueued and self._runs.pop(run.group.group_id, None) is not None:
            self.source.abandon(run.enqueued, group_ids=[run.group.group_id], reason="aborted")
            self.source.follower.submit(self.source.ingestor.cancel, run.enqueued)

    def _ended(self, member: MemberResult) -> None:
        run = self._runs.pop(member.group_id, None)
        if run is not None and not run.result.done() and run.result.set_running_or_notify_cancel():
            run.result.set_result(member)

    def store_restarted(self) -> None:
        self._connection.forget()
        for run in self._runs.values():
            self.source.follower.submit(self._enqueue, run)

    def failed(self, error: BaseException) -> None:
        self._refuse(f"the rollout's end cannot be learned: {error}")

    def _refuse(self, reason: str) -> None:
        with self.source.changed:
            runs, self._runs = self._runs, {}
        for run in runs.values():
            if not run.result.done():
                run.result.set_exception(DataSourceError(reason))


_rollouts: dict[str, SingleRollouts] = {}  # by their settings
_lock = threading.Lock()


def _rollouts_for(args: Any) -> SingleRollouts:
    settings = PluginSettings.from_args(args)
    if not settings.connected:
        raise ConfigError("there is no agent to run: set agl_store_url or agl_agent")
    with _lock:
        if (key := repr(settings)) not in _rollouts:
            _rollouts[key] = SingleRollouts(Connection(settings))
        return _rollouts[key]


def stop_rollouts() -> None:
    """End the runners and threads that rollouts of this process have started; the next rollout starts anew."""
    with _lock:
        stopped = list(_rollouts.values())
        _rollouts.clear()
    for rollouts in stopped:
        rollouts.stop()
