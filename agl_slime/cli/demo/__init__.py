"""The first command's tiny policy, and the demonstrations of the answer format that it was warmed up on.

Importing this package needs neither torch nor transformers.
"""

from pathlib import Path

from agl_slime.cli.demo.formats import Demonstration, DemonstrationSource, LookupDemonstrations, ReverseDemonstrations

LOOKUP_POLICY = Path(__file__).parent / "lookup_policy"
"""A Qwen3 model of about 128,000 parameters, warmed up on ``LookupDemonstrations`` by ``agl-slime demo-policy``.
An ordinary Hugging Face checkpoint, which a real SGLang serves too."""

__all__ = ["LOOKUP_POLICY", "Demonstration", "DemonstrationSource", "LookupDemonstrations", "ReverseDemonstrations"]
