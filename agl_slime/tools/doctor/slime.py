"""A report on the installed slime: its version, the names that this package needs, and the features that it uses.

    python -m agl_slime.tools.doctor.slime

Starts nothing. Exit code 1 when a needed name is missing or has an unsupported form.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields

from agl_slime.errors import AglSlimeError, MissingDependencyError, UnknownVersionError
from agl_slime.support import slime
from agl_slime.support.terminal import print_line

_DRIVERS: dict[tuple[str, ...], str] = {
    ("args", "pg"): "the driver reserves the GPUs and ends manager and placement groups",
    ("args", "restore_plan"): "slime reserves the GPUs and returns a RolloutStartup; each run has its own session",
}


def main() -> int:
    """Print the report; returns the exit code."""
    if not slime.installed():
        print_line(slime.INSTALL_SLIME)
        return 1
    print_line(slime.version())
    faults = 0
    for needed, name, text in inspect_slime():
        faults += needed and text.startswith(("UNKNOWN", "MISSING"))
        print_line(f"  {name:<26} {text}")
    print_line(
        f"{faults} needed parts are missing; supported are {slime.KNOWN}" if faults else "all needed parts are there"
    )
    return int(faults > 0)


def inspect_slime() -> Iterator[tuple[bool, str, str]]:
    """The parts of slime: whether this package needs it, its name, and a text, which begins with UNKNOWN or MISSING if
    the part is unusable."""
    for names, needed in ((slime.HOOK_NAMES, True), (slime.TRAINER_NAMES, True), (slime.OPTIONAL_NAMES, False)):
        for name, places in names.items():
            missing = f"UNKNOWN: in none of {', '.join(places)}" if needed else "not in this version"
            yield needed, name, _text_of(lambda name=name, missing=missing: slime.module_of(name) or missing)
    for name, describe in (
        ("--trainer slime", _driver),
        ("rewards", _rewards),
        ("data source", _data_source),
        ("samples", _samples),
        ("asynchronous training", _asynchronous),
        ("staleness", _staleness),
        ("routed experts", _routed_experts),
        ("checkpoints", lambda: f"written by {'save_checkpoint' if _has('save_checkpoint') else 'the driver'}"),
    ):
        yield True, name, _text_of(describe)


def _text_of(describe: Callable[[], str]) -> str:
    try:
        return describe()
    except UnknownVersionError as error:
        return f"UNKNOWN: {error}"
    except MissingDependencyError as error:
        return f"MISSING: {error}"
    except (AglSlimeError, AttributeError, TypeError, ValueError) as error:
        return f"UNKNOWN: {type(error).__name__}: {error}"


def _has(name: str) -> bool:
    return slime.module_of(name) is not None


def _driver() -> str:
    from agl_slime.train.slime.versions import manager_shape

    shape = manager_shape()
    return f"create_rollout_manager({', '.join(shape)}): {_DRIVERS[shape]}"


def _rewards() -> str:
    from agl_slime.train.slime.versions import normalizes_by_group

    if normalizes_by_group():
        return "slime normalises by group_index, one reward per rollout: normalize_rewards is not needed"
    fix = "give --custom-reward-post-process-path agl_slime.slime_hooks.normalize_rewards"
    return f"slime normalises by position: {fix}"


def _data_source() -> str:
    from agl_slime.types import DataSource  # and not AGLDataSource, which takes seconds to import

    missing = sorted(DataSource.__abstractmethods__ - {"get_samples", "add_samples", "save", "load", "__len__"})
    return f"UNKNOWN: slime calls {', '.join(missing)}" if missing else "has every method that slime calls"


def _samples() -> str:
    from agl_slime.types import Sample

    needed = [field.name for field in fields(Sample) if field.default is field.default_factory is MISSING]
    if needed:
        return f"UNKNOWN: Sample cannot be made without {', '.join(needed)}"
    return "siblings of one rollout share rollout_id"


def _asynchronous() -> str:
    root = slime.checkout()
    if root is None or not (root / "train.py").is_file():
        return "by a script of slime's checkout, which is not beside the package"
    if (root / "train_async.py").is_file():
        return "by train_async.py, one step behind"
    return "by train.py with a fully-async rollout function; train_async.py is gone (slime #2391)"


def _staleness() -> str:
    order = "resumed oldest first by --buffer-sort-by-staleness" if _has("pop_oldest") else "resumed in order of return"
    return f"groups are {order}; slime drops none for its age and bounds none: agl_max_staleness does"


def _routed_experts() -> str:
    if _has("spill_routed_experts"):
        hook = "--rollout-sample-hook-path slime.utils.routed_experts.spill_routed_experts"
        return f"on disk by {hook} under slime's rollout functions, by agl_replay_files under ours"
    return "on disk by agl_replay_files under our rollout function; by straw, where slime has it"


if __name__ == "__main__":
    sys.exit(main())
