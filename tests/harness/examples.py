"""The examples of properties: few in the default run, the same until a test changes; with
``pytest --hypothesis-profile full``, as in ``.ci/nightly``, all, drawn anew each time."""

from __future__ import annotations

from hypothesis import settings

# nothing is said about speed: a machine that is busy with other things must not fail a property
settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=100, deadline=None)


def quick() -> None:
    """The profile of the default run."""
    settings.load_profile("quick")


def examples(full: int) -> int:
    """``full``, or in the default profile a fifth of it, and never fewer than ten where it is more."""
    quick = settings.default.max_examples < settings.get_profile("full").max_examples  # type: ignore[attr-defined]
    return min(full, max(10, full // 5)) if quick else full
