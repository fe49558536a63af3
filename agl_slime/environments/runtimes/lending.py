"""Boxes lent to verifiers' agents, whose own configuration of runtimes is a closed union."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import verifiers.v1.runtimes as known
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.runtimes.base import Runtime

from agl_slime.environments.runtimes.bubblewrap import BubblewrapRuntime
from agl_slime.environments.runtimes.layout import BubblewrapConfig

_theirs = known._runtime_cls
# verifiers asks the class of a lent box's configuration whether it is local, where a timeout is set, and knows its own.
known._runtime_cls = lambda config: BubblewrapRuntime if isinstance(config, BubblewrapConfig) else _theirs(config)


@contextlib.asynccontextmanager
async def box(config: BubblewrapConfig, name: str | None = None) -> AsyncIterator[BubblewrapRuntime]:
    """A box to lend, gone with the block."""
    runtime = BubblewrapRuntime(config, name)
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()


async def install(harness: Any, config: BubblewrapConfig) -> None:
    """Install a harness's program once, with the network and with `installs` writable; boxes then see it read-only.
    Asked for again it is quick: each harness looks for what is there."""
    if config.installs is None:
        raise ValueError("bubblewrap: name with `installs` the directory that programs are installed into")
    config.installs.mkdir(parents=True, exist_ok=True)
    runtime = BubblewrapRuntime(config, installing=True)
    try:
        await runtime.start()
        await harness.setup(runtime)
    finally:
        await runtime.stop()


def lend_boxes(env: Any, config: BubblewrapConfig) -> None:
    """Give each run of an environment's agents a box of its own, where its program executes code. The environment is
    unchanged: its `setup` hook is where an episode's agents are first seen."""
    setup = env.setup

    async def with_boxes(agents: Any) -> None:
        await setup(agents)
        for name in agent_config_fields(env.config):
            agent = getattr(agents, name)
            if agent.harness.EXECUTES_CODE:
                _lend(agent, config)

    env.setup = with_boxes


def _lend(agent: Any, config: BubblewrapConfig) -> None:
    run, interaction = agent.run, agent.interaction

    def checked(task: Any) -> BubblewrapConfig:
        if task.data.image is not None:
            raise ValueError(
                f"task {task.data.idx} needs the image {task.data.image}, and bubblewrap has none: take docker"
            )
        return config.model_copy(update={"workdir": task.data.workdir} if task.data.workdir else {})

    async def in_box(task: Any, *, runtime: Runtime | None = None, **more: Any) -> Any:
        if runtime is not None:
            return await run(task, runtime=runtime, **more)
        async with box(checked(task)) as mine:
            return await run(task, runtime=mine, **more)

    @contextlib.asynccontextmanager
    async def talking_in_box(task: Any, *, runtime: Runtime | None = None, **more: Any) -> AsyncIterator[Any]:
        if runtime is not None:
            async with interaction(task, runtime=runtime, **more) as talk:
                yield talk
        else:
            async with box(checked(task)) as mine, interaction(task, runtime=mine, **more) as talk:
                yield talk

    agent.run, agent.interaction = in_box, talking_in_box
