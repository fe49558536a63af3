"""Runs of generators that the rollout buffer starts: how they end, their stages, and a buffer that is killed or starts
again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from agl_slime.buffer.server import BufferServer
from tests.buffer.items import WRITES_TWO_PER_INSTANCE, Client, add_generator, eventually, make_item, settings_for
from tests.harness.processes import is_running
from tests.harness.waiting import until


def start_payload(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The documented payload, with a file that exists."""
    (tmp_path / "input.jsonl").write_text(
        "".join(json.dumps({"instance_id": f"id{n}", "prompt": "?"}) + "\n" for n in range(3))
    )
    return {
        "num_process": 1024,
        "num_epoch": 3,
        "remote_engine_url": "http://sglang-router:3000",
        "task_type": "sums",
        "input_file": str(tmp_path / "input.jsonl"),
        "num_repeat_per_sample": "2",
        "max_tokens": 8192,
        "sampling_params": {"max_tokens": 8192, "temperature": 0.8, "top_p": 0.9},
        "tokenizer_path": "/path/to/tokenizer",
        "skip_instance_ids": ["id1", "id2"],
        **changes,
    }


async def _run_is(client: Client, task: str, state: str) -> dict[str, Any] | None:
    _, stats = await client.get("/stats")
    run = stats["task_types"].get(task, {}).get("run")
    return run if run is not None and run["state"] == state else None


async def test_a_generator_runs_and_its_groups_come_out(tmp_path):
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    async with BufferServer(settings=settings_for(tmp_path, group_size=16)) as server, Client(server.url) as client:
        status, answer = await client.post("/start_rollout", start_payload(tmp_path, skip_instance_ids=["id1"]))
        assert (status, answer["message"]) == (200, "Rollout started")
        await eventually(lambda: _run_is(client, "sums", "finished"))
        data = await client.read()
        assert [entry["uid"] for entry in data] == ["id0.0", "id0.1", "id2.0", "id2.1"]


async def test_two_task_types_do_not_mix(tmp_path):
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    add_generator(tmp_path, "words", WRITES_TWO_PER_INSTANCE.replace('"sums"', '"words"'))
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        await client.post("/start_rollout", start_payload(tmp_path))
        await client.post("/start_rollout", start_payload(tmp_path, task_type="words", num_repeat_per_sample=3))
        await eventually(lambda: _run_is(client, "sums", "finished"))
        await eventually(lambda: _run_is(client, "words", "finished"))
        status, answer = await client.post("/get_rollout_data", {})
        assert status == 400
        assert "several task types are in use (sums, words)" in answer["message"]
        assert len(await client.read(task_type="sums")) == 2
        assert len(await client.read(task_type="words")) == 3


async def test_a_generator_that_raises_is_recorded_with_its_traceback(tmp_path):
    add_generator(tmp_path, "bad", 'TASK_TYPE = "bad"\ndef run_rollout(data):\n    raise RuntimeError("no engine")\n')
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        await client.post("/start_rollout", start_payload(tmp_path, task_type="bad"))
        run = await eventually(lambda: _run_is(client, "bad", "failed"))
        assert "RuntimeError: no engine" in run["error"]
        assert (await client.get("/health"))[0] == 200


async def test_a_generator_that_hangs_is_ended_and_recorded(tmp_path):
    add_generator(tmp_path, "slow", 'import time\nTASK_TYPE = "slow"\ndef run_rollout(data):\n    time.sleep(3600)\n')
    async with (
        BufferServer(settings=settings_for(tmp_path, generator_stall_s=1.0)) as server,
        Client(server.url) as client,
    ):
        await client.post("/start_rollout", start_payload(tmp_path, task_type="slow"))
        run = await eventually(lambda: _run_is(client, "slow", "stalled"))
        assert run["error"] == "no request for 1 s"


async def test_a_generator_that_fails_is_started_again_where_its_items_end(tmp_path):
    """It dies after the second item, with one group done; the second try makes only the missing items."""
    died = tmp_path / "died"
    die = f"""
            import os, signal
            if instance_id == "id1" and not os.path.exists({str(died)!r}):
                open({str(died)!r}, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            for n in range("""
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE.replace("\n            for n in range(", die))
    async with (
        BufferServer(settings=settings_for(tmp_path, generator_restarts=1)) as server,
        Client(server.url) as client,
    ):
        await client.post("/start_rollout", start_payload(tmp_path, skip_instance_ids=[]))
        run = await eventually(lambda: _run_is(client, "sums", "finished"))
        assert run["restarts"] == 1
        assert [entry["uid"] for entry in await client.read()] == ["id0.0", "id0.1", "id1.0", "id1.1", "id2.0", "id2.1"]
        _, stats = await client.get("/stats")
        assert stats["items"]["opened"] == 6


