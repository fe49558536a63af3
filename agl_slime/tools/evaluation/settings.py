"""Command lines with settings of a run beside a command's own flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from agl_slime.cli.options import PATHS, find_setting
from agl_slime.cli.settings import TrainConfig
from agl_slime.support.flags import parse_flags

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Command = TypeVar("Command", bound="DataclassInstance")


def command_config(kind: type[Command], **values: Any) -> Command:
    """A command's configuration of its fields, and of settings of a run, which are its ``settings``."""
    names = {each.name for each in fields(kind)}
    settings = {name: value for name, value in values.items() if name not in names and value is not None}
    return kind(**{name: value for name, value in values.items() if name in names} | {"settings": settings})


def parse_command(
    kind: type[Command], run_settings: Mapping[str, Any], *, prog: str, arguments: Sequence[str], **fixed: Any
) -> Command:
    """The configuration of a command line: flags are the fields of ``kind`` and ``run_settings``, by name with their
    defaults, of which ``...`` is the run's."""
    flags: list[Any] = []
    for name, default in run_settings.items():
        setting = find_setting(TrainConfig, PATHS[name])
        hint, default = ("(default: the run's)", None) if default is ... else (None, default)
        argument = tyro.conf.arg(help=setting.text, help_behavior_hint=hint)
        flags.append((name, Annotated[setting.type | None, argument], default))
    about: dict[str, Any] = {"frozen": True, "kw_only": True, "namespace": {"__doc__": kind.__doc__}}
    parsed: Any = parse_flags(
        make_dataclass(kind.__name__, flags, bases=(kind,), **about), prog=prog, arguments=arguments
    )
    return command_config(kind, **{name: value for name, value in vars(parsed).items() if name != "settings"}, **fixed)
