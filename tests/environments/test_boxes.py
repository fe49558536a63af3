"""The sandbox without containers: what it gives verifiers' agents, what ends it, and what a hostile one gets."""

from __future__ import annotations

import shutil

import pytest

from tests.harness.environments import ask

pytestmark = [
    pytest.mark.environments,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: bwrap is not on the PATH"),
]


def test_as_many_episodes_run_at_once_as_memory_and_processes_hold_boxes() -> None:
    without, processes, large, memory, in_a_container = ask("boxes", "rooms")

    assert without is None
    assert processes == 1000 // (256 + 44) == 3
    assert large == 1, "one always runs"
    assert memory == 10
    assert in_a_container == 4


def test_box_passes_verifiers_runtime_checks() -> None:
    found = ask("boxes", "basics")

    assert found["shown"] == [0, "hello\n/workspace\n/home/agent\nagent\n", ""]
    assert found["code"] == 7
    assert found["no such program"] == [127, "no-such-program: not found\n"]
    assert found["read"] == [512000, True], "bytes come back as they were written"
    nothing, long, shadow = found["refused"]
    assert "No such file" in nothing
    assert "over the 10 byte limit" in long
    assert "No such file" in shadow
    assert found["live"] == "over and back\n"
    assert found["killed"] == -9
    assert found["background"] == "started\n"


def test_a_cancelled_command_ends_and_the_box_lives_on() -> None:
    found = ask("boxes", "basics")

    assert found["cancelled after"] < 5
    assert found["left"].count("sleep") == 1, "the one in the background, and not the cancelled one"


def test_output_is_kept_up_to_its_limit() -> None:
    assert ask("boxes", "basics")["long output"] < 10_100


def test_nothing_of_a_box_outlives_it() -> None:
    found = ask("boxes", "basics")
    orphaned = ask("boxes", "orphaned")

    assert found["ended"]
    assert found["after"] == "the sandbox one has ended: it was stopped"
    assert orphaned == {"before": 1, "after": 0}, "neither when the process that holds it is killed"


def test_a_box_over_a_limit_ends_with_the_limits_name() -> None:
    found = ask("boxes", "limits")

    assert "has ended: over its limit of memory: its processes had" in found["memory"]
    assert found["files"].endswith("over its limit of files: /workspace had more than 2000 files")
    assert found["seconds"].endswith("has ended: it lived 1 s")


def test_memory_that_no_process_has_for_its_own_counts() -> None:
    found = ask("boxes", "shared")

    assert found.pop("100 MB, of eleven processes") == "ended well\n", "it counts once"
    assert found.pop("hidden") == -9, "a process that cannot be looked into"
    assert len(found) == 4
    for name, end in found.items():
        assert "has ended: over its limit of memory: its processes had" in end, name


def test_output_of_background_processes_is_kept_and_bounded() -> None:
    found = ask("boxes", "background")

    assert found["quiet"] == [0, "hello\n", ""]
    assert found["error"] == [3, "", "hello\n"]
    assert found["talks on"] == [0, "hello\n1\n2\n3\n4\n", ""], "until nothing comes for half a second"
    assert found["talks later"] == [0, "hello\n", ""]
    assert found["lives"] == 0, "its output is still open"
    assert 10_000 < found["long"] < 10_100


def test_no_signal_from_inside_ends_a_box() -> None:
    assert ask("boxes", "signals") == [0, "done\n", ""]


def test_a_server_inside_is_reached_from_the_host() -> None:
    assert ask("boxes", "exposed") == {"page": "served from inside"}


def test_a_hostile_agent_gets_nothing_and_the_verdict_stands() -> None:
    found = ask("boxes", "hostile")

    kept_out, said = found["kept out"], found["kept out"]["said"]
    assert kept_out["ok"], kept_out["errors"]
    assert '"content":"fine"' in said["asks the model"][1], "its own model is what it can reach"
    assert kept_out["turns"] == 1
    assert "root:" not in said["reads the system"][1]
    assert "none" not in said["reads the system"][1], "no key of the host's environment"
    assert "of the run" not in said["reads the run"][1]
    assert "of the other box" not in said["reads other workspaces"][1]
    assert said["opens the host's port"][0] == 1
    assert found["reached"] == []
    assert said["opens the network"][0] == 1
    assert said["writes to the system"][1].count("Read-only file system") == 4
    assert "No space left on device" in said["fills the disk"][1]
    assert "MemoryError" in said["takes the memory"][1]
    assert said["kills its parents"][1].startswith("done")
    assert said["gains rights"][1].count("not permitted") == 2
    assert said["forks without end"][0] == 0
    assert kept_out["other box"], "the box beside it is as it was"
    assert len(kept_out["left"]) == 2, "the first process, and the command that looked"
    assert kept_out["rewards"] == {"checked": 0.0}


def test_only_a_task_that_lets_processes_stay_can_be_cheated_by_one() -> None:
    assert ask("boxes", "hostile")["let stay"]["rewards"] == {"checked": 1.0}
