"""The command line of ``train.py``, and ``--config FILE``: settings from TOML or a run's ``config.json``."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import TypeAdapter, ValidationError

from agl_slime.cli.options import GROUPS, PATHS, SLIMES_SETTINGS, find_setting, flag, name_of, split_env_flags
from agl_slime.cli.settings import TrainConfig, flat_values, train_config
from agl_slime.errors import ConfigError, SettingError
from agl_slime.report.files import RunDir
from agl_slime.support.files import read_whole
from agl_slime.support.flags import parse_flags
from agl_slime.support.net import shown_url
from agl_slime.train.local.settings import LocalTrainerSettings

_DESCRIPTION = "Train an agent online: rollouts through Agent Lightning, a policy on SGLang, weights updated after "
_DESCRIPTION += "every iteration."
_CONFIG_HELP = "A TOML file of settings, or the config.json of a run; flags take precedence."
_THIS_RUN_ONLY = ("output_dir", "resume", "overwrite")
_REMOVED_PASSWORD = re.compile(r"(//|[?#]|/k/)\*\*\*|\(not written\)")  # by shown_url, or for a name
_INFINITE = ("inf", "-inf")

HIDDEN = {"env_arguments", "controller_python"}  # --env.KEY value; AGL_CONTROLLER_PYTHON
# as other trainers name them
_REPLACED: dict[str, str] = dict.fromkeys(("--learning-rate", "--lr"), "give --local.lr")
_REPLACED |= dict.fromkeys(("--num-generations", "--group-size"), "give --n-samples-per-prompt")
_REPLACED |= dict.fromkeys(("--max-tokens", "--max-completion-length"), "give --max-new-tokens")
_REPLACED |= dict.fromkeys(("--steps", "--max-steps"), "give --num-iterations")
_REPLACED |= dict.fromkeys(("--beta", "--kl-coef"), "give --local.kl-coef")
_REPLACED["--controller-python"] = "set AGL_CONTROLLER_PYTHON"
_REPLACED["--batch-size"] = "give --rollout-batch-size, a number of groups"


def _group_class(title: str) -> type:
    """A dataclass with the settings of a group, as tyro reads one."""
    text, paths = GROUPS[title]
    flags: list[Any] = []
    for path in paths.split():
        setting, name = find_setting(TrainConfig, path), name_of(path)
        argument = tyro.conf.Suppress if name in HIDDEN else tyro.conf.arg(help=setting.text)
        flags.append((name, Annotated[setting.type, argument], setting.default))
    return make_dataclass(_attribute(title), flags, frozen=True, namespace={"__doc__": text})


def _attribute(title: str) -> str:
    return f"{title.replace(' ', '_')}_group"


_GROUPS = {title: _group_class(title) for title in GROUPS}
_Flags = make_dataclass(
    "_Flags",
    [
        ("config", Annotated[Path | None, tyro.conf.arg(help=_CONFIG_HELP)], None),
        *(
            (_attribute(title), Annotated[group, tyro.conf.arg(name=title), tyro.conf.OmitArgPrefixes], group())
            for title, group in _GROUPS.items()
        ),
        ("local", LocalTrainerSettings, field(default_factory=LocalTrainerSettings)),
    ],
    frozen=True,
)


def parse_train_config(arguments: Sequence[str]) -> TrainConfig:
    """The settings of a command line: its flags, over its ``--config``, over the settings of the run that it resumes.
    Raises ``ConfigError``, or ``SystemExit`` for flags that cannot be parsed."""
    ours, env_flags = split_env_flags(arguments)
    for argument in ours:
        if (fix := _REPLACED.get(argument.partition("=")[0].replace("_", "-"))) is not None:
            raise ConfigError(f"{argument.partition('=')[0]}: there is no such flag; {fix}")
    config_file, ours = _extract_path(ours, "--config")
    output_dir, _ = _extract_path(ours, "--output-dir", "--output_dir")
    values: dict[str, Any] = {}
    file_values: dict[str, Any] = {}
    run_config = RunDir(output_dir).config if output_dir is not None else None
    overridden = {argument.partition("=")[0].replace("_", "-") for argument in ours}
    if "--resume" in overridden and run_config is not None and run_config.is_file():
        values = read_config(run_config, overridden=overridden | ({flag("env_arguments")} if env_flags else set()))
    if config_file is not None:
        file_values = read_config(config_file, overridden=overridden)
        env_flags = (*file_values.pop("env_arguments", ()), *env_flags)
        values |= {**file_values, "local": {**values.get("local", {}), **file_values.get("local", {})}}
    env_flags = env_flags or tuple(values.pop("env_arguments", ()))
    if any(name in values or flag(name) in overridden for name in SLIMES_SETTINGS):
        values.setdefault("trainer", "slime")
    try:
        names = [*PATHS, *(f"local.{each.name}" for each in fields(LocalTrainerSettings))]
        options = {"prog": "train.py", "description": _DESCRIPTION, "default": _default_flags(values)}
        parsed = parse_flags(_Flags, arguments=ours, names=names, **options)
        settings = {name: value for title in GROUPS for name, value in vars(getattr(parsed, _attribute(title))).items()}
        return train_config(**{**settings, "local": parsed.local, "env_arguments": env_flags})
    except SettingError as error:
        key = error.name.removeprefix("--").replace("-", "_") if error.name.startswith("--") else f"local.{error.name}"
        for file, named in ((config_file, file_values), (run_config, values)):
            if flag(key) not in overridden and key in {*named, *(f"local.{name}" for name in named.get("local", ()))}:
                raise ConfigError(f"--config {file}: {key} {error.problem}") from error
        raise


def _default_flags(values: Mapping[str, Any]) -> Any:
    """The flags' defaults: the settings of files."""
    return _Flags(
        local=LocalTrainerSettings(**values.get("local", {})),
        **{
            _attribute(title): group(**{each.name: values[each.name] for each in fields(group) if each.name in values})
            for title, group in _GROUPS.items()
        },
    )


