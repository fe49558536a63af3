"""Scenes in the sandbox, each with its results as JSON: python -m tests.programs.environments.boxes NAME."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult

from agl_slime.environments.runtimes.bubblewrap import BubblewrapRuntime
from agl_slime.environments.runtimes.layout import BubblewrapConfig
from agl_slime.environments.runtimes.lending import box, max_episodes
from tests.programs.environments.model import client, print_result, scores_of, serving

SMALL = {"memory": 0.25, "disk": 0.02, "files": 2000, "processes": 40, "seconds": 120, "output": 10_000}
BOMB = "import os\nwhile 1:\n  try: os.fork() or os.setsid()\n  except OSError: pass\n"


async def sh(runtime: BubblewrapRuntime, script: str, **env: str) -> list[Any]:
    result = await runtime.run(["sh", "-c", script], env)
    return [result.exit_code, result.stdout, result.stderr]


async def error_of(work: Coroutine[Any, Any, Any]) -> str:
    """The message with which the sandbox refuses the work or ends."""
    try:
        return f"no error: {await work}"
    except SandboxError as error:
        return str(error)


async def basics() -> dict[str, Any]:
    results: dict[str, Any] = {}
    async with box(BubblewrapConfig(**SMALL), "one") as sandbox:
        script = "echo $GREETING; pwd; echo $HOME; id -un; touch ~/a /tmp/b c"
        results["shell"] = await sh(sandbox, script, GREETING="hello")
        results["code"] = (await sh(sandbox, "exit 7"))[0]
        absent = await sandbox.run(["no-such-program"], {})
        results["no such program"] = [absent.exit_code, absent.stderr]
        await sandbox.write("deep/er/file", bytes(range(256)) * 2000)
        data = await sandbox.read("deep/er/file")
        results["read"] = len(data), data[:256] == bytes(range(256))
        reads = sandbox.read("nothing"), sandbox.read("deep/er/file", max_bytes=10), sandbox.read("/etc/shadow")
        results["refused"] = [await error_of(read) for read in reads]
        await sandbox.run_background(["sh", "-c", "echo started; sleep 60"], {}, "log")
        process = await sandbox.open_process(["cat"], {})
        await process.write(b"over and back\n")
        results["live"] = (await anext(process.stdout)).decode()
        await process.kill()
        results["killed"] = await process.wait()
        results["long output"] = len((await sh(sandbox, "seq 100000"))[1])
        async with asyncio.timeout(20):
            await sandbox.run(["sh", "-c", "until [ -s log ]; do :; done"], {})
        results["background"] = (await sandbox.read("log")).decode()
        started = time.monotonic()
        try:
            async with asyncio.timeout(0.5):
                await sandbox.run(["sleep", "50"], {})
        except TimeoutError:
            results["cancelled after"] = time.monotonic() - started
        results["processes"] = (await sh(sandbox, "cat /proc/[0-9]*/comm"))[1].split()
        pid = sandbox._process.pid  # type: ignore[union-attr]
    results["ended"] = not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1]
    results["after"] = await error_of(sandbox.run(["true"], {}))
    return results


HOLDS = {  # 400 MB each, which are no process's own
    "memory files": (
        "for _ in range(40):\n  files.append(os.memfd_create('x'))\n  for _ in range(10): os.write(files[-1], MB)"
    ),
    "a shared mapping": "m=mmap.mmap(-1, 400*2**20); [m.write(MB) for _ in range(400)]",
    "a mapping of a process that has ended": (
        "m=mmap.mmap(-1, 400*2**20)\nif os.fork(): [m.write(MB) for _ in range(400)]; os._exit(0)"
    ),
    "segments": (
        "l=ctypes.CDLL(None); l.shmat.restype=ctypes.c_void_p\n"
        "for _ in range(4):\n  p=l.shmat(l.shmget(0, 100*2**20, 0o1600), None, 0); ctypes.memset(p, 1, 100*2**20)\n"
        "  l.shmdt(ctypes.c_void_p(p))"
    ),
}
SHARED = (
    "import mmap,os,time\nm=mmap.mmap(-1, 100*2**20); [m.write(bytes(2**20)) for _ in range(100)]\n"
    "for _ in range(10):\n  if not os.fork(): m[::4096]; time.sleep(1.5); os._exit(0)\n"
    "time.sleep(1.5); print('ended well')"
)
HIDES = "import ctypes,time; ctypes.CDLL(None).prctl(4, 0, 0, 0, 0); time.sleep(10)"


async def shared() -> dict[str, Any]:
    """How boxes end whose processes share memory, of which 256 MB are allowed."""
    results: dict[str, Any] = {}
    for name, script in HOLDS.items():
        hold = f"import ctypes,mmap,os,time\nMB=bytes(2**20); files=[]\n{script}\ntime.sleep(10)\n"
        async with box(BubblewrapConfig(**SMALL)) as sandbox:
            results[name] = await error_of(sandbox.run(["sh", "-c", 'python3 -c "$0"; sleep 60', hold], {}))
    async with box(BubblewrapConfig(**SMALL)) as sandbox:
        results["100 MB, of eleven processes"] = (await sandbox.run(["python3", "-c", SHARED], {})).stdout
        results["hidden"] = (await sandbox.run(["python3", "-c", HIDES], {})).exit_code
    return results


async def background() -> dict[str, Any]:
    """The output of a command that leaves a process in the background, and the end of that process."""
    results: dict[str, Any] = {}
    async with box(BubblewrapConfig(**SMALL)) as sandbox:
        for name, script in (
            ("quiet", "echo hello; sleep 60 &"),
            ("error", "echo hello >&2; sleep 60 & exit 3"),
            ("talks on", "echo hello; (for i in 1 2 3 4; do sleep 0.2; echo $i; done; sleep 60) &"),
            ("talks later", "echo hello; (until [ -e go ]; do sleep 0.05; done; echo more; touch lives) &"),
        ):
            results[name] = await sh(sandbox, script)
        await sandbox.write("go", b"")
        async with asyncio.timeout(20):
            results["lives"] = (await sh(sandbox, "until [ -e lives ]; do sleep 0.05; done"))[0]
        results["long"] = len((await sh(sandbox, "seq 100000; sleep 60 &"))[1])
    return results


async def signals() -> list[Any]:
    """Every signal there is, sent to the first process from inside."""
    async with box(BubblewrapConfig(**SMALL)) as sandbox:
        return await sh(sandbox, "for i in $(seq 1 64); do kill -$i 1; done 2> /dev/null; echo done")


async def limits() -> dict[str, str]:
    """How a box over a limit ends: each in one of its own."""
    results = {}
    hold = "import mmap,time\nheld=[bytearray(60_000_000) for _ in range(2)]\ntime.sleep(60)\n"
    for name, script, options in (
        ("memory", f"for i in 1 2 3 4 5; do python3 -c '{hold}' & done; wait", {}),
        ("files", "i=0; while :; do i=$((i+1)); : > $i; done", {}),
        ("seconds", "sleep 60", {"seconds": 1}),
    ):
        async with box(BubblewrapConfig(**{**SMALL, **options})) as sandbox:
            results[name] = await error_of(sandbox.run(["sh", "-c", script], {}))
    return results


async def orphaned() -> dict[str, Any]:
    """The commands inside a box before and after its process is killed."""
    child = (
        "import asyncio\nfrom agl_slime.environments.runtimes.lending import *\n"
        "async def main():\n"
        "  async with box(BubblewrapConfig()) as one:\n"
        "    running = asyncio.ensure_future(one.run(['sleep', '1234.5'], {}))\n"
        "    await asyncio.sleep(0)\n"
        "    await one.run(['sh', '-c', 'until grep -aq 1234.5 /proc/[0-9]*/cmdline; do :; done'], {})\n"
        "    print('running', flush=True)\n    await running\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", child, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await asyncio.wait_for(process.stdout.readline(), 60)
    running = _sleepers()
    process.kill()
    await process.wait()
    return {"before": running, "after": await asyncio.to_thread(_none_within, 20)}


def _none_within(seconds: float) -> int:
    end = time.monotonic() + seconds
    while (count := _sleepers()) and time.monotonic() < end:
        time.sleep(0.01)
    return count


def _sleepers() -> int:
    count = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += entry.read_bytes() == b"sleep\0001234.5\0"
        except OSError:
            continue
    return count


# --- a hostile agent ------------------------------------------------------------------------------------------------

REWRITER = """
import os, sys
if os.fork(): sys.exit()
os.setsid()
if os.fork(): sys.exit()
while True:
    try:
        with open('/workspace/check.py', 'w') as f: f.write('import sys; sys.exit(0)')
    except OSError: pass
