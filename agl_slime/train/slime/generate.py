"""One Agent Lightning rollout for one slime prompt, for ``agl_slime.slime_hooks.generate``.

The first rollout creates a data source in this process, which follows completions; slime's event loop only waits. slime
does not announce its last prompt, so the data source's thread, and the runner of an agent in this process, live until
``stop_rollouts`` or the end of the process.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from agl_slime.data.enqueueing import HealthCheck, TaskGroup, run_rollouts
from agl_slime.data.results import MemberResult
from agl_slime.data.source import GroupSource
from agl_slime.errors import ConfigError
from agl_slime.support.threads import run_in_thread
from agl_slime.train.slime.args import PluginSettings, context_length
from agl_slime.train.slime.connection import Connection
from agl_slime.train.slime.hooks import credits_tokens
from agl_slime.train.slime.replay import in_slimes_form, replay_sampling
from agl_slime.types import ARRAY_FIELDS, Sample

logger = logging.getLogger(__name__)

# Fields of a sample that come from the rollout; the others (index, group_index, prompt, label, session …) stay slime's.
_FROM_ROLLOUT = (
    *("tokens", "response", "response_length", "loss_mask", "rollout_log_probs"),
    *("reward", "status", "weight_versions", "prefix_cache_info", "spec_info", "non_generation_time"),
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
    rollouts = _rollouts_for(args, evaluation=evaluation)
    member = await rollouts.run(task, sampling, mode="val" if evaluation else "train", number=sample.index)
    if not member.ok:
        return _failed(sample, member)
    samples = await run_in_thread(in_slimes_form, member.samples, rollouts.tokenizer)
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


class SingleRollouts:
    """Runs single rollouts, from any event loop, until ``stop``."""

    def __init__(self, connection: Connection, **conversion: Any) -> None:
        self._connection = connection
        self.tokenizer = tokenizer = connection.tokenizer()
        options: dict[str, Any] = {"convert_validation": True, "producer": connection, **conversion}
        self._source = GroupSource(store=connection.store, tokenizer=tokenizer, **options)
        self._source.follower.begin()
        connection.start()

    async def run(
        self, task: dict[str, Any], sampling: Mapping[str, Any], *, mode: Literal["train", "val"], number: int | None
    ) -> MemberResult:
        """The result of one rollout, which a cancellation cancels in the store. ``number`` decides its seed."""
        enqueue = partial(self._connection.enqueue, size=1, mode=mode, sampling=sampling)
        name = uuid.uuid4().hex if number is None else f"{uuid.uuid4().hex}-{number}"
        group, health = TaskGroup(name, task), HealthCheck(self._source.raise_if_dead)
        [member] = [member async for member in run_rollouts(self._source, [group], enqueue, health=health)]
        return member

    def stop(self, timeout_s: float = 5.0) -> None:
        """End this process's runner and the thread; pending calls raise ``DataSourceError``. Safe to call twice."""
        self._connection.stop()
        self._source.stop(timeout_s)


_rollouts: dict[str, SingleRollouts] = {}  # by settings
_lock = threading.Lock()


def _rollouts_for(args: Any, *, evaluation: bool) -> SingleRollouts:
    settings = PluginSettings.from_args(args)
    if not settings.connected:
        raise ConfigError("there is no agent to run: set agl_store_url or agl_agent")
    if not evaluation:  # which slime may run beside our data source
        settings.check_single()
    conversion = {"reward_key": getattr(args, "reward_key", None), "reward_spans": credits_tokens(args)}
    with _lock:
        if (key := repr((settings, conversion))) not in _rollouts:
            _rollouts[key] = SingleRollouts(Connection(settings), **conversion)
        return _rollouts[key]


def stop_rollouts() -> None:
    """End the runners and threads of this process's rollouts; the next rollout starts new ones."""
    with _lock:
        stopped = list(_rollouts.values())
        _rollouts.clear()
    for rollouts in stopped:
        rollouts.stop()
