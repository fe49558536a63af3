"""The training command's arguments, by slime's own parser in a process of its own."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.tools.rehearse.box import Box
from agl_slime.tools.rehearse.names import nearest
from agl_slime.tools.rehearse.script import Training
from agl_slime.train.slime.args import setting_names

STANDINS = Path(__file__).parent / "standins"
_PROGRAM = Path(__file__).parent / "programs" / "parse.py"
_REWARD = re.compile(r"""rm_type == ["'](\w+)["']""")
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")
_OF_OUR_SCRIPTS = {"--override-opt_param-scheduler"}  # Megatron's, which scripts of slime lack


@dataclass(frozen=True)
class Parsed:
    """slime's arguments, ``None`` if its parser has ended; sentences of its refusals, and of checks that it skipped for
    want of a package; paths that are missing and objects that cannot be imported, by argument, and the nearest names
    that exist; flags that no parser reads, each with the likely one or ``""``."""

    args: Mapping[str, Any] | None
    refused: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    unimportable: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    rewards: frozenset[str] = frozenset()
    """The values of ``--rm-type``."""


def parse(training: Training, *, slime_dir: Path, python: str, scratch: Path, sandbox: bool = True) -> Parsed:
    """Parse the flags of ``training`` with slime at ``slime_dir``, in a process of ``python`` in a ``Box``: it imports
    the objects that flags name.

    Raises:
        ConfigError: ``slime_dir`` is no checkout of slime, or there is no sandbox.
        MissingDependencyError: ``python`` cannot import slime's parser.
    """
    if not (slime_dir / "slime" / "utils" / "arguments.py").is_file():
        raise ConfigError(f"--slime-dir {slime_dir} is no checkout of slime: slime/utils/arguments.py is not there")
    package_root = str(Path(__file__).parents[3])
    python_path = [part for part in training.env.get("PYTHONPATH", "").split(os.pathsep) if part]
    box = Box(scratch, sandbox=sandbox, mapped=training.mapped)
    request: dict[str, Any] = {"flags": training.flags, "launcher": training.launcher, "standins": str(STANDINS)}
    request |= {"slime": str(slime_dir.resolve()), "scratch": str(box.home)}
    request["path"] = [str(Path(training.cwd, training.script).parent), *python_path, package_root]
    request["settings"] = _settings({**os.environ, **training.env})
    request_file = box.write("parse.json", json.dumps(request))
    needs = [json.dumps(request), sys.prefix, package_root]
    cwd = Path(training.cwd) if training.path(training.cwd).is_dir() else slime_dir
    ended = box.run(
        [python, str(_PROGRAM), str(request_file), str(box.home / "log")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        places=[cwd],
        needs=needs,
        seconds=300,
    )
    try:
        answer = json.loads(box.lines()[-1])
        options, real = set(answer.pop("options")), answer.pop("real")
        refused = tuple(dict.fromkeys(answer["refused"]))
        parsed = Parsed(**answer | {"refused": refused})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        last = ended.reason or (ended.output.strip().splitlines() or [f"code {ended.code}"])[-1]
        fix = "give --python that of an environment with slime's requirements (scripts/slime_cpu.sh makes one)"
        raise MissingDependencyError(f"slime's parser does not run in {python}: {last}; {fix}") from error
    missing = {name: path for name, path in parsed.missing.items() if path not in training.files}
    rewards = slime_dir / "slime" / "rollout" / "rm_hub" / "__init__.py"
    return replace(
        parsed,
        missing=missing,
        ignored=unread_flags(training.flags, options, slime_dir, real=real),
        rewards=frozenset(_REWARD.findall(rewards.read_text()) if rewards.is_file() else ()),
    )


def _settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Our settings that the environment gives, numbers as numbers."""
    settings = {name: environ.get(f"AGL_SLIME_{name.removeprefix('agl_').upper()}") for name in setting_names()}
    return {name: int(value) if value.isdecimal() else value for name, value in settings.items() if value}


def unread_flags(flags: tuple[str, ...], options: set[str], slime_dir: Path, *, real: list[str]) -> dict[str, str]:
    """Flags that no parser reads, each with the nearest one. Without Megatron and SGLang, a flag that a script of slime
    or of ours gives counts as theirs."""
    if not {"megatron.training", "sglang.srt"} <= {*real}:
        scripts = [path for suffix in ("sh", "py") for path in slime_dir.glob(f"*/**/*.{suffix}")]
        options = options.union(_OF_OUR_SCRIPTS, *(_FLAG.findall(path.read_text(errors="replace")) for path in scripts))
    names = dict.fromkeys(flag.partition("=")[0] for flag in flags if flag.startswith("--"))
    unread = [flag for flag in names if flag not in options]
    return {flag: nearest(flag, options, cutoff=0.85) for flag in unread}
