"""What every run is made of, whoever trains: the agent and its tasks, the loop over them, and what is reported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agl_slime.errors import ConfigError
from agl_slime.loop.online import OnlineRLLoop
from agl_slime.loop.settings import LoopSettings
from agl_slime.loop.tasks import Tasks, read_tasks
from agl_slime.report import StandardReporters
from agl_slime.report.events import Event, GroupsCollected, RunStarted, TranscriptsSampled
from agl_slime.report.files import RunDir
from agl_slime.report.transcripts import choose_rollouts, describe_sample
from agl_slime.rollout.loading import configure_agent, load_agent
from agl_slime.run.settings import TrainConfig
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent, NamedResources
from agl_slime.support.threads import run_in_thread


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The agent to run here (``None`` when others run it), its tasks, what it finds beside the model, and the store:
    made from the settings of a run, or given by a program."""

    tasks: Tasks
    val_tasks: Tasks | None = None
    agent: LitAgent[Any] | None = None
    resources: NamedResources = field(default_factory=dict)
    store: LightningStore = field(default_factory=BridgeStore)


async def load_parts(config: TrainConfig) -> RunParts:
    agent = await run_in_thread(load_agent, config.agent)
    configure_agent(
        agent, scheduler=config.multi_turn_scheduler, max_turns=config.max_turns, plugins=config.external_plugins
    )
    tasks = getattr(agent, "make_task", None) if config.tasks is None else read_tasks(config.tasks)
    if tasks is None:
        raise ConfigError(f"there are no tasks: give --tasks FILE.jsonl, or define make_task(rng) on {config.agent}")
    val_path = config.eval_tasks or (config.tasks if config.eval_interval else None)
    return RunParts(agent=agent, tasks=tasks, val_tasks=read_tasks(val_path) if val_path is not None else None)


def make_loop(
    config: TrainConfig,
    parts: RunParts,
    *,
    url: str,
    model_path: Path,
    sampling: dict[str, Any] | None = None,
    save_interval: int | None = None,
    **functions: Any,
) -> OnlineRLLoop:
    """The loop of a run whose agents talk to the engine at ``url``; ``sampling`` and ``save_interval`` in place of what
    ``config`` says, ``functions`` are further arguments of ``OnlineRLLoop``."""
    sampling = sampling or {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
    plan, runner_settings = RunnerPlan.parse(config.runners), RunnerSettings(max_concurrent=config.max_concurrent)
    return OnlineRLLoop(
        store=parts.store,
        agent=parts.agent,
        tasks=parts.tasks,
        val_tasks=parts.val_tasks,
        resources=parts.resources,
        llm=LLM(endpoint=url, model=str(model_path), sampling_parameters=sampling),
        settings=LoopSettings(
            num_iterations=config.num_iterations,
            rollout_batch_size=config.rollout_batch_size,
            n_samples_per_prompt=config.n_samples_per_prompt,
            rollout_timeout_s=config.rollout_timeout,
            max_attempts=config.max_attempts,
            eval_interval=config.eval_interval,
            eval_tasks=config.eval_rollouts,
            max_replaced_groups=config.max_replaced_groups,
            save_interval=save_interval or config.save_interval,
            seed=config.seed,
        ),
        runners=replace(plan, settings=runner_settings, store_host=config.store_host),
        **functions,
    )


class RunReports(StandardReporters):
    """The reports of a run in its directory. Once it has a ``tokenizer``, a few rollouts of the iterations that are
    shown in full are picked for the transcripts."""

    def __init__(self, run: RunDir, config: TrainConfig, *, console: Console, began: float | None = None) -> None:
        super().__init__(run, console=console, view=config.view, title=config.agent)
        self._path = run.path
        self._seed = config.seed
        self._began = time.monotonic() if began is None else began
        self.tokenizer: Any = None

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            event = replace(event, output_dir=self._path, at=self._began)
        elif isinstance(event, GroupsCollected):
            if self.tokenizer is None or not self.transcripts.wanted(event.iteration):
                return
            event = self._sample(event)
        super().handle(event)

    def _sample(self, event: GroupsCollected) -> TranscriptsSampled:
        members = {member.rollout_id: member for group in event.groups for member in group.members}
        rewards = {rollout_id: member.reward for rollout_id, member in members.items()}
        chosen = choose_rollouts(rewards, iteration=event.iteration, seed=self._seed)
        items = [
            {
                "rollout_id": rollout_id,
                "label": label,
                "task": member.task,
                "messages": member.trajectory.messages if member.trajectory is not None else (),
                "samples": [describe_sample(sample, self.tokenizer.decode) for sample in member.samples],
                "reward": member.reward,
                "rewards": member.rewards,
                "outcome": "succeeded" if member.ok else member.outcome_if_failed.value,
                "reason": member.failure_message or member.failure or "",
            }
            for rollout_id, label in chosen.items()
            for member in (members[rollout_id],)
        ]
        return TranscriptsSampled(iteration=event.iteration, items=items)


@contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """Says what takes a while: on a terminal as long as it takes, elsewhere in a line."""
    if console.is_terminal:
        with console.status(f"{text} ..."):
            yield
    else:
        print(f"{text} ...", file=console.file, flush=True)
        yield
