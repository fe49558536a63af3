"""The number of examples of a property: few and fixed in the default run; with ``pytest --hypothesis-profile full``, as
in ``.ci/nightly``, all, and random."""

from __future__ import annotations

from hypothesis import settings

# no deadline: a busy machine must not fail a property
settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=100, deadline=None)


def quick() -> None:
    """The profile of the default run."""
    settings.load_profile("quick")


def examples(full: int) -> int:
    """``full``, or in the default profile a fifth of it, and never fewer than ten where it is more."""
    quick = settings.default.max_examples < settings.get_profile("full").max_examples  # type: ignore[attr-defined]
    return min(full, max(10, full // 5)) if quick else full
