"""What the first command needs beside the circle: a tiny policy, and the formats that it was taught before training.

Importing this package needs neither torch nor transformers.
"""

from pathlib import Path

from agl_slime.demo.formats import Demonstration, DemonstrationSource, LookupDemonstrations, ReverseDemonstrations

LOOKUP_POLICY = Path(__file__).parent / "lookup_policy"
"""A Qwen3 model of about 128,000 parameters that learned how answers to ``LookupDemonstrations`` look: an
ordinary Hugging Face checkpoint, which a real SGLang serves too. ``scripts/make_demo_policy.py`` made it."""

__all__ = ["LOOKUP_POLICY", "Demonstration", "DemonstrationSource", "LookupDemonstrations", "ReverseDemonstrations"]
