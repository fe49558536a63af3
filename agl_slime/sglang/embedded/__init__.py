"""The embedded engine: SGLang's HTTP protocol for a tiny model on the CPU, for the first minute and for tests.

``EmbeddedEngine`` serves a checkpoint in a process of its own; ``make_policy`` makes the tiny checkpoint. Importing this package needs neither torch
nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_slime.sglang.embedded.demos import Demonstration, DemonstrationSource, LookupDemonstrations, ReverseDemonstrations
from agl_slime.sglang.embedded.process import EmbeddedEngine, EmbeddedEngineSettings

if TYPE_CHECKING:
    from agl_slime.sglang.embedded.policy import PolicySettings, make_policy

__all__ = [
    "Demonstration",
    "DemonstrationSource",
    "EmbeddedEngine",
    "EmbeddedEngineSettings",
    "LookupDemonstrations",
    "PolicySettings",
    "ReverseDemonstrations",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    if name in ("PolicySettings", "make_policy"):
        from agl_slime.sglang.embedded import policy

        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
