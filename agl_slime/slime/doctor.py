"""What this package finds in the slime that is installed, and which way it will take.

    python -m agl_slime.slime.doctor

It starts nothing. Exit code 1 when something that is needed is not found, or is of a form that is not known.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable, Iterator

from agl_slime.errors import AglSlimeError, MissingDependencyError, UnknownVersionError
from agl_slime.support import slime

_DRIVERS: dict[tuple[str, ...], str] = {
    ("args", "pg"): "the driver reserves the GPUs and ends manager and placement groups",
    ("args", "restore_plan"): "slime reserves the GPUs and returns a RolloutStartup; each run has its own session",
}


def main() -> int:
    """Print the report; returns the exit code."""
    if not slime.installed():
        print(slime.INSTALL_SLIME)
        return 1
    print(slime.version())
    faults = 0
    for needed, name, said in look():
        faults += needed and said.startswith(("UNKNOWN", "MISSING"))
        print(f"  {name:<26} {said}")
    print(
        f"{faults} things that are needed are not there: known are {slime.KNOWN}"
        if faults
        else "all that is needed is there"
    )
    return int(faults > 0)


def look() -> Iterator[tuple[bool, str, str]]:
    """Of each thing: whether it is needed, its name, and what was found, which begins with UNKNOWN or MISSING where
    that will not do."""
    for names, needed in ((slime.HOOK_NAMES, True), (slime.TRAINER_NAMES, True), (slime.OPTIONAL_NAMES, False)):
        for name, places in names.items():
            missing = f"UNKNOWN: in none of {', '.join(places)}" if needed else "not in this version"
            yield needed, name, _said(lambda name=name, missing=missing: slime.place_of(name) or missing)
    for name, look in (
        ("--trainer slime", _driver),
        ("rewards", _rewards),
        ("data source", _data_source),
        ("samples", _samples),
        ("checkpoints", lambda: f"written by {'save_checkpoint' if _has('save_checkpoint') else 'the driver'}"),
        ("straw", lambda: _transport("straw", "straw-queue")),
        ("nixl", lambda: _transport("nixl", "nixl")),
    ):
        yield True, name, _said(look)


def _said(look: Callable[[], str]) -> str:
    try:
        return look()
    except UnknownVersionError as error:
        return f"UNKNOWN: {error}"
    except MissingDependencyError as error:
        return f"MISSING: {error}"
    except (AglSlimeError, AttributeError, TypeError, ValueError) as error:
        return f"UNKNOWN: {type(error).__name__}: {error}"


def _has(name: str) -> bool:
    return slime.place_of(name) is not None


def _driver() -> str:
    from agl_slime.slime.versions import manager_shape

    shape = manager_shape()
    return f"create_rollout_manager({', '.join(shape)}): {_DRIVERS[shape]}"


def _rewards() -> str:
    from agl_slime.slime.versions import normalizes_by_group

    if normalizes_by_group():
        return "slime normalises by group_index, one reward per rollout: normalize_rewards is not needed"
    return (
        "slime normalises by position: give --custom-reward-post-process-path agl_slime.slime_hooks.normalize_rewards"
    )


def _data_source() -> str:
    from agl_slime.types import DataSource  # and not AGLDataSource, which takes seconds to import

    missing = sorted(DataSource.__abstractmethods__ - {"get_samples", "add_samples", "save", "load", "__len__"})
    return f"UNKNOWN: slime wants {', '.join(missing)} of it" if missing else "slime asks for nothing that it lacks"


def _samples() -> str:
    from agl_slime.types import Sample

    needed = [
        field.name
        for field in dataclasses.fields(Sample)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if needed:
        return f"UNKNOWN: Sample cannot be made without {', '.join(needed)}"
    return "siblings of one rollout share rollout_id"


def _transport(name: str, package: str) -> str:
    return f"{package} is {'installed' if importlib.util.find_spec(name) else 'not installed'}"


if __name__ == "__main__":
    sys.exit(main())
