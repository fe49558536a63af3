"""Runs of generators that the rollout buffer starts: how they end, their stages, and a buffer that is killed or starts
again."""

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
from tests.buffer.items import WRITES_TWO_PER_INSTANCE, Client, add_generator, make_item, settings_for
from tests.harness.processes import is_running
from tests.harness.waiting import until


def start_payload(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """The documented payload, with a file that exists."""
    (tmp_path / "input.jsonl").write_text(
        "".join(json.dumps({"instance_id": f"id{n}", "prompt": "?"}) + "\n" for n in range(3))
    )
    sampling = {"max_tokens": 8192, "temperature": 0.8, "top_p": 0.9}
    run = {"num_process": 1024, "num_epoch": 3, "num_repeat_per_sample": "2", "skip_instance_ids": ["id1", "id2"]}
    where = {"remote_engine_url": "http://sglang-router:3000", "input_file": str(tmp_path / "input.jsonl")}
    sizes = {"task_type": "sums", "max_tokens": 8192, "tokenizer_path": "/path/to/tokenizer"}
    return {**run, **where, **sizes, "sampling_params": sampling, **changes}


async def _run_is(client: Client, task: str, state: str) -> dict[str, Any] | None:
    _, stats = await client.get("/stats")
    run = stats["task_types"].get(task, {}).get("run")
    return run if run is not None and run["state"] == state else None


async def test_generators_run_side_by_side_each_with_its_own_stages(tmp_path, monkeypatch):
    """They need no token. A process start, and a payload larger than a pipe, would block the event loop."""
    starters: list[int] = []
    popen = subprocess.Popen

    def start(*args: Any, **kwargs: Any) -> Any:
        starters.append(threading.get_ident())
        return popen(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start)
    normalize = """
    def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
        for item in group[1]:
            item["raw_reward"], item["reward"] = item["reward"], 10 * item["reward"]
        return group
    """
    transform = """
    def transform_group(group, task_type):
        instance_id, items = group
        return instance_id, [{**item, "raw_reward": item["reward"], "task": task_type} for item in items]
    """
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE + normalize)
    add_generator(tmp_path, "words", WRITES_TWO_PER_INSTANCE.replace("sums", "words") + transform)
    add_generator(tmp_path, "bad", 'TASK_TYPE = "bad"\ndef run_rollout(data):\n    raise RuntimeError("no engine")\n')
    async with (
        BufferServer(settings=settings_for(tmp_path, group_size=16, token="secret")) as server,
        Client(server.url, Authorization="Bearer secret") as client,
    ):
        skip = ["id1", *(f"{n}" * 20 for n in range(20_000))]
        status, answer = await client.post("/start_rollout", start_payload(tmp_path, skip_instance_ids=skip))
        assert (status, answer["message"]) == (200, "Rollout started")
        words = start_payload(tmp_path, task_type="words", num_repeat_per_sample=3)
        await client.post("/start_rollout", words)
        await client.post("/start_rollout", start_payload(tmp_path, task_type="bad"))
        for task in ("sums", "words"):
            await until(lambda task=task: _run_is(client, task, "finished"))
        run = await until(lambda: _run_is(client, "bad", "failed"))
        assert "RuntimeError: no engine" in run["error"]
        status, answer = await client.post("/get_rollout_data", {})
        assert status == 400
        assert "several task types are in use (bad, sums, words)" in answer["message"]
        sums = [(entry["uid"], entry["reward"]) for entry in await client.read(task_type="sums")]
        assert sums == [("id0.0", 0), ("id0.1", 10), ("id2.0", 0), ("id2.1", 10)]
        items = await client.read(task_type="words")
        assert [(item["reward"], item["raw_reward"], item["task"]) for item in items] == [
            (reward, reward, "words") for reward in (0, 1, 0)
        ]
    assert len(starters) == 3
    assert threading.get_ident() not in starters


async def test_a_new_run_ends_the_one_before_and_a_hanging_one_is_ended(tmp_path):
    add_generator(tmp_path, "slow", 'import time\nTASK_TYPE = "slow"\ndef run_rollout(data):\n    time.sleep(3600)\n')
    async with (
        BufferServer(settings=settings_for(tmp_path, generator_stall_s=0.5)) as server,
        Client(server.url) as client,
    ):
        await client.post("/start_rollout", start_payload(tmp_path, task_type="slow"))
        first = server.buffer._tasks["slow"].run
        assert first is not None
        _, answer = await client.post("/start_rollout", start_payload(tmp_path, task_type="slow"))
        assert answer["run"] == 2
        assert not first.running
        run = await until(lambda: _run_is(client, "slow", "stalled"))
        assert run["error"] == "no request for 0.5 s"