def _extract_path(arguments: Sequence[str], *names: str) -> tuple[Path | None, list[str]]:
    """The path of the flag ``names``, and the other arguments."""
    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument(*names, type=Path, dest="path")
    options, rest = parser.parse_known_args(arguments)
    return options.path, rest


def read_config(path: Path, *, overridden: set[str]) -> dict[str, Any]:
    """The settings in a file, without the ones that only the run that wrote it has. Raises ``ConfigError``."""
    try:
        text = read_whole(path).decode()
        values = json.loads(text, object_pairs_hook=_unique_keys) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("local", {}), dict):
        raise ConfigError(f"--config {path}: must be a JSON object of settings, and so must `local` in it")
    values = _by_setting(path, {**values}, [*PATHS, "local"])
    local = _by_setting(path, values.pop("local", {}), [each.name for each in fields(LocalTrainerSettings)], "local.")
    for name in _THIS_RUN_ONLY:
        if path.suffix == ".json":
            values.pop(name, None)
        elif name != "output_dir" and name in values:
            raise ConfigError(f"--config {path}: {name} is not a setting for files; give {flag(name)}")
    for name, value in [*values.items()]:
        if _REMOVED_PASSWORD.search(str(value)):
            if flag(name) not in overridden:
                named = "all --env.KEY flags" if name == "env_arguments" else flag(name)
                raise ConfigError(f"--config {path}: {name} was written without its password; give {named}")
            del values[name]
    for name in ("chat_template_kwargs", "eval_sampling"):
        if isinstance(value := values.get(name), dict):
            values[name] = json.dumps(value)
    values = {name: _typed(path, name, find_setting(TrainConfig, PATHS[name]).type, v) for name, v in values.items()}
    types = {name: find_setting(LocalTrainerSettings, name).type for name in local}
    return {**values, "local": {name: _typed(path, f"local.{name}", types[name], v) for name, v in local.items()}}


def _typed(path: Path, name: str, kind: Any, value: Any) -> Any:
    """The value of a file as the setting's type; raises ``ConfigError`` for one of another type."""
    try:
        return TypeAdapter(kind).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        if value in _INFINITE:
            return _typed(path, name, kind, float(value))
        expected = " or ".join(dict.fromkeys(each["msg"].removeprefix("Input should be ") for each in error.errors()))
        raise ConfigError(f"--config {path}: {name} must be {expected}, got {shown_url(repr(value)):.80}") from error


def _by_setting(path: Path, values: Mapping[str, Any], names: Sequence[str], prefix: str = "") -> dict[str, Any]:
    """The values of a file by the names of settings, without a ``None``; raises ``ConfigError`` for
    another name, and for one that is there twice."""
    named, spelled = dict[str, Any](), dict[str, str]()
    for written, value in values.items():
        name = "model_path" if (written, prefix) == ("model", "") else written.replace("-", "_")
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
            raise ConfigError(f"--config {path}: there is no setting {prefix}{name}; the nearest is {prefix}{nearest}")
        if name in spelled:
            first = f"{prefix}{spelled[name]}"
            raise ConfigError(f"--config {path}: {first} is there twice, also as {written}; leave one out")
        named[name], spelled[name] = value, written
    return {name: value for name, value in named.items() if value is not None}


def _unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON file, which must not name a key twice."""
    values = dict(pairs)
    if twice := next((name for name, count in Counter(name for name, _ in pairs).items() if count > 1), None):
        raise ValueError(f"{twice!r} is there twice")
    return values


def config_values(config: TrainConfig) -> dict[str, Any]:
    """The settings as ``read_config`` reads them from JSON, which has no infinity, in any directory."""
    local = asdict(config.local)
    local |= {name: _absolute_name(local[name]) for name in ("loss", "advantage", "metric") if local[name]}
    values: dict[str, Any] = {**flat_values(config), "local": local}
    if config.runners != "controller":  # which imports modules alone
        values["agent"] = _absolute_name(config.agent)
    for name, value in values.items():
        if isinstance(value, Path) and not (name == "eval_tasks" and config.environment.name):  # a split's name
            values[name] = _absolute(value)
    values["external_plugins"] = tuple(map(_absolute, config.external_plugins))
    values["env_arguments"] = tuple(
        str(_absolute(argument)) if previous == "@" else argument
        for previous, argument in zip(("", *config.environment.arguments), config.environment.arguments, strict=False)
    )
    return _without_infinity(values)


def _absolute_name(path: str) -> str:
    """``path/to/file.py:Name`` with the absolute path of the file, also of ``module:Name`` in the working directory."""
    source, colon, name = (path, "", "") if path.endswith(".py") else path.rpartition(":")
    file = source if source.endswith(".py") else f"{source}.py"
    return f"{_absolute(file)}{colon}{name}" if os.path.exists(file) else path


def _absolute(path: str | Path) -> Path:
    """The absolute path of a file; a name of something else, such as a model on the hub, stays as it is."""
    return Path(path).absolute() if os.path.exists(path) else Path(path)


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_without_infinity, value))
    return str(value) if isinstance(value, float) and math.isinf(value) else value
