"""An environment of verifiers as its own programs build it, and its tasks for training and for validations. Runs in the
Python that has verifiers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin

import verifiers.v1 as vf
from pydantic_config import cli
from verifiers.v1.cli.resolve import narrow_config
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.cli.eval import EvalConfig
from verifiers.v1.utils.loaders import load_environment

from agl_slime.environments.runtimes.lending import boxes_of, room_for
from agl_slime.environments.tasksets import env_block

EVAL_SPLITS = ("eval", "validation", "valid", "val", "dev", "test")
"""What tasksets call the split that is not trained on, the first that they have."""
_HOSTED = "prime"  # the runtime that verifiers takes where none is named: somebody's machines, for money


def loaded(spec: Mapping[str, Any], **taskset: Any) -> Any:
    """The environment that ``spec`` describes, with these fields of its taskset."""
    try:
        rest, boxes = boxes_of(spec["arguments"])
    except ValueError as error:
        raise SystemExit(str(error)) from None
    arguments = [*_named(spec["name"]), *rest]
    for name, value in taskset.items():
        arguments += [f"--env.taskset.{name}", str(value)]
    config = cli(narrow_config(EvalConfig, arguments), args=arguments, plain=True).env
    for role, agent in agent_config_fields(config).items():
        agent.model = agent.model or role
        if agent.retries.max_retries or agent.retries.rules or config.retries.max_retries or config.retries.rules:
            raise SystemExit("retries of the environment would train what failed: use --group-max-retries instead")
    env = load_environment(config)
    if unknown := boxes.keys() - agent_config_fields(config).keys():
        known = ", ".join(agent_config_fields(config))
        raise SystemExit(f"--env.{min(unknown)}.runtime: the agents of {spec['name']} are {known}")
    for role in boxes:  # lent to its runs
        agent_config_fields(config)[role].runtime = vf.SubprocessConfig()
    for role, agent in agent_config_fields(config).items():
        if agent.runtime.type == _HOSTED and "runtime" not in agent.model_fields_set:
            if env._harnesses[role].EXECUTES_CODE:
                fix = f"say where with --env.{role}.runtime.type (bubblewrap, docker, ...; subprocess is this machine)"
                raise SystemExit(f"the agent {role!r} runs programs; {fix}")
            agent.runtime = vf.SubprocessConfig()
    return env


def _named(name: str) -> list[str]:
    block = env_block(name)
    if block is None:
        return ["--env.taskset.id", name]
    flags = []
    for field, value in block["taskset"].items():
        flags += [f"--env.taskset.{field}", value if isinstance(value, str) else json.dumps(value)]
    return flags


def tasks_of(spec: Mapping[str, Any], env: Any) -> tuple[dict[str, Any], bool]:
    """The tasksets by the name of their split, ``train`` and where it has its own ``eval``, and whether all end."""
    names = _splits(env.taskset)
    config = env.taskset.config
    train = env.taskset
    if "train" in names and "split" not in config.model_fields_set and config.split != "train":
        train = loaded(spec, split="train").taskset  # it tests where nobody says what to do
    split = spec.get("eval_split") or next(
        (one for one in EVAL_SPLITS if one in names and one != train.config.split), None
    )
    found = {"train": train}
    if split is not None:
        found["eval"] = loaded(spec, split=split).taskset
    return found, all(taskset.bounded for taskset in found.values())


def _splits(taskset: Any) -> tuple[str, ...]:
    """The splits that the taskset's configuration lists."""
    field = type(taskset.config).model_fields.get("split")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def digest_of(task: Any) -> str:
    """The same for tasks that differ in their place and name alone."""
    data = task.data.model_dump(mode="json", exclude={"idx", "id", "name"})
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=12).hexdigest()


def _listed(taskset: Any, split: str, most: int | None) -> Iterator[dict[str, Any]]:
    for task in itertools.islice(taskset, most):
        known = {"data_id": str(task.data.name or task.data.id or task.data.idx), "split": split}
        yield {**known, "idx": task.data.idx, "digest": digest_of(task)}


async def describe(env: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Agents, and tasks by what is needed to find each again."""
    # what is hardcoded of the agents: an environment says so in its setup
    agents = vf.Agents(env.config, lambda name, _: SimpleNamespace(name=name, trainable=True))
    await env.setup(agents)
    tasksets, bounded = tasks_of(spec, env)
    most = spec.get("most_tasks") or (None if bounded else spec["most_of_endless"])
    return {
        "verifiers": version("verifiers"),
        "env_id": env.config.env_id,
        "endless": not bounded,
        "room": room_for(boxes_of(spec["arguments"])[1]),
        "agents": {name: getattr(agents, name).trainable for name in agent_config_fields(env.config)},
        "tasks": {split: list(_listed(taskset, split, most)) for split, taskset in tasksets.items()},
    }


class Finder:
    """Finds tasks again by their place."""

    def __init__(self, tasksets: Mapping[str, Any]) -> None:
        self._streams = {split: iter(taskset) for split, taskset in tasksets.items()}
        self._read: dict[str, list[Any]] = {split: [] for split in tasksets}

    def find(self, wanted: Mapping[str, Any]) -> Any:
        """Raises ``LookupError`` where the place holds another task than it did."""
        read = self._read[wanted["split"]]
        missing = wanted["idx"] + 1 - len(read)
        if missing > 0:
            read += itertools.islice(self._streams[wanted["split"]], missing)
        task = read[wanted["idx"]] if wanted["idx"] < len(read) else None
        if task is None or digest_of(task) != wanted["digest"]:
            raise LookupError(f"the taskset gives another task at {wanted['idx']} than when the run began")
        return task
