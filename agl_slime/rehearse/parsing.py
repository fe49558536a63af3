"""The training command's arguments, by slime's own parser in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.rehearse.names import nearest
from agl_slime.rehearse.script import Training
from agl_slime.train.slime.args import setting_names

STANDINS = Path(__file__).parent / "standins"
_PROGRAM = Path(__file__).parent / "programs" / "parse.py"
_FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")


@dataclass(frozen=True)
class Parsed:
    """slime's arguments, ``None`` if its parser has ended; sentences of its refusals; paths that are missing and
    objects that cannot be imported, by argument, and the nearest names that exist; flags that no parser reads, each
    with the likely one or ``""``."""

    args: Mapping[str, Any] | None
    refused: tuple[str, ...] = ()
    missing: Mapping[str, str] = field(default_factory=dict)
    unimportable: Mapping[str, str] = field(default_factory=dict)
    near: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)


def parse(training: Training, *, slime_dir: Path, python: str, scratch: Path) -> Parsed:
    """Parse the flags of ``training`` with slime at ``slime_dir``, in the process of ``python``.

    Raises:
        ConfigError: ``slime_dir`` is no checkout of slime.
        MissingDependencyError: ``python`` cannot import slime's parser.
    """
    if not (slime_dir / "slime" / "utils" / "arguments.py").is_file():
        raise ConfigError(f"--slime-dir {slime_dir} is no checkout of slime: slime/utils/arguments.py is not there")
    ours = Path(__file__).parents[2]
    given = [part for part in training.env.get("PYTHONPATH", "").split(os.pathsep) if part]
    place = Path(training.cwd, training.script).parent
    request = {
        "flags": training.flags,
        "standins": str(STANDINS),
        "slime": str(slime_dir.resolve()),
        "scratch": str(scratch),
        "path": [str(place), *given, str(ours)],
        "settings": _settings({**os.environ, **training.env}),
    }
    asked, answered = scratch / "parse.json", scratch / "parsed.json"
    asked.write_text(json.dumps(request))
    finished = subprocess.run(
        [python, str(_PROGRAM), str(asked), str(answered)],
        cwd=training.cwd,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if not answered.is_file():
        last = (finished.stderr.strip().splitlines() or [f"code {finished.returncode}"])[-1]
        fix = "give --python that of an environment with slime's requirements (scripts/slime_cpu.sh makes one)"
        raise MissingDependencyError(f"slime's parser does not run in {python}: {last}; {fix}")
    answer = json.loads(answered.read_text())
    return Parsed(
        args=answer["args"],
        refused=tuple(answer["refused"]),
        missing=answer["missing"],
        unimportable=answer["unimportable"],
        near=answer["near"],
        ignored=_ignored(training.flags, set(answer["options"]), slime_dir, real=answer["real"]),
    )


def _settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """Our settings that the environment gives, numbers as numbers."""
    given = {name: environ.get(f"AGL_SLIME_{name.removeprefix('agl_').upper()}") for name in setting_names()}
    return {name: int(value) if value.isdecimal() else value for name, value in given.items() if value}


def _ignored(flags: tuple[str, ...], options: set[str], slime_dir: Path, *, real: list[str]) -> dict[str, str]:
    """Flags that no parser reads. Without Megatron and SGLang, a flag that a script of slime gives counts as theirs."""
    if not {"megatron.training", "sglang.srt"} <= {*real}:
        scripts = [path for suffix in ("sh", "py") for path in slime_dir.glob(f"*/**/*.{suffix}")]
        options = options | {flag for path in scripts for flag in _FLAG.findall(path.read_text(errors="replace"))}
    given = dict.fromkeys(flag.partition("=")[0] for flag in flags if flag.startswith("--"))
    unread = [flag for flag in given if flag not in options]
    return {flag: nearest(flag, options, cutoff=0.85) for flag in unread}
