"""How many examples a property is tried with: few in the default run, which people wait for, all with
``pytest --hypothesis-profile full``, as ``.ci/run`` does."""

from __future__ import annotations

from hypothesis import settings

# nothing is said about speed: a machine that is busy with other things must not fail a property
settings.register_profile("quick", max_examples=20, deadline=None)
settings.register_profile("full", max_examples=100, deadline=None)


def quick() -> None:
    """The profile of the default run."""
    settings.load_profile("quick")


def examples(full: int) -> int:
    """``full`` with the profile of that name, else a fifth of it, and never fewer than ten where it is more."""
    quick = settings.default.max_examples < settings.get_profile("full").max_examples  # type: ignore[attr-defined]
    return min(full, max(10, full // 5)) if quick else full
