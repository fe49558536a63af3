"""Boxes lent to verifiers' agents, whose own configuration of runtimes is a closed union."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1.runtimes as known
from pydantic import ValidationError
from verifiers.v1.runtimes.base import Runtime

from agl_slime.environments.runtimes.bubblewrap import BubblewrapRuntime
from agl_slime.environments.runtimes.layout import GIB, BubblewrapConfig

_theirs = known._runtime_cls
# verifiers asks the class of a lent box's configuration whether it is local, where a timeout is set, and knows its own.
known._runtime_cls = lambda config: BubblewrapRuntime if isinstance(config, BubblewrapConfig) else _theirs(config)


def boxes_of(arguments: Sequence[str]) -> tuple[list[str], dict[str, BubblewrapConfig]]:
    """A command line for verifiers without the runtimes that it does not know, and those by the name of their agent:
    `--env.AGENT.runtime.type bubblewrap` with the fields of `BubblewrapConfig` beside it. Programs are installed below
    the user's cache, where no `installs` are named. Raises `ValueError`."""
    given: dict[str, dict[str, Any]] = {}
    at: dict[str, list[int]] = {}
    for number, word in enumerate(arguments):
        flag, same, value = word.partition("=")
        parts = flag.split(".")
        if len(parts) == 4 and (parts[0], parts[2]) == ("--env", "runtime"):
            follows = not same and number + 1 < len(arguments) and not arguments[number + 1].startswith("--")
            given.setdefault(parts[1], {})[parts[3].replace("-", "_")] = (
                value if same else arguments[number + 1] if follows else "true"
            )
            at.setdefault(parts[1], []).extend([number, number + 1] if follows else [number])
    boxes, taken = {}, set()
    for role, fields in given.items():
        if fields.get("type") != "bubblewrap":
            continue
        if shutil.which("bwrap") is None:
            raise ValueError(f"--env.{role}.runtime.type bubblewrap: bwrap is not here; install the package bubblewrap")
        try:
            lists = {name: json.loads(value) if value[:1] == "[" else value for name, value in fields.items()}
            config = BubblewrapConfig.model_validate(lists)
        except (ValidationError, json.JSONDecodeError) as error:
            raise ValueError(f"--env.{role}.runtime: {error}") from None
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        installs = (config.installs or cache / "agl-slime" / "programs").resolve()
        boxes[role] = config.model_copy(update={"installs": installs})
        taken.update(at[role])
    return [word for number, word in enumerate(arguments) if number not in taken], boxes


def room_for(boxes: Mapping[str, BubblewrapConfig], *, root: Path = Path("/")) -> int | None:
    """How many episodes have room here at once, each with all of these boxes at their limits of memory and processes;
    at least one, `None` without boxes. `root` is where the kernel's files are."""
    if not boxes:
        return None
    memory = int(_field(root / "proc/meminfo", "MemAvailable:") * 1024)
    pids = int((root / "proc/sys/kernel/pid_max").read_text())
    for name, value in (("memory", memory), ("pids", pids)):
        group = root / "sys/fs/cgroup" / name  # of a container, whose own group is the root
        limit, used = Path(f"{group}.max"), Path(f"{group}.current")
        if limit.is_file() and (most := limit.read_text().strip()).isdigit():
            left = min(value, int(most) - int(used.read_text()))
            memory, pids = (left, pids) if name == "memory" else (memory, left)
    needed = sum(config.memory for config in boxes.values()) * GIB
    return max(1, min(int(memory / needed), pids // sum(config.processes for config in boxes.values())))


def _field(path: Path, name: str) -> float:
    return next(float(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(name))


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


def lend_boxes(env: Any, boxes: Mapping[str, BubblewrapConfig]) -> None:
    """Give each run of these agents a box of its own. The environment is unchanged: its `setup` hook is where an
    episode's agents are first seen."""
    setup = env.setup

    async def with_boxes(agents: Any) -> None:
        await setup(agents)
        for role, config in boxes.items():
            _lend(getattr(agents, role), config)

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
