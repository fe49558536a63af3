"""What the first command needs beside the circle: a tiny policy, and the formats that it is taught before training.

``make_policy`` makes the checkpoint. Importing this package needs neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agl_slime.demo.formats import Demonstration, DemonstrationSource, LookupDemonstrations, ReverseDemonstrations

if TYPE_CHECKING:
    from agl_slime.demo.policy import PolicySettings, make_policy

__all__ = [
    "Demonstration",
    "DemonstrationSource",
    "LookupDemonstrations",
    "PolicySettings",
    "ReverseDemonstrations",
    "make_policy",
]


def __getattr__(name: str) -> Any:
    if name in ("PolicySettings", "make_policy"):
        from agl_slime.demo import policy

        return getattr(policy, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
