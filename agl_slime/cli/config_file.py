"""The command line of ``train.py``, and ``--config FILE``: settings from TOML or a run's ``config.json``."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from agl_slime.cli.flags import flag, split_env_flags
from agl_slime.cli.options import GROUPS, PATHS, find_setting, name_of
from agl_slime.cli.settings import TrainConfig, flat_values, train_config
from agl_slime.errors import ConfigError
from agl_slime.train.local.settings import LocalTrainerSettings

_CONFIG_HELP = "A TOML file of settings, or the config.json of a run; flags take precedence."
_THIS_RUN_ONLY = ("output_dir", "resume", "overwrite")
_REMOVED_PASSWORD = "//***@"

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


_Flags = make_dataclass(
    "_Flags",
    [
        ("config", Annotated[Path | None, tyro.conf.arg(help=_CONFIG_HELP)], None),
        *(
            (_attribute(title), Annotated[group, tyro.conf.arg(name=title), tyro.conf.OmitArgPrefixes], group())
            for title, group in ((title, _group_class(title)) for title in GROUPS)
        ),
        ("local", LocalTrainerSettings, field(default_factory=LocalTrainerSettings)),
    ],
    frozen=True,
)


def parse_train_config(arguments: Sequence[str]) -> TrainConfig:
    """The settings of a command line. Raises ``ConfigError``, or ``SystemExit`` for flags that cannot be parsed."""
    ours, env_flags = split_env_flags(arguments)
    for argument in ours:
        if (fix := _REPLACED.get(argument.partition("=")[0].replace("_", "-"))) is not None:
            raise ConfigError(f"{argument}: there is no such flag; {fix}")
    parser = argparse.ArgumentParser(prog="train.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    options, ours = parser.parse_known_args(ours)
    default = _Flags()
    if (path := options.config) is not None:
        values = read_config(path, overridden={argument.partition("=")[0] for argument in ours})
        env_flags = (*values.pop("env_arguments", ()), *env_flags)
        default = _parse(f"train.py --config {path}", [*_to_flags(values)])
    parsed = _parse("train.py", ours, default=default)
    settings = {name: value for title in GROUPS for name, value in vars(getattr(parsed, _attribute(title))).items()}
    return train_config(**{**settings, "local": parsed.local, "env_arguments": env_flags})


def _parse(program: str, arguments: Sequence[str], **options: Any) -> Any:
    description = "Train an agent online: rollouts through Agent Lightning, a policy on SGLang, weights updated after "
    description += "every iteration."
    return tyro.cli(_Flags, prog=program, description=description, args=arguments, **options)


def read_config(path: Path, *, overridden: set[str]) -> dict[str, Any]:
    """The settings in a file, without the ones that only the run that wrote it has. Raises ``ConfigError``."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must be a JSON object of settings")
    values = {name.replace("-", "_"): value for name, value in values.items()}
    if "model" in values:  # as the flag
        values["model_path"] = values.pop("model")
    _refuse_unknown(path, values, [*PATHS, "local"])
    if isinstance(local := values.get("local"), dict):
        values["local"] = {name.replace("-", "_"): value for name, value in local.items()}
        _refuse_unknown(path, values["local"], [each.name for each in fields(LocalTrainerSettings)], "local.")
    for name in _THIS_RUN_ONLY:
        if path.suffix == ".json":
            values.pop(name, None)
        elif name != "output_dir" and name in values:
            raise ConfigError(f"--config {path}: {name} is not a setting for files; give {flag(name)}")
    for name, value in [*values.items()]:
        if _REMOVED_PASSWORD in str(value):
            if flag(name) not in overridden:
                raise ConfigError(f"--config {path}: {name} was written without its password; give {flag(name)}")
            del values[name]
    if not isinstance(arguments := values.get("env_arguments", []), list) or not all(
        isinstance(argument, str) for argument in arguments
    ):
        raise ConfigError(f"--config {path}: env_arguments must be a list of texts, got {arguments!r:.80}")
    if isinstance(kwargs := values.get("chat_template_kwargs"), dict):
        values["chat_template_kwargs"] = json.dumps(kwargs)
    return values


def config_values(config: TrainConfig) -> dict[str, Any]:
    """The settings as ``read_config`` reads them from JSON, which has no infinity."""
    return _without_infinity({**flat_values(config), "local": asdict(config.local)})


def _without_infinity(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_infinity(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_without_infinity, value))
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _refuse_unknown(path: Path, values: Mapping[str, Any], names: Sequence[str], prefix: str = "") -> None:
    for name in values.keys() - {*names}:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ConfigError(f"--config {path}: there is no setting {prefix}{name}; the nearest is {prefix}{nearest}")


def _to_flags(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        match value:
            case dict():
                yield from _to_flags(value, f"{prefix}{name}.")
            case bool():
                yield flag(f"{prefix}{name}" if value else f"{prefix}no_{name}")
            case [first, *others]:
                yield f"{flag(prefix + name)}={first}"
                yield from map(str, others)
            case []:
                yield flag(prefix + name)
            case None:
                pass
            case _:
                yield f"{flag(prefix + name)}={value}"
