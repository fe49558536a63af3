"""One Agent Lightning rollout for one slime prompt, for ``agl_slime.slime_hooks.generate``.

The first rollout creates a data source in this process, which follows completions; slime's event loop only waits. slime
does not announce its last prompt, so the data source's thread, and the runner of an agent in this process, live until
``stop_rollouts`` or the end of the process.
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

from agl_slime.data.ingestor import Producer
from agl_slime.data.results import MemberResult
from agl_slime.data.source import GroupSource
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.loop.tasks import TaskGroup
from agl_slime.support.threads import run_in_thread
from agl_slime.train.slime.args import PluginSettings, context_length
from agl_slime.train.slime.connection import Connection
from agl_slime.train.slime.replay import replay_sampling, with_tensors, with_train_inputs
from agl_slime.types import ARRAY_FIELDS, Sample

logger = logging.getLogger(__name__)

# Fields of a sample that come from the rollout; the others (index, group_index, prompt, label, session …) stay slime's.
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
    sampling = {**sampling_params, **context_length(args, evaluation=evaluation)}
    if not evaluation:
        sampling |= replay_sampling(args)
    rollouts = _rollouts_for(args)
    future = rollouts.run(task, sampling, mode="val" if evaluation else "train")
    member = await asyncio.wrap_future(future)
    if not member.ok:
        return _failed(sample, member)
    samples = await run_in_thread(with_train_inputs, with_tensors(member.samples), rollouts.tokenizer)
    completed = [_completed(sample, from_rollout) for from_rollout in samples]
    if len(completed) == 1:
        return completed[0]
    for sibling in completed:
        sibling.rollout_id = sample.index
    return completed


def _completed(sample: Sample, from_rollout: Sample) -> Sample:
    result = Sample.from_dict(sample.to_dict())
    for name in _FROM_ROLLOUT:
        if hasattr(from_rollout, name):
            setattr(result, name, getattr(from_rollout, name))
    result.metadata = {**(sample.metadata or {}), **from_rollout.metadata}
    return result


def _failed(sample: Sample, member: MemberResult) -> Sample:
    """The sample as FAILED, out of the loss. slime's batches need a reward and a response token of each sample: both
    are 0; ``metadata["agl_failure"]`` has the reason."""
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
    """Runs single rollouts, each with a future for its result, for any thread, until ``stop``."""

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
        """Enqueue one rollout; returns a future of its result. Cancelling the future cancels the rollout in the
        store."""
        run = _Run(TaskGroup(uuid.uuid4().hex, task), dict(sampling_params), mode)
        run.result.add_done_callback(lambda result: self._give_up(run) if result.cancelled() else None)
        with self.source.changed:
            self.source.raise_if_dead()
            self._runs[run.group.group_id] = run
        self.source.follower.submit(self._enqueue, run)
        return run.result

    def stop(self, timeout_s: float = 5.0) -> None:
        """End this process's runner and the thread; pending futures raise ``DataSourceError``. Safe to call twice."""
        self._connection.stop()
        self.source.stop(timeout_s)
        self._fail_pending("the rollouts of this process were stopped")

    async def _enqueue(self, run: _Run) -> None:
        self.source.expect(run.group.group_id, size=1, mode="single")  # a mode that is never delivered for training
        enqueue = self._connection.enqueue
        rollouts = await self.source.follower.with_retries(
            lambda: enqueue([run.group], size=1, mode=run.mode, sampling=run.sampling)
        )
        self.source.opened(rollouts)
        run.enqueued.extend(rollout.rollout_id for rollout in rollouts)
        if run.result.cancelled():
            self._give_up(run)

    def _give_up(self, run: _Run) -> None:
        """Cancel a rollout whose future was cancelled; if it is not in the store yet, ``_enqueue`` calls this again."""
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
        self._fail_pending(f"the rollout's result cannot be read: {error}")

    def _fail_pending(self, reason: str) -> None:
        with self.source.changed:
            runs, self._runs = self._runs, {}
        for run in runs.values():
            if not run.result.done():
                run.result.set_exception(DataSourceError(reason))


_rollouts: dict[str, SingleRollouts] = {}  # by settings
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
    """End the runners and threads of this process's rollouts; the next rollout starts new ones."""
    with _lock:
        stopped = list(_rollouts.values())
        _rollouts.clear()
    for rollouts in stopped:
        rollouts.stop()
