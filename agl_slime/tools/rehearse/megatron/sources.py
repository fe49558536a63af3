"""Where slime and Megatron-LM are, and whether they are the versions that ``cuda`` and ``modules`` answer for."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agl_slime.errors import ConfigError, UnknownVersionError
from agl_slime.tools.rehearse.parsing import STANDINS

SLIME, MEGATRON = "624b824", "1dcf0dafa8"
_MODULES = Path(__file__).parent / "modules"
# a file of each checkout and a line that only its version has, patched by slime in Megatron's case
_SLIME_LINE = "slime/backends/megatron_utils/arguments.py", "def _set_default_megatron_args("
_MEGATRON_LINES = (
    ("megatron/core/package_info.py", "MINOR = 16"),
    ("megatron/core/tensor_parallel/inference_layers.py", "InferenceLayerNormColumnParallelLinear"),
)
_PATCHED = "megatron/core/transformer/moe/router.py", "register_routing_replay"


@dataclass(frozen=True)
class Sources:
    slime: Path
    megatron: Path

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> Sources:
        """``SLIME_DIR`` and ``MEGATRON_DIR``, else ``slime`` and ``megatron`` in this Python's environment, where
        ``scripts/slime_cpu.sh`` puts them. Raises ``ConfigError`` for missing ones and ``UnknownVersionError`` for
        other versions."""
        places = {name: environ.get(f"{name.upper()}_DIR") or Path(sys.prefix, name) for name in ("slime", "megatron")}
        sources = cls(**{name: Path(place).resolve() for name, place in places.items()})
        _require(sources.slime, "SLIME_DIR", SLIME, _SLIME_LINE)
        for line in _MEGATRON_LINES:
            _require(sources.megatron, "MEGATRON_DIR", MEGATRON, line)
        if not _has(sources.megatron, _PATCHED):
            fix = f"git -C {sources.megatron} apply {sources.slime}/docker/patch/latest/megatron*.patch"
            raise UnknownVersionError(f"MEGATRON_DIR={sources.megatron} lacks slime's patches: {fix}")
        return sources

    def put_on_path(self) -> None:
        """Make them importable here and in child processes, the stand-ins for what needs a GPU included."""
        first, last = [_MODULES, self.megatron, self.slime, Path(__file__).parents[4]], [STANDINS]
        inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
        os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, first), *inherited, *map(str, last)])
        sys.path[:0], sys.path[len(sys.path) :] = [*map(str, first)], [*map(str, last)]


def _require(root: Path, variable: str, commit: str, line: tuple[str, str]) -> None:
    if not _has(root, line):
        problem = f"has no {line[1].strip('( ')!r} in {line[0]}" if (root / line[0]).is_file() else f"has no {line[0]}"
        fix = f"take commit {commit} (scripts/slime_cpu.sh does)"
        raise (
            UnknownVersionError(f"{variable}={root} {problem}: {fix}")
            if root.is_dir()
            else ConfigError(f"{variable}={root} is no directory: {fix}")
        )


def _has(root: Path, line: tuple[str, str]) -> bool:
    file, text = line
    return (root / file).is_file() and text in (root / file).read_text(errors="replace")