"""
CONNECT = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('connected')"


class HostileConfig(vf.HarnessConfig):
    pass


class Hostile(vf.Harness[HostileConfig]):
    """A program that wants out, or the reward."""

    attempts: dict[str, list[str]]

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        outputs: dict[str, list[Any]] = {}
        for name, argv in self.attempts.items():
            started = time.monotonic()
            try:
                async with asyncio.timeout(20):
                    result = await runtime.run_program(argv, {"ENDPOINT": endpoint, "SECRET": secret})
                outputs[name] = [result.exit_code, (result.stdout + result.stderr)[-300:]]
            except TimeoutError:
                outputs[name] = ["cut off", round(time.monotonic() - started)]
        trace.info["outputs"] = outputs
        return ProgramResult(0, "", "")


class CheckedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Right when the answer is 42; the check is written right before it runs in the box."""

    async def setup(self, trace, runtime) -> None:
        await runtime.write("answer", b"none yet")

    @vf.reward
    async def checked(self, trace, runtime) -> float:
        await runtime.write("check.py", b"import sys; sys.exit(open('/workspace/answer').read().strip() != '42')")
        processes = await runtime.run(["sh", "-c", "cat /proc/[0-9]*/comm"], {})
        trace.info["processes"] = processes.stdout.split()
        for _ in range(20):
            if (await runtime.run(["python3", "-I", "check.py"], {})).exit_code == 0:
                return 1.0
        return 0.0