async def test_a_new_run_ends_the_one_before(tmp_path):
    add_generator(tmp_path, "slow", 'import time\nTASK_TYPE = "slow"\ndef run_rollout(data):\n    time.sleep(3600)\n')
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        await client.post("/start_rollout", start_payload(tmp_path, task_type="slow"))
        first = server.buffer._tasks["slow"].run
        assert first is not None
        _, answer = await client.post("/start_rollout", start_payload(tmp_path, task_type="slow"))
        assert answer["run"] == 2
        assert not first.running
    second = server.buffer._tasks["slow"].run
    assert second is not None
    assert not second.running  # it ends with the server


async def test_broken_and_repeated_generators_are_reported_and_the_others_work(tmp_path):
    add_generator(tmp_path, "a", WRITES_TWO_PER_INSTANCE)
    add_generator(tmp_path, "b", WRITES_TWO_PER_INSTANCE)
    add_generator(tmp_path, "c", "def broken(:")
    add_generator(tmp_path, "d", "raise SystemExit(3)")
    add_generator(tmp_path, "e", 'TASK_TYPE = "nothing"')
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        _, stats = await client.get("/stats")
        assert stats["generators"] == {"sums": "a_generator.py"}
        problems = stats["generator_problems"]
        assert problems["b_generator.py"] == "has the task type 'sums' of a_generator.py and is left out"
        assert problems["c_generator.py"].startswith("cannot be used: SyntaxError")
        assert problems["d_generator.py"] == "cannot be used: SystemExit: 3"
        assert problems["e_generator.py"] == "cannot be used: TypeError: run_rollout(data) is missing"
        assert (await client.post("/start_rollout", start_payload(tmp_path)))[0] == 200


async def test_the_stages_of_a_generator_decide_over_its_groups(tmp_path):
    code = (
        WRITES_TWO_PER_INSTANCE
        + """
    def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
        for item in group[1]:
            item["raw_reward"], item["reward"] = item["reward"], 10 * item["reward"]
        return group
    """
    )
    add_generator(tmp_path, "sums", code)
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        await client.post("/start_rollout", start_payload(tmp_path))
        await eventually(lambda: _run_is(client, "sums", "finished"))
        assert [entry["reward"] for entry in await client.read()] == [0, 10]


async def test_a_generators_transform_group_is_called_as_by_slimes_buffer(tmp_path):
    code = (
        WRITES_TWO_PER_INSTANCE
        + """
    def transform_group(group, task_type):
        instance_id, items = group
        return instance_id, [{**item, "raw_reward": item["reward"], "task": task_type} for item in items]
    """
    )
    add_generator(tmp_path, "sums", code)
    add_generator(tmp_path, "twice", code.replace("sums", "twice") + "filter_item = print\n")
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        _, stats = await client.get("/stats")
        problem = stats["generator_problems"]["twice_generator.py"]
        assert problem.startswith("cannot be used: ConfigError: transform_group replaces filter_item")
        await client.post("/start_rollout", start_payload(tmp_path))
        await eventually(lambda: _run_is(client, "sums", "finished"))
        items = await client.read()
        assert [(item["reward"], item["raw_reward"], item["task"]) for item in items] == [
            (0, 0, "sums"),
            (1, 1, "sums"),
        ]


async def test_a_stage_that_hangs_costs_a_503_and_nothing_is_handed_out(tmp_path):
    release = tmp_path / "release"
    code = (
        WRITES_TWO_PER_INSTANCE
        + f"""
    import os, time
    def filter_item(item):
        while not os.path.exists({str(release)!r}):
            time.sleep(0.01)
        return True
    """
    )
    add_generator(tmp_path, "sums", code)
    async with (
        BufferServer(settings=settings_for(tmp_path, request_timeout_s=0.5)) as server,
        Client(server.url) as client,
    ):
        await client.post("/start_rollout", start_payload(tmp_path))
        await eventually(lambda: _run_is(client, "sums", "finished"))
        status, answer = await client.post("/get_rollout_data", {})
        assert status == 503
        assert answer["message"] == "the groups of 'sums' could not be decided within 0.5 s"
        assert (await client.post("/buffer/write", make_item("1", task_type="sums")))[0] == 200
        release.touch()
        assert len(await eventually(client.read)) == 2


