"""bfcl's multi-turn tasks: verdicts of whole episodes are the package's own, and no text of a model runs."""

import subprocess
from typing import Any

import pytest

from tests.harness.environments import ask, env_python

pytestmark = pytest.mark.environments


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if subprocess.run([env_python(), "-c", "import bfcl_eval"], check=False, capture_output=True).returncode:
        pytest.skip("the Python that AGL_ENV_PYTHON names has no bfcl-eval")
    return ask("bfcl", str(tmp_path_factory.mktemp("bfcl") / "mark"))


def test_the_calls_that_the_package_has_as_right_are_right(played: Any) -> None:
    for category, episodes in played["right"].items():
        assert len(episodes) >= 3
        for episode in episodes:
            assert (episode["errors"], episode["rewards"]) == ([], {"valid": 1.0}), (category, episode["name"])


def test_withheld_function_is_announced_in_its_turn(played: Any) -> None:
    first, *later = [message["content"] for message in played["right"]["multi_turn_miss_func"][0]["messages"]]
    assert "'name': 'sort'" not in first
    assert '"name": "sort"' not in first
    (announcement,) = [text for text in later if "I have updated some more functions" in text]
    assert "'name': 'sort'" in announcement


def test_wrong_calls_score_0_with_the_packages_reason_and_no_failure(played: Any) -> None:
    empty = "multi_turn:empty_turn_model_response"
    reasons = {
        "nothing": empty,
        "first turn only": empty,
        "malformed": empty,
        "no such function": "multi_turn:instance_state_mismatch",
        "for ever": "force_terminated",
    }
    for name, reason in reasons.items():
        (episode,) = played["wrong"][name]
        assert (episode["errors"], episode["rewards"], episode["reason"]) == ([], {"valid": 0.0}, reason), name


def test_the_package_reads_replies_with_eval_and_no_text_of_a_model_runs(played: Any) -> None:
    hostile = [episodes[0] for name, episodes in played["wrong"].items() if name.startswith("hostile")]
    assert len(hostile) == 8
    assert not played["written"]
    assert {episode["rewards"]["valid"] for episode in hostile} == {0.0}


def test_no_object_of_an_episode_outlives_it(played: Any) -> None:
    episodes = [episode for kind in ("right", "wrong") for some in played[kind].values() for episode in some]
    assert {episode["instances"] for episode in episodes} == {0}
