"""The one place that adapts to slime versions (the fields of ``Sample`` are adapted in ``agl_slime.types``).

| what                                | v0.2.4          | v0.3.0          | v0.3.1         | 624b824                 |
|-------------------------------------|-----------------|-----------------|----------------|-------------------------|
| id that siblings of a rollout share | none            | ``group_id``    | ``rollout_id`` | ``rollout_id``          |
| ``DynamicFilterOutput``             | keep, reason    | keep, reason    | and a fallback | and a fallback          |
| tracking and logging helpers        | ``slime.utils`` | ``slime.utils`` | the same       | ``slime.observability`` |
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from agl_slime.errors import MissingDependencyError

INSTALL_SLIME = (
    "slime is not installed, or the empty package of that name on PyPI is: get it from its repository "
    "(git clone https://github.com/THUDM/slime && pip install -e slime), or use --trainer local"
)


def filter_output(keep: bool, reason: str | None) -> Any:
    """slime's ``DynamicFilterOutput``; the plain bool, which slime takes as well, where slime is not installed."""
    try:
        from slime.rollout.filter_hub.base_types import DynamicFilterOutput  # pyright: ignore[reportMissingImports]
    except ImportError:
        return keep
    return DynamicFilterOutput(keep=keep, reason=reason)


def logging_function(name: str) -> Callable[..., Any]:
    """``configure_logger``, ``init_tracking`` or ``finish_tracking`` of the installed slime, wherever that version
    keeps it."""
    for home in ("slime.observability.logging_utils", "slime.utils.logging_utils", "slime.utils.tracking_utils"):
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError):
            continue
    raise MissingDependencyError(f"the installed slime has no {name}; v0.2.4 to v0.3.1 and 624b824 are known to work")