@pytest.mark.parametrize("path", ["../secret.jsonl", "/etc/passwd", "generators/../../secret.jsonl", "link.jsonl"])
async def test_input_files_outside_of_the_allowed_directories_are_refused(tmp_path, path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (inner / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    async with (
        BufferServer(settings=settings_for(tmp_path, input_dir=(inner,))) as server,
        Client(server.url) as client,
    ):
        status, answer = await client.post("/start_rollout", start_payload(tmp_path, input_file=path))
        assert status == 403
        assert "outside of the allowed directories" in answer["message"]


async def test_a_generator_is_started_beside_the_event_loop(tmp_path, monkeypatch):
    """A process start, and a payload larger than a pipe, would block the loop."""
    starters: list[int] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> Any:
        starters.append(threading.get_ident())
        return popen(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start)
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        payload = start_payload(tmp_path, skip_instance_ids=[f"{n}" * 20 for n in range(20_000)])
        assert (await client.post("/start_rollout", payload))[0] == 200
        await eventually(lambda: _run_is(client, "sums", "finished"))
    assert starters
    assert threading.get_ident() not in starters


async def test_generators_need_no_token(tmp_path):
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    async with (
        BufferServer(settings=settings_for(tmp_path, token="secret")) as server,
        Client(server.url, Authorization="Bearer secret") as client,
    ):
        await client.post("/start_rollout", start_payload(tmp_path))
        await eventually(lambda: _run_is(client, "sums", "finished"))
        assert len(await client.read()) == 2


async def test_restarted_buffer_resumes_its_generator_and_items(tmp_path):
    """The first life ends in the middle of a run: the second makes the missing items, and none twice."""
    hold = tmp_path / "hold"
    hold.touch()
    wait = f"""
            import os, time
            while instance_id == "id2" and os.path.exists({str(hold)!r}):
                time.sleep(0.01)
            for n in range("""
    code = WRITES_TWO_PER_INSTANCE.replace("\n            for n in range(", wait)
    add_generator(tmp_path, "sums", code)
    settings = settings_for(tmp_path, run_dir=tmp_path / "run")
    async with BufferServer(settings=settings) as server, Client(server.url) as client:
        await client.post("/start_rollout", start_payload(tmp_path, skip_instance_ids=[]))
        await eventually(lambda: _held(client, 4))
        assert [entry["uid"] for entry in await client.read(batch_size=2)] == ["id0.0", "id0.1"]
    hold.unlink()
    async with BufferServer(settings=settings) as server, Client(server.url) as client:
        await eventually(lambda: _run_is(client, "sums", "finished"))
        assert [entry["uid"] for entry in await client.read()] == ["id1.0", "id1.1", "id2.0", "id2.1"]
        _, stats = await client.get("/stats")
        assert stats["items"]["opened"] == 6


async def _held(client: Client, n: int) -> bool:
    _, stats = await client.get("/stats")
    return stats["held_items"] == n


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
async def test_a_generator_and_its_workers_end_with_a_killed_buffer(tmp_path):
    pids = tmp_path / "pids"
    add_generator(
        tmp_path,
        "slow",
        f"""
        import multiprocessing, os, time
        TASK_TYPE = "slow"
        def work():
            with open({str(pids)!r}, "a") as file:
                file.write(f"{{os.getpid()}}\\n")
            time.sleep(3600)
        def run_rollout(data):
            multiprocessing.Process(target=work).start()
            work()
        """,
    )
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from agl_slime.buffer.server import main; sys.exit(main(sys.argv[1:]))",
        *("--port", "0", "--generators", str(tmp_path / "generators"), "--input-dir", str(tmp_path)),
        env={**os.environ, "TMPDIR": str(tmp_path)},  # files that it cannot clean up any more go with the test
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert server.stdout is not None
    url = (await server.stdout.readline()).decode().split()[3]
    async with Client(url) as client:
        await client.post("/start_rollout", start_payload(tmp_path, task_type="slow"))

    async def both() -> list[int] | None:
        pids_read = [int(line) for line in pids.read_text().split()] if pids.exists() else []
        return pids_read if len(pids_read) == 2 else None

    pids_read = await eventually(both)
    server.send_signal(signal.SIGKILL)
    await server.wait()

    await until(lambda: not any(map(is_running, pids_read)))
