"""Where slime's names are: each is looked for at every place that a known version keeps it.

slime is a checkout of somebody's, of any day. A name that is at none of its places is an error that says so; nothing of
ours takes its place. What else differs between versions is in ``agl_slime.slime.versions``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from agl_slime.errors import MissingDependencyError, UnknownVersionError

INSTALL_SLIME = (
    "slime is not installed, or the package of that name on PyPI is, which is another: get it from its repository "
    "(git clone https://github.com/THUDM/slime && pip install -e slime), or use --trainer local"
)
KNOWN = "v0.3.1, v0.3.2 (624b824) and main (0.4.0) as of September 2026"

_LOGGING = "slime.observability.logging_utils", "slime.utils.logging_utils"  # since 624b824, up to v0.3.1
_PLACEMENT = ("slime.ray.placement_group",)
# What the hooks and the data source need.
HOOK_NAMES = {
    "Sample": ("slime.utils.types",),
    "DataSource": ("slime.data.data_source", "slime.rollout.data_source"),  # main, up to 2890b293
    "RolloutFnTrainOutput": ("slime.rollout.base_types",),
    "RolloutFnEvalOutput": ("slime.rollout.base_types",),
    "DynamicFilterOutput": ("slime.rollout.filter_hub.base_types",),
}
# What --trainer slime needs beside them.
TRAINER_NAMES = {
    "parse_args": ("slime.utils.arguments",),
    "find_available_port": ("slime.utils.http_utils",),
    "get_host_info": ("slime.utils.http_utils",),
    "should_run_periodic_action": ("slime.utils.misc",),
    **dict.fromkeys(("configure_logger", "init_tracking", "finish_tracking"), _LOGGING),
    **dict.fromkeys(("create_placement_groups", "create_rollout_manager", "create_training_models"), _PLACEMENT),
}
# What only some versions have.
OPTIONAL_NAMES = {
    "BatchBuilder": ("slime.data.batch_builder",),
    "save_checkpoint": ("slime.data.checkpoint",),
    "RECOVERY_NAMESPACE": ("slime.ray.training_recovery",),
    "training_session_name": ("slime.ray.training_recovery",),
}
# What only agl_slime.slime.launch needs.
_LAUNCH_NAMES = {"get_slime_extra_args_provider": ("slime.utils.arguments",)}
_PLACES = {**HOOK_NAMES, **TRAINER_NAMES, **OPTIONAL_NAMES, **_LAUNCH_NAMES}


def installed() -> bool:
    """Whether slime is importable; the package of that name on PyPI, which has none of its rooms, is not."""
    return importlib.util.find_spec("slime") is not None and any(
        importlib.util.find_spec(f"slime.{room}") is not None for room in ("utils", "rollout", "ray")
    )


def version() -> str:
    """The version of the slime that is importable and where it lies; a checkout's is read from its ``setup.py``."""
    spec = importlib.util.find_spec("slime")
    root = (
        Path(next(iter(spec.submodule_search_locations))).parent if spec and spec.submodule_search_locations else None
    )
    number = None
    if root is not None and (root / "setup.py").is_file():
        number = re.search(r"""version\s*=\s*["']([^"']+)""", (root / "setup.py").read_text())
    try:
        found = number[1] if number else importlib.metadata.version("slime")
    except importlib.metadata.PackageNotFoundError:
        found = "of unknown version"
    return f"slime {found} ({root})"


def find(name: str) -> Any:
    """slime's ``name``. Raises ``UnknownVersionError`` when it is at none of its places, and
    ``MissingDependencyError`` when what slime itself imports is not installed."""
    if (place := place_of(name)) is None:
        raise UnknownVersionError(
            f"{version()} has no {name}: looked for it in {' and '.join(_PLACES[name])}; known are {KNOWN}, "
            "and python -m agl_slime.slime.doctor says what else differs"
        )
    return getattr(_module(place), name)


def place_of(name: str) -> str | None:
    """The module that ``find`` finds slime's ``name`` in; ``None`` where it is at none of its places."""
    return next((place for place in _PLACES[name] if getattr(_module(place), name, None) is not None), None)


def find_optional(name: str) -> Any:
    """slime's ``name``; ``None`` where that version does not have it."""
    try:
        return find(name)
    except UnknownVersionError:
        return None


def _module(place: str) -> Any:
    """slime's module; ``None`` where that version has none of that name."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            return None
        needed = f"needs {error.name}, which is not installed: follow slime's guide"
        raise MissingDependencyError(f"{place} of {version()} {needed}") from error
    except ImportError as error:
        raise MissingDependencyError(f"{place} of {version()} cannot be imported: {error}") from error
