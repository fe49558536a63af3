"""A run whose agents are programs, each in a sandbox that a flag of the run names; the sandbox itself."""

import asyncio
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from agl_slime.cli.local import run_training
from agl_slime.cli.main import main
from agl_slime.cli.settings import train_config
from agl_slime.errors import ConfigError
from tests.environments.playing import load, needs_bubblewrap, on_path
from tests.harness.environments import ask, env_python
from tests.programs.environments import boxed

pytestmark = [pytest.mark.environments, needs_bubblewrap]
RUNTIME = ("--env.agent.runtime.type", "bubblewrap")


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    on_path(tmp_path, monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    private = tmp_path / "private"
    private.touch()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield boxed.write(tmp_path, port=listening.getsockname()[1], private=private)


def test_boxed_programs_have_no_network_and_run_files_agree(name, policy_dir, embedded_engine, tmp_path):
    run = tmp_path / "run"
    config = train_config(
        env=name,
        env_python=Path(env_python()),
        env_arguments=(*RUNTIME, "--env.agent.runtime.memory=1", "--env.agent.runtime.processes", "32"),
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=1,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        max_new_tokens=8,
        eval_interval=0,
        keep_rollouts="all",
        output_dir=run,
    )
    out = io.StringIO()
    asyncio.run(run_training(config, console=Console(file=out, width=160)))

    assert "trained: equal" in out.getvalue()
    assert main(["audit", str(run)]) == 0
    rollouts = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert rollouts
    for rollout in rollouts:
        assert (rollout["rewards"]["reached"], rollout["rewards"]["private"]) == (0.0, 0.0), rollout
        assert rollout["rewards"]["processes"] <= 4, "it sees the processes of its box"
        record = json.loads((run / rollout["trace"]).read_text())
        assert record["traces"][0]["rewards"]["odd"]["score"] == rollout["reward"]
    assert len(list((run / "environment").iterdir())) == 4
    assert (tmp_path / "cache" / "agl-slime" / "programs").is_dir()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "bubblewrap"),
        ((*RUNTIME, "--env.agent.runtime.allow", '["example.org"]'), "take a container runtime"),
        ((*RUNTIME, "--env.agent.runtime.memory", "much"), "memory"),
        (("--env.judge.runtime.type", "bubblewrap"), "the agents of tiny_boxed are agent"),
    ],
)
def test_a_sandbox_that_cannot_be_is_one_sentence(name: str, arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(name, arguments=arguments)


def test_as_many_episodes_run_at_once_as_memory_and_processes_hold_boxes() -> None:
    without, processes, large, memory, in_a_container = ask("boxes", "rooms")

    assert without is None
    assert processes == 1000 // (256 + 44) == 3
    assert large == 1, "one always runs"
    assert memory == 10
    assert in_a_container == 4


def test_box_passes_verifiers_runtime_checks() -> None:
    results = ask("boxes", "basics")

    assert results["shell"] == [0, "hello\n/workspace\n/home/agent\nagent\n", ""]
    assert results["code"] == 7
    assert results["no such program"] == [127, "no-such-program: not found\n"]
    assert results["read"] == [512000, True], "bytes come back as they were written"
    nothing, long, shadow = results["refused"]
    assert "No such file" in nothing
    assert "over the 10 byte limit" in long
    assert "No such file" in shadow
    assert results["live"] == "over and back\n"
    assert results["killed"] == -9
    assert results["background"] == "started\n"
    assert results["long output"] < 10_100, "output is kept up to its limit"
    assert results["cancelled after"] < 5
    assert results["processes"].count("sleep") == 1, "the one in the background, and not the cancelled one"


def test_no_process_of_a_box_outlives_it() -> None:
    results = ask("boxes", "basics")

    assert results["ended"]
    assert results["after"] == "the sandbox one has ended: it was stopped"
    assert ask("boxes", "orphaned") == {"before": 1, "after": 0}, "also when the process of the box is killed"


def test_a_box_over_a_limit_ends_with_the_limits_name() -> None:
    results = ask("boxes", "limits")

    assert "has ended: over its limit of memory: its processes had" in results["memory"]
    assert results["files"].endswith("over its limit of files: /workspace had more than 2000 files")
    assert results["seconds"].endswith("has ended: it lived 1 s")


def test_memory_that_several_processes_share_counts_once() -> None:
    results = ask("boxes", "shared")

    assert results.pop("100 MB, of eleven processes") == "ended well\n"
    assert results.pop("hidden") == -9, "a process that cannot be looked into"
    assert len(results) == 4
    for name, end in results.items():
        assert "has ended: over its limit of memory: its processes had" in end, name


def test_output_of_background_processes_is_kept_and_bounded() -> None:
    results = ask("boxes", "background")

    assert results["quiet"] == [0, "hello\n", ""]
    assert results["error"] == [3, "", "hello\n"]
    assert results["talks on"] == [0, "hello\n1\n2\n3\n4\n", ""], "until half a second passes without output"
    assert results["talks later"] == [0, "hello\n", ""]
    assert results["lives"] == 0, "its output is still open"
    assert 10_000 < results["long"] < 10_100


def test_no_signal_from_inside_ends_a_box() -> None:
    assert ask("boxes", "signals") == [0, "done\n", ""]


def test_a_server_inside_is_reached_from_the_host() -> None:
    assert ask("boxes", "exposed") == {"page": "served from inside"}


def test_a_hostile_agent_gets_nothing_and_the_verdict_stands() -> None:
    results = ask("boxes", "hostile")

    episode, outputs = results["kept out"], results["kept out"]["outputs"]
    assert episode["ok"], episode["errors"]
    assert '"content":"fine"' in outputs["asks the model"][1], "it can reach its own model"
    assert episode["turns"] == 1
    assert "root:" not in outputs["reads the system"][1]
    assert "none" not in outputs["reads the system"][1], "no key of the host's environment"
    assert "of the run" not in outputs["reads the run"][1]
    assert "of the other box" not in outputs["reads other workspaces"][1]
    assert outputs["opens the host's port"][0] == 1
    assert results["reached"] == []
    assert outputs["opens the network"][0] == 1
    assert outputs["writes to the system"][1].count("Read-only file system") == 4
    assert "No space left on device" in outputs["fills the disk"][1]
    assert "MemoryError" in outputs["takes the memory"][1]
    assert outputs["kills its parents"][1].startswith("done")
    assert outputs["gains rights"][1].count("not permitted") == 2
    assert outputs["forks without end"][0] == 0
    assert episode["other box"], "the box beside it is as it was"
    assert len(episode["processes"]) == 2, "the first process, and the command that lists them"
    assert episode["rewards"] == {"checked": 0.0}
    assert results["let stay"]["rewards"] == {"checked": 1.0}, "a task that lets processes stay can be cheated by one"
