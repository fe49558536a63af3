"""Builds verifiers' environments the way verifiers' programs do, and lists their tasks for training and validation.
Runs in the Python that has verifiers."""

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

from agl_slime.environments.runtimes.lending import max_episodes, parse_boxes
from agl_slime.environments.tasksets import env_block

EVAL_SPLITS = ("eval", "validation", "valid", "val", "dev", "test")
"""Usual names of the validation split, in order of preference."""
_HOSTED = "prime"  # verifiers' default runtime: a paid service


def build_environment(spec: Mapping[str, Any], **taskset: Any) -> Any:
    """The environment of ``spec``, with these fields of its taskset."""
    try:
        rest, boxes = parse_boxes(spec["arguments"])
    except ValueError as error:
        raise SystemExit(str(error)) from None
    arguments = [*_taskset_arguments(spec["name"]), *rest]
    for name, value in taskset.items():
        arguments += [f"--env.taskset.{name}", str(value)]
    config = cli(narrow_config(EvalConfig, arguments), args=arguments, plain=True).env
    for role, agent in agent_config_fields(config).items():
        agent.model = agent.model or role
        if agent.retries.max_retries or agent.retries.rules or config.retries.max_retries or config.retries.rules:
            raise SystemExit(
                "retries of the environment would train the turns of failed attempts: use --group-max-retries instead"
            )
    env = load_environment(config)
    if unknown := boxes.keys() - agent_config_fields(config).keys():
        agents = ", ".join(agent_config_fields(config))
        raise SystemExit(f"--env.{min(unknown)}.runtime: the agents of {spec['name']} are {agents}")
    for role in boxes:  # each run gets a box instead
        agent_config_fields(config)[role].runtime = vf.SubprocessConfig()
    for role, agent in agent_config_fields(config).items():
        if agent.runtime.type == _HOSTED and "runtime" not in agent.model_fields_set:
            if env._harnesses[role].EXECUTES_CODE:
                fix = f"say where with --env.{role}.runtime.type (bubblewrap, docker, ...; subprocess is this machine)"
                raise SystemExit(f"the agent {role!r} runs programs; {fix}")
            agent.runtime = vf.SubprocessConfig()
    return env


def _taskset_arguments(name: str) -> list[str]:
    block = env_block(name)
    if block is None:
        return ["--env.taskset.id", name]
    flags = []
    for field, value in block["taskset"].items():
        flags += [f"--env.taskset.{field}", value if isinstance(value, str) else json.dumps(value)]
    return flags


def load_splits(spec: Mapping[str, Any], env: Any) -> tuple[dict[str, Any], bool]:
    """The tasksets ``train`` and, if there is a validation split, ``eval``; and whether all are finite."""
    names = _splits(env.taskset)
    config = env.taskset.config
    train = env.taskset
    if "train" in names and "split" not in config.model_fields_set and config.split != "train":
        train = build_environment(spec, split="train").taskset  # its default is another split
    split = spec.get("eval_split") or next(
        (name for name in EVAL_SPLITS if name in names and name != train.config.split), None
    )
    splits = {"train": train}
    if split is not None:
        splits["eval"] = build_environment(spec, split=split).taskset
    return splits, all(taskset.bounded for taskset in splits.values())


def _splits(taskset: Any) -> tuple[str, ...]:
    field = type(taskset.config).model_fields.get("split")
    return get_args(field.annotation) if field is not None and get_origin(field.annotation) is Literal else ()


def digest_of(task: Any) -> str:
    """A digest of a task's content, without its position and name."""
    data = task.data.model_dump(mode="json", exclude={"idx", "id", "name"})
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=12).hexdigest()


def _listed(taskset: Any, split: str, most: int | None) -> Iterator[dict[str, Any]]:
    for task in itertools.islice(taskset, most):
        data_id = str(task.data.name or task.data.id or task.data.idx)
        yield {"data_id": data_id, "split": split, "idx": task.data.idx, "digest": digest_of(task)}


async def describe(env: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The environment's agents, and its tasks as references that ``Finder`` resolves."""
    # an environment's setup may mark agents as not trainable
    agents = vf.Agents(env.config, lambda name, _: SimpleNamespace(name=name, trainable=True))
    await env.setup(agents)
    tasksets, bounded = load_splits(spec, env)
    most = spec.get("most_tasks") or (None if bounded else spec["most_of_endless"])
    return {
        "verifiers": version("verifiers"),
        "env_id": env.config.env_id,
        "endless": not bounded,
        "most_episodes": max_episodes(parse_boxes(spec["arguments"])[1]),
        "agents": {name: getattr(agents, name).trainable for name in agent_config_fields(env.config)},
        "tasks": {split: list(_listed(taskset, split, most)) for split, taskset in tasksets.items()},
    }


class Finder:
    """Finds tasks by split and position."""

    def __init__(self, tasksets: Mapping[str, Any]) -> None:
        self._streams = {split: iter(taskset) for split, taskset in tasksets.items()}
        self._read: dict[str, list[Any]] = {split: [] for split in tasksets}

    def find(self, reference: Mapping[str, Any]) -> Any:
        """The task of a reference. Raises ``LookupError`` if the position has another task than when it was listed."""
        read = self._read[reference["split"]]
        missing = reference["idx"] + 1 - len(read)
        if missing > 0:
            read += itertools.islice(self._streams[reference["split"]], missing)
        task = read[reference["idx"]] if reference["idx"] < len(read) else None
        if task is None or digest_of(task) != reference["digest"]:
            raise LookupError(f"the taskset has another task at {reference['idx']} than when the run began")
        return task
