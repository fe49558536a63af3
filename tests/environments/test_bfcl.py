"""bfcl's multi-turn tasks: verdicts of whole episodes are the package's own, and what a model writes runs nothing."""

from __future__ import annotations

import functools
import subprocess
from typing import Any

import pytest

from tests.harness.environments import ask, env_python

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if subprocess.run([env_python(), "-c", "import bfcl_eval"], check=False, capture_output=True).returncode:
        pytest.skip("the Python that AGL_ENV_PYTHON names has no bfcl-eval")
    return _played(str(tmp_path_factory.mktemp("bfcl") / "mark"))


@functools.cache
def _played(mark: str) -> Any:
    return ask("bfcl", mark)


def test_the_calls_that_the_package_has_as_right_are_right(found: Any) -> None:
    for category, episodes in found["right"].items():
        assert len(episodes) >= 3
        for episode in episodes:
            assert (episode["errors"], episode["rewards"]) == ([], {"valid": 1.0}), (category, episode["name"])


def test_withheld_function_is_announced_in_its_turn(found: Any) -> None:
    episode = found["right"]["multi_turn_miss_func"][0]
    said = [message["content"] for message in episode["asked"]]
    assert "'name': 'sort'" not in said[0]
    assert '"name": "sort"' not in said[0]
    (told,) = [text for text in said[1:] if "I have updated some more functions" in text]
    assert "'name': 'sort'" in told


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("nothing", "multi_turn:empty_turn_model_response"),
        ("first turn only", "multi_turn:empty_turn_model_response"),
        ("malformed", "multi_turn:empty_turn_model_response"),
        ("no such function", "multi_turn:instance_state_mismatch"),
        ("for ever", "force_terminated"),
    ],
)
def test_wrong_calls_score_0_with_the_packages_reason_and_no_failure(found: Any, what: str, why: str) -> None:
    (episode,) = found["wrong"][what]
    assert (episode["errors"], episode["rewards"], episode["why"]) == ([], {"valid": 0.0}, why)


def test_the_package_reads_replies_with_eval_and_nothing_of_a_model_runs(found: Any) -> None:
    hostile = [episodes[0] for name, episodes in found["wrong"].items() if name.startswith("hostile")]
    assert len(hostile) == 8
    assert not found["written"]
    assert {episode["rewards"]["valid"] for episode in hostile} == {0.0}


def test_nothing_of_an_episode_is_kept_when_it_has_ended(found: Any) -> None:
    episodes = [one for kind in ("right", "wrong") for some in found[kind].values() for one in some]
    assert {episode["left"] for episode in episodes} == {0}
