"""Bubblewrap boxes for verifiers' agents, passed at run time: verifiers' configuration of runtimes is a closed
union."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import verifiers.v1.runtimes as verifiers_runtimes
from pydantic import ValidationError
from verifiers.v1.runtimes.base import Runtime

from agl_slime.environments.runtimes.bubblewrap import BubblewrapRuntime
from agl_slime.environments.runtimes.layout import GIB, BubblewrapConfig
from agl_slime.support.files import cache_directory

_runtime_cls = verifiers_runtimes._runtime_cls
# verifiers looks up the class of a box's configuration to see whether it is local, when a timeout is set.
verifiers_runtimes._runtime_cls = lambda config: (
    BubblewrapRuntime if isinstance(config, BubblewrapConfig) else _runtime_cls(config)
)

_RUNTIME_FLAG = re.compile(r"--env\.(?P<agent>[^.]*)\.runtime\.(?P<field>[^.]*)")


def parse_boxes(arguments: Sequence[str]) -> tuple[list[str], dict[str, BubblewrapConfig]]:
    """Split a command line into verifiers' arguments and the boxes by agent: `--env.AGENT.runtime.type bubblewrap`,
    with fields of `BubblewrapConfig` beside it. `installs` is by default in this package's cache. Raises
    `ValueError`."""
    runtimes: dict[str, dict[str, Any]] = {}
    positions: dict[str, list[int]] = {}  # of the words about each agent's runtime
    for number, word in enumerate(arguments):
        flag, same, value = word.partition("=")
        if (match := _RUNTIME_FLAG.fullmatch(flag)) is None:
            continue
        follows = not same and number + 1 < len(arguments) and not arguments[number + 1].startswith("--")
        value = value if same else arguments[number + 1] if follows else "true"
        runtimes.setdefault(match["agent"], {})[match["field"].replace("-", "_")] = value
        positions.setdefault(match["agent"], []).extend([number, number + 1] if follows else [number])
    boxes, taken = {}, set()
    for role, fields in runtimes.items():
        if fields.get("type") != "bubblewrap":
            continue
        if shutil.which("bwrap") is None:
            raise ValueError(f"--env.{role}.runtime.type bubblewrap: there is no bwrap; install the package bubblewrap")
        try:
            lists = {name: json.loads(value) if value[:1] == "[" else value for name, value in fields.items()}
            config = BubblewrapConfig.model_validate(lists)
        except (ValidationError, json.JSONDecodeError) as error:
            raise ValueError(f"--env.{role}.runtime: {error}") from None
        installs = (config.installs or cache_directory() / "programs").resolve()
        boxes[role] = config.model_copy(update={"installs": installs})
        taken.update(positions[role])
    return [word for number, word in enumerate(arguments) if number not in taken], boxes


def max_episodes(boxes: Mapping[str, BubblewrapConfig], *, root: Path = Path("/")) -> int | None:
    """The number of concurrent episodes for which this machine has memory and processes, if each uses all boxes up to
    their limits; at least one, `None` without boxes. `root` contains the kernel's files."""
    if not boxes:
        return None
    meminfo = (root / "proc/meminfo").read_text().splitlines()
    kib = next(line.split()[1] for line in meminfo if line.startswith("MemAvailable:"))
    available = {"memory": int(kib) * 1024, "pids": int((root / "proc/sys/kernel/pid_max").read_text())}
    for name, on_host in available.items():
        group = root / "sys/fs/cgroup" / name  # in a container its own group is the root
        limit, used = Path(f"{group}.max"), Path(f"{group}.current")
        if limit.is_file() and (most := limit.read_text().strip()).isdigit():
            available[name] = min(on_host, int(most) - int(used.read_text()))
    memory = sum(config.memory for config in boxes.values()) * GIB
    processes = sum(config.processes for config in boxes.values())
    return max(1, min(int(available["memory"] / memory), available["pids"] // processes))


@contextlib.asynccontextmanager
async def box(
    config: BubblewrapConfig, name: str | None = None, *, installing: bool = False
) -> AsyncIterator[BubblewrapRuntime]:
    """A box that is ended with the block."""
    runtime = BubblewrapRuntime(config, name, installing=installing)
    try:
        await runtime.start()
        yield runtime
    finally:
        await runtime.stop()


async def install(harness: Any, config: BubblewrapConfig) -> None:
    """Install a harness's program, with network access and a writable `installs`, which other boxes mount read-only. A
    second call is quick: each harness checks for its installation."""
    if config.installs is None:
        raise ValueError("bubblewrap: `installs` must name the directory for installed programs")
    config.installs.mkdir(parents=True, exist_ok=True)
    async with box(config, installing=True) as runtime:
        await harness.setup(runtime)


def lend_boxes(env: Any, boxes: Mapping[str, BubblewrapConfig]) -> None:
    """Run these agents in a new box each time. Wraps the environment's `setup` hook, the first that sees an episode's
    agents."""
    setup = env.setup

    async def with_boxes(agents: Any) -> None:
        await setup(agents)
        for role, config in boxes.items():
            _lend(getattr(agents, role), config)

    env.setup = with_boxes


def _lend(agent: Any, config: BubblewrapConfig) -> None:
    run, interaction = agent.run, agent.interaction

    def config_for(task: Any) -> BubblewrapConfig:
        if task.data.image is not None:
            raise ValueError(
                f"task {task.data.idx} needs the image {task.data.image}, and bubblewrap has none: take docker"
            )
        return config.model_copy(update={"workdir": task.data.workdir} if task.data.workdir else {})

    def lent(task: Any, runtime: Runtime | None) -> contextlib.AbstractAsyncContextManager[Runtime]:
        return box(config_for(task)) if runtime is None else contextlib.nullcontext(runtime)

    async def run_in_box(task: Any, *, runtime: Runtime | None = None, **options: Any) -> Any:
        async with lent(task, runtime) as chosen:
            return await run(task, runtime=chosen, **options)

    @contextlib.asynccontextmanager
    async def interact_in_box(task: Any, *, runtime: Runtime | None = None, **options: Any) -> AsyncIterator[Any]:
        async with lent(task, runtime) as chosen, interaction(task, runtime=chosen, **options) as talk:
            yield talk

    agent.run, agent.interaction = run_in_box, interact_in_box