async def test_broken_and_repeated_generators_are_reported_and_left_out(tmp_path):
    add_generator(tmp_path, "a", WRITES_TWO_PER_INSTANCE)
    add_generator(tmp_path, "b", WRITES_TWO_PER_INSTANCE)
    add_generator(tmp_path, "c", "def broken(:")
    add_generator(tmp_path, "d", "raise SystemExit(3)")
    add_generator(tmp_path, "e", 'TASK_TYPE = "nothing"')
    both = "def filter_item(item):\n    pass\n\ndef transform_group(group):\n    pass\n"
    add_generator(tmp_path, "f", 'TASK_TYPE = "both"\ndef run_rollout(data):\n    pass\n' + both)
    async with BufferServer(settings=settings_for(tmp_path)) as server, Client(server.url) as client:
        _, stats = await client.get("/stats")
    assert stats["generators"] == {"sums": "a_generator.py"}
    problems = stats["generator_problems"]
    for name, problem in (
        ("b", "has the task type 'sums' of a_generator.py and is left out"),
        ("d", "cannot be used: SystemExit: 3"),
        ("e", "cannot be used: TypeError: run_rollout(data) is missing"),
    ):
        assert problems[f"{name}_generator.py"] == problem
    assert problems["c_generator.py"].startswith("cannot be used: SyntaxError")
    assert problems["f_generator.py"].startswith("cannot be used: ConfigError: transform_group replaces filter_item")


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
        await until(lambda: _run_is(client, "sums", "finished"))
        status, answer = await client.post("/get_rollout_data", {})
        assert status == 503
        assert answer["message"] == "the groups of 'sums' could not be decided within 0.5 s"
        assert (await client.post("/buffer/write", make_item("1", task_type="sums")))[0] == 200
        release.touch()
        assert len(await until(client.read)) == 2


async def test_input_files_outside_of_the_allowed_directories_are_refused(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret.jsonl").write_text("{}\n")
    (inner / "link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE)
    async with (
        BufferServer(settings=settings_for(tmp_path, input_dir=(inner,))) as server,
        Client(server.url) as client,
    ):
        for path in ("../secret.jsonl", "/etc/passwd", "generators/../../secret.jsonl", "link.jsonl"):
            status, answer = await client.post("/start_rollout", start_payload(tmp_path, input_file=path))
            assert (status, "outside of the allowed directories" in answer["message"]) == (403, True), path


async def test_a_generator_resumes_after_its_own_death_and_after_the_buffers_end(tmp_path):
    """It dies within its second group, and its second process makes the missing items only; the buffer ends in the
    middle of the run, and its next process does not make an item twice."""
    died, hold, starts = (tmp_path / name for name in ("died", "hold", "starts"))
    hold.touch()
    loop = '\n            for n in range(int(data["num_repeat_per_sample"])):'
    code = f"""
            import os, signal, time
            while instance_id == "id2" and os.path.exists({str(hold)!r}):
                time.sleep(0.01){loop}
                if n and instance_id == "id1" and not os.path.exists({str(died)!r}):
                    open({str(died)!r}, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)"""
    note = f"""
        with open({str(starts)!r}, "a") as file:
            print(json.dumps([data["skip_instance_ids"], data["partial_groups"]]), file=file)
        skip ="""
    add_generator(tmp_path, "sums", WRITES_TWO_PER_INSTANCE.replace(loop, code).replace("\n        skip =", note))
    settings = settings_for(tmp_path, run_dir=tmp_path / "run", generator_restarts=1)
    async with BufferServer(settings=settings) as server, Client(server.url) as client:

        async def four_items() -> bool:
            return server.buffer.store.held_items == 4

        await client.post("/start_rollout", start_payload(tmp_path, skip_instance_ids=[]))
        await until(four_items)
        _, stats = await client.get("/stats")
        assert stats["task_types"]["sums"]["run"]["restarts"] == 1
        run = server.buffer._tasks["sums"].run
        assert run is not None
        assert run.running
        assert [entry["uid"] for entry in await client.read(batch_size=2)] == ["id0.0", "id0.1"]
    assert not run.running
    assert (tmp_path / "run" / "buffer.sqlite").stat().st_mode & 0o077 == 0  # the run's payload may have keys
    hold.unlink()
    async with BufferServer(settings=settings) as server, Client(server.url) as client:
        await until(lambda: _run_is(client, "sums", "finished"))
        assert [entry["uid"] for entry in await client.read()] == ["id1.0", "id1.1", "id2.0", "id2.1"]
        _, stats = await client.get("/stats")
        assert stats["items"]["opened"] == 6
    begun = {"instance_id": "id1", "group_id": None, "items": 1}
    payloads = [json.loads(line) for line in starts.read_text().splitlines()]
    assert payloads == [[[], []], [["id0"], [begun]], [["id0", "id1"], []]]


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

    pids_read = await until(both)
    server.send_signal(signal.SIGKILL)
    await server.wait()

    await until(lambda: not any(map(is_running, pids_read)))
