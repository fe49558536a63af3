"""Print requirements-slime.txt (``scripts/pins.sh slime``): what agl-slime, Agent Lightning and AgentOps need, without
LiteLLM and without AgentOps' upper bounds, which exclude the psutil and packaging that SGLang's environment has."""

from __future__ import annotations

import tomllib
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

HEADER = """\
# Made by scripts/pins.sh: what agl-slime, Agent Lightning 0.3 and AgentOps need, but for LiteLLM, whose proxy would
# replace packages of SGLang's and slime's. scripts/install_in_slime.sh installs these, and then those three alone."""
WITHOUT_DEPENDENCIES = ("agentlightning", "agentops")
LEFT_OUT = ("litellm", *WITHOUT_DEPENDENCIES)


def lines() -> list[str]:
    """A requirement per package, with the lower bounds of all that need it, sorted by name."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    given = [*project["dependencies"], *(line for name in WITHOUT_DEPENDENCIES for line in requires(name) or ())]
    lowest: dict[str, set[str]] = {}
    for requirement in map(Requirement, given):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if requirement.name in LEFT_OUT or not applies:
            continue
        bounds = lowest.setdefault(requirement.name.lower(), set())
        bounds.update(str(bound) for bound in requirement.specifier if bound.operator in (">", ">="))
    return [f"{name}{SpecifierSet(','.join(lowest[name]))}" for name in sorted(lowest)]


if __name__ == "__main__":
    print("\n".join([HEADER, *lines()]))
