"""The number of examples of a property: few and fixed in the default run; with ``pytest --hypothesis-profile full``, as
in ``.ci/nightly``, all, and random."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# no deadline: a busy machine must not fail a property
settings.register_profile("quick", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=100, deadline=None)

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def quick() -> None:
    """The profile of the default run."""
    settings.load_profile("quick")


def examples(full: int) -> int:
    """``full``, or in the default profile a fifth of it, and never fewer than ten where it is more."""
    quick = settings.default.max_examples < settings.get_profile("full").max_examples  # type: ignore[attr-defined]
    return min(full, max(10, full // 5)) if quick else full


def drawn(strategy: st.SearchStrategy[Any], full: int) -> list[bytes]:
    """Bodies, drawn before the first is sent: hypothesis would replay them to a server in another state."""
    bodies: list[bytes] = []

    @settings(max_examples=examples(full), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(strategy)
    def draw(body: Any) -> None:
        bodies.append(json.dumps(body).encode())

    draw()
    return bodies
