"""The flags of ``python train.py``: each is the path of a setting in ``agl_slime.cli.settings.TrainConfig``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple, get_type_hints

GROUPS: Mapping[str, tuple[str, str]] = {
    "first run": (
        "Settings of a first run.",
        """agent tasks model_path sglang_url trainer loop.num_iterations loop.rollout_batch_size
        loop.n_samples_per_prompt sampling.max_new_tokens output_dir""",
    ),
    "run": (
        "Resume, reproduce and watch a run.",
        "resume overwrite loop.save_interval loop.seed loop.deterministic view track keep_rollouts autopsy",
    ),
    "validation": (
        "Validation on held-out tasks.",
        "loop.eval_interval loop.eval_rollouts eval_tasks eval_sampling keep_best",
    ),
    "sampling": (
        "Sampling, and the chat template.",
        "sampling.temperature sampling.top_p sampling.top_k chat_template_kwargs later_systems",
    ),
    "rollout": (
        "Execution of the agent.",
        """loop.rollout_timeout_s loop.max_attempts gateway.max_turns max_concurrent runners store_host
        multi_turn_scheduler external_plugins""",
    ),
    "group": (
        "Tasks and their groups of rollouts.",
        "loop.task_sampling loop.group_pilot group.min_ratio group.max_retries group.timeout_s drop_zero_variance",
    ),
    "asynchronous": ("Asynchronous training.", "loop.max_staleness weight_pause eval_sglang_url"),
    "teacher": (
        "On-policy distillation: a teacher scores the tokens of rollouts.",
        "teacher_url teacher_coef teacher_alone",
    ),
    "engine": ("The engine that a run of the local trainer starts and ends.", "engine"),
    "gateway": (
        "The gateway, which serves the model to agents with their own client.",
        """gateway.branches gateway.constraints gateway.untrained_models gateway.trained_models
        gateway.images.image_hosts""",
    ),
    "environment": (
        "An environment of verifiers. Its own settings are --env.KEY value, or --env.@ FILE.toml.",
        """environment.name environment.python environment.most_tasks environment.models environment.arguments""",
    ),
    "controller": (
        "Agent Lightning 1.0's controller (--runners controller).",
        "controller.python controller.host controller.port controller.env_map controller.job_template",
    ),
    "slime": (
        "slime (--trainer slime, or any of these); further flags of slime follow after --.",
        "actor_num_nodes actor_num_gpus_per_node rollout_num_gpus",
    ),
}
"""Titles of ``--help`` with a sentence and the paths of the settings, in its order."""
SLIMES_SETTINGS = GROUPS["slime"][1].split()
_NAMES = {
    "loop.rollout_timeout_s": "rollout_timeout",
    "group.min_ratio": "group_min_ratio",
    "group.max_retries": "group_max_retries",
    "group.timeout_s": "group_timeout",
    "environment.name": "env",
    "environment.python": "env_python",
    "environment.most_tasks": "env_tasks",
    "environment.models": "env_model",
    "environment.arguments": "env_arguments",
    "controller.python": "controller_python",
    "controller.host": "controller_host",
    "controller.port": "controller_port",
}


def name_of(path: str) -> str:
    """The name of the setting at ``path`` in files and, with dashes, on the command line."""
    return _NAMES.get(path, path.rpartition(".")[2])


PATHS: Mapping[str, str] = {name_of(path): path for _, paths in GROUPS.values() for path in paths.split()}
"""The paths of the settings by their names."""


class Setting(NamedTuple):
    """A setting as a flag: its type, its default, and its docstring as help text."""

    type: Any
    default: Any
    text: str


_types = cache(partial(get_type_hints, include_extras=True))


def find_setting(root: type, path: str) -> Setting:
    section, _, name = path.rpartition(".")
    owner = type(default_of(root, section)) if section else root
    return Setting(_types(owner)[name], default_of(root, path), _docstrings(owner)[name])


def default_of(root: type, path: str) -> Any:
    """The default at ``path`` of the settings class ``root``; makes no ``root``, which may be about to check itself."""
    first, _, rest = path.partition(".")
    setting = next(each for each in fields(root) if each.name == first)
    default = setting.default_factory() if setting.default is MISSING else setting.default  # type: ignore[misc]
    return attrgetter(rest)(default) if rest else default


@cache
def _docstrings(owner: type) -> Mapping[str, str]:
    """The docstrings below the fields of a class, which Python does not keep."""
    body = ast.parse(inspect.getsource(owner)).body[0]
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for statement, text_below in pairwise(body.body):
        match statement, text_below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split())
    return texts


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def split_env_flags(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line into our flags and the environment's: ``--env.KEY value``, ``--env.KEY=value``,
    ``--env.KEY`` alone, a switch, or ``--env.@ FILE.toml``."""
    ours, env_flags, value_expected = [], [], False
    for argument in arguments:
        is_env_flag = argument.startswith("--env.")
        is_env_value = value_expected and not argument.startswith("--")
        (env_flags if is_env_flag or is_env_value else ours).append("@" if argument == "--env.@" else argument)
        value_expected = is_env_flag and "=" not in argument
    return ours, tuple(env_flags)
