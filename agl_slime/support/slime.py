"""Import slime's names, each from the modules in which the supported versions have it.

slime is usually a checkout of an arbitrary commit. A name that is in none of its modules is an error; no stand-in of
this package replaces it. Other differences between versions are in ``agl_slime.train.slime.versions``.
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
    "slime is not installed, or an unrelated PyPI package of that name is: get it from its repository "
    "(git clone https://github.com/THUDM/slime && pip install -e slime), or use --trainer local without slime's flags"
)
KNOWN = "v0.3.1, v0.3.2 (624b824) and main (0.4.0) as of September 2026"

_LOGGING = "slime.observability.logging_utils", "slime.utils.logging_utils"  # since 624b824, up to v0.3.1
_PLACEMENT = ("slime.ray.placement_group",)
# Names for the hooks and the data source.
HOOK_NAMES = {
    "Sample": ("slime.utils.types",),
    "DataSource": ("slime.data.data_source", "slime.rollout.data_source"),  # main, up to 2890b293
    "RolloutFnTrainOutput": ("slime.rollout.base_types",),
    "RolloutFnEvalOutput": ("slime.rollout.base_types",),
    "DynamicFilterOutput": ("slime.rollout.filter_hub.base_types",),
}
# Further names for --trainer slime.
TRAINER_NAMES = {
    "parse_args": ("slime.utils.arguments",),
    "find_available_port": ("slime.utils.http_utils",),
    "get_host_info": ("slime.utils.http_utils",),
    "should_run_periodic_action": ("slime.utils.misc",),
    **dict.fromkeys(("configure_logger", "init_tracking", "finish_tracking"), _LOGGING),
    **dict.fromkeys(("create_placement_groups", "create_rollout_manager", "create_training_models"), _PLACEMENT),
}
# Names that only some versions have.
OPTIONAL_NAMES = {
    "BatchBuilder": ("slime.data.batch_builder",),
    "save_checkpoint": ("slime.data.checkpoint",),
    "RECOVERY_NAMESPACE": ("slime.ray.training_recovery",),
    "training_session_name": ("slime.ray.training_recovery",),
    "pop_oldest": ("slime.data.data_source", "slime.rollout.data_source"),
    "spill_routed_experts": ("slime.utils.routed_experts",),
    "slice_log_prob_with_cp": ("slime.backends.megatron_utils.cp_utils",),
}
_MODULES = {**HOOK_NAMES, **TRAINER_NAMES, **OPTIONAL_NAMES}
_MODULES["get_slime_extra_args_provider"] = ("slime.utils.arguments",)  # for agl_slime.train.slime.launch


def installed() -> bool:
    """Whether slime is importable; the unrelated PyPI package of that name has none of its modules."""
    return importlib.util.find_spec("slime") is not None and any(
        importlib.util.find_spec(f"slime.{module}") is not None for module in ("utils", "rollout", "ray")
    )


def version() -> str:
    """Version and directory of the importable slime; a checkout's version is read from its ``setup.py``."""
    root, number = checkout(), None
    if root is not None and (root / "setup.py").is_file():
        number = re.search(r"""version\s*=\s*["']([^"']+)""", (root / "setup.py").read_text())
    try:
        text = number[1] if number else importlib.metadata.version("slime")
    except importlib.metadata.PackageNotFoundError:
        text = "of unknown version"
    return f"slime {text} ({root})"


def checkout() -> Path | None:
    """The directory of slime's package, where a checkout has its scripts; ``None`` without slime."""
    spec = importlib.util.find_spec("slime")
    locations = spec and spec.submodule_search_locations
    return Path(next(iter(locations))).parent if locations else None


def find(name: str) -> Any:
    """slime's ``name``. Raises ``UnknownVersionError`` when it is in none of its modules, and
    ``MissingDependencyError`` when a dependency of slime is not installed."""
    if (module := module_of(name)) is None:
        raise UnknownVersionError(
            f"{version()} has no {name}: looked for it in {' and '.join(_MODULES[name])}; supported are "
            f"{KNOWN}, and agl-slime doctor lists other differences"
        )
    return getattr(_import(module), name)


def module_of(name: str) -> str | None:
    """The module from which ``find`` takes slime's ``name``; ``None`` when no module has it."""
    return next((module for module in _MODULES[name] if getattr(_import(module), name, None) is not None), None)


def find_optional(name: str) -> Any:
    """slime's ``name``; ``None`` if that version lacks it."""
    try:
        return find(name)
    except UnknownVersionError:
        return None


def _import(module: str) -> Any:
    """slime's module; ``None`` if that version lacks it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return None
        needed = f"needs {error.name}, which is not installed: follow slime's guide"
        raise MissingDependencyError(f"{module} of {version()} {needed}") from error
    except ImportError as error:
        raise MissingDependencyError(f"{module} of {version()} cannot be imported: {error}") from error
