"""A generator that runs an Agent Lightning agent; its items have the engine's token ids and log-probs.

The buffer's environment, not a request, names the agent: ``AGL_SLIME_AGENT=module:Class agl-slime buffer``. Each line
of the input file is a task, with any fields. An item has the tokens of its rollout's Sample, or ``samples`` if the
rollout forked."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_slime.buffer.client import Row, failed_item, item_of, plan, read_rows, write_items
from agl_slime.buffer.stages import Item
from agl_slime.data.enqueueing import HealthCheck, TaskGroup, enqueue_requests, run_rollouts
from agl_slime.data.results import MemberResult
from agl_slime.errors import ConfigError

TASK_TYPE = "agl"
AGENT_VARIABLE = "AGL_SLIME_AGENT"


def run_rollout(data: dict[str, Any]) -> None:
    """Entry point: the buffer passes the payload of ``/start_rollout``."""
    path = os.environ.get(AGENT_VARIABLE)
    if not path:
        raise ConfigError(
            f"the generator {TASK_TYPE!r} needs an agent: set {AGENT_VARIABLE}=module:Class in the buffer's environment"
        )
    from agl_slime.agent.loading import load_agent
    from agl_slime.runner.process import configure_worker_process

    configure_worker_process()
    asyncio.run(run_agent(load_agent(path), data))


async def run_agent(agent: Any, data: Mapping[str, Any]) -> None:
    """Run the planned rollouts of the input file's tasks, and write each result or failure to the buffer."""
    from agl_slime.data.source import GroupSource
    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.support.agl import LLM, Rollout  # seconds to import

    rows = read_rows(Path(data["input_file"]), prompts=False) if data.get("input_file") else []
    concurrency = int(data.get("num_process", 100))
    sampling = dict(data.get("sampling_params") or {})
    model = str(data.get("tokenizer_path") or "")
    store = BridgeStore()
    llm = LLM(endpoint=data["remote_engine_url"], model=model, sampling_parameters=sampling)
    await store.add_resources({"main_llm": llm})
    limits: dict[str, Any] = {"timeout_s": float(data.get("rollout_timeout", 1800.0)), "resources_id": None}
    limits["seed"] = data.get("seed", 0)

    async def enqueue(groups: Sequence[TaskGroup]) -> Sequence[Rollout]:
        rollouts = await store.enqueue_many_rollouts(enqueue_requests(groups, size=1, mode="train", **limits))
        runner.wake()
        return rollouts

    async def make_item(row: Row, epoch: int, member: int) -> Item:
        # a group of one; the end of its name decides the seed of its sampling
        group = TaskGroup(f"{uuid.uuid4().hex}-{row['instance_id']}/{epoch}/{member}", dict(row))
        ended = run_rollouts(source, [group], enqueue, health=HealthCheck(source.raise_if_dead))
        [result] = [result async for result in ended]
        return item_of_member(result, row, epoch)

    running = RunnerThread(agent=agent, store=store, settings=RunnerSettings(max_concurrent=concurrency))
    with GroupSource(store=store) as source, running as runner:
        await write_items(plan(rows, data), make_item, url=data["remote_buffer_url"], limit=concurrency)


def item_of_member(member: MemberResult, row: Row, epoch: int) -> Item:
    """The item of a finished rollout; for a failed one, with the error."""
    if not member.ok or member.reward is None or not member.samples:
        error = "the rollout has no sample to train on" if member.ok else f"{member.failure}: {member.failure_message}"
        return failed_item(row, epoch, error, uid=member.rollout_id)
    sample_fields = [
        {
            "tokens": list(sample.tokens),
            "response_length": sample.response_length,
            "loss_mask": sample.loss_mask,
            "rollout_log_probs": sample.rollout_log_probs,
            "response": sample.response,
            "weight_versions": list(sample.weight_versions),
            "finish_reason": "length" if sample.status == type(sample).Status.TRUNCATED else "stop",
        }
        for sample in member.samples
    ]
    last = member.samples[-1]
    prompt = last.prompt if isinstance(last.prompt, list) else [{"role": "user", "content": last.prompt}]
    finish_reason = sample_fields[-1]["finish_reason"]
    extra = {"rewards": member.rewards, "round_number": member.turns, "finish_reason": finish_reason}
    messages = [*prompt, {"role": "assistant", "content": last.response}]
    fields = sample_fields[0] if len(sample_fields) == 1 else {"samples": sample_fields}
    return item_of(row, epoch, member.rollout_id, messages, member.reward, extra, **fields)