async def hostile() -> dict[str, Any]:
    os.environ["SCRIPTED_KEY"] = "none"
    results: dict[str, Any] = {}
    reached: list[str] = []

    async def forbidden(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append("reached")
        writer.close()

    server = await asyncio.start_server(forbidden, "127.0.0.1", 0)
    port = str(server.sockets[0].getsockname()[1])
    ask = (
        "import json,os,urllib.request as u; r = u.Request(os.environ['ENDPOINT'] + '/chat/completions', "
        "json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'hi'}]}).encode(), "
        "{'Authorization': 'Bearer ' + os.environ['SECRET'], 'Content-Type': 'application/json'}); "
        "print(u.urlopen(r, timeout=20).read().decode())"
    )
    with tempfile.TemporaryDirectory() as run:
        (Path(run) / "secret").write_text("of the run")
        attempts = {
            "asks the model": ["python3", "-c", ask],
            "reads the system": ["sh", "-c", "cat /etc/shadow; ls -A /root; cat /proc/1/environ; echo $SCRIPTED_KEY"],
            "reads the run": ["sh", "-c", f"cat {run}/secret; ls {Path(run).parent}"],
            "reads other workspaces": ["sh", "-c", "find / -xdev -name mark; cat /proc/*/root/workspace/mark"],
            "opens the host's port": ["python3", "-c", CONNECT, "127.0.0.1", port],
            "opens the network": ["python3", "-c", CONNECT, "1.1.1.1", "443"],
            "writes to the system": ["sh", "-c", "for i in /usr/bin/sh /etc/passwd /x /dev/x; do echo > $i; done"],
            "fills the disk": ["sh", "-c", "for i in 1 2 3 4; do head -c 9000000 /dev/zero > /tmp/$i; done; rm /tmp/*"],
            "takes the memory": ["python3", "-c", "bytearray(2**30)"],
            "kills its parents": ["sh", "-c", "kill -9 1; kill -STOP 1; kill -9 -1; echo done"],
            "gains rights": ["sh", "-c", "su -c id; mount -t tmpfs x /mnt; mknod /tmp/sda b 8 0; chroot / id"],
            "forks without end": ["sh", "-c", f"python3 -c \"{BOMB}\" > /dev/null 2>&1 & sleep 1"],
            "rewrites the check": ["python3", "-c", REWRITER],
        }  # fmt: skip
        for name, options, tried in (
            ("kept out", {}, [*attempts]),
            ("let stay", {"keep_processes": True}, ["rewrites the check"]),
        ):
            harness = Hostile(HostileConfig(id="hostile"))
            harness.attempts = {attempt: attempts[attempt] for attempt in tried}
            task = CheckedTask(vf.TaskData(idx=0, prompt="What is six times seven?"))
            async with (
                serving(lambda body: "fine") as (address, _),
                box(BubblewrapConfig(**SMALL)) as neighbour,
                box(BubblewrapConfig(**SMALL, **options)) as sandbox,
            ):
                await neighbour.write("mark", b"of the other box")
                agent = vf.make_agent(
                    vf.AgentConfig(
                        model="scripted",
                        client=client(address),
                        runtime=vf.SubprocessConfig(),
                        timeout={"rollout": 200},
                    )
                )
                agent.harness = harness
                trace = await agent.run(task, runtime=sandbox)
                alive = await neighbour.alive()
            results[name] = {
                "ok": trace.ok,
                "errors": [error.message for error in trace.errors],
                "rewards": scores_of(trace),
                "turns": trace.num_turns,
                "other box": alive,
                **trace.info,
            }
    server.close()
    results["reached"] = reached
    return results


async def exposed() -> dict[str, Any]:
    """The page of a server inside, read from the host."""
    import urllib.request

    async with box(BubblewrapConfig(**SMALL)) as sandbox:
        await sandbox.write("page", b"served from inside")
        await sandbox.run_background(["python3", "-m", "http.server", "8123", "--bind", "127.0.0.1"], {}, "log")
        listens = "grep -q ':1FBB 00000000:0000 0A' /proc/net/tcp"
        await sandbox.run(["sh", "-c", f"until {listens}; do :; done"], {})
        url = await sandbox.expose(8123)
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/page", timeout=20).read().decode())
    return {"page": page}


async def rooms() -> list[int | None]:
    """How many episodes have room, where 10 GiB and 1,000 processes are left, and of them 4 GiB to a container."""
    counts: list[int | None] = [max_episodes({})]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path, text in (
            ("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {10 * 2**20} kB\n"),
            ("proc/sys/kernel/pid_max", "1000\n"),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        two = {"agent": BubblewrapConfig(memory=1), "judge": BubblewrapConfig(memory=1, processes=44)}
        counts += [max_episodes(two, root=root), max_episodes({"agent": BubblewrapConfig(memory=99)}, root=root)]
        counts.append(max_episodes({"agent": BubblewrapConfig(memory=1, processes=10)}, root=root))
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True)
        for file, text in (("memory.max", 6 * 2**30), ("memory.current", 2 * 2**30), ("pids.max", "max")):
            (group / file).write_text(f"{text}\n")
        counts.append(max_episodes({"agent": BubblewrapConfig(memory=1, processes=10)}, root=root))
    return counts


if __name__ == "__main__":
    print_result(globals()[sys.argv[1]])
