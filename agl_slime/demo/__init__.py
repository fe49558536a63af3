"""What the first command needs beside the circle: a tiny policy, and the formats that it is taught before training.

Importing this package needs neither torch nor transformers.
"""

from agl_slime.demo.formats import Demonstration, DemonstrationSource, LookupDemonstrations, ReverseDemonstrations
from agl_slime.demo.policy import PolicySettings, make_policy

__all__ = [
    "Demonstration",
    "DemonstrationSource",
    "LookupDemonstrations",
    "PolicySettings",
    "ReverseDemonstrations",
    "make_policy",
]
