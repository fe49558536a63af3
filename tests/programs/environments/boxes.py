"""What happens in the sandbox, as JSON: python -m tests.programs.environments.boxes NAME."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import ProgramResult

from agl_slime.environments.runtimes.bubblewrap import BubblewrapRuntime
from agl_slime.environments.runtimes.layout import BubblewrapConfig
from agl_slime.environments.runtimes.lending import box, max_episodes
from tests.programs.environments.model import serving

SMALL = {"memory": 0.25, "disk": 0.02, "files": 2000, "processes": 40, "seconds": 120, "output": 10_000}
BOMB = "import os\nwhile 1:\n  try: os.fork() or os.setsid()\n  except OSError: pass\n"


async def sh(runtime: BubblewrapRuntime, script: str, **env: str) -> list[Any]:
    result = await runtime.run(["sh", "-c", script], env)
    return [result.exit_code, result.stdout, result.stderr]


async def basics() -> dict[str, Any]:
    found: dict[str, Any] = {}
    async with box(BubblewrapConfig(**SMALL), "one") as one:
        found["shown"] = await sh(one, "echo $GREETING; pwd; echo $HOME; id -un; touch ~/a /tmp/b c", GREETING="hello")
        found["code"] = (await sh(one, "exit 7"))[0]
        found["no such program"] = [*(await _result(one, ["no-such-program"]))]
        await one.write("deep/er/file", bytes(range(256)) * 2000)
        found["read"] = len(await one.read("deep/er/file")), (await one.read("deep/er/file"))[:256] == bytes(range(256))
        found["refused"] = []
        for work in (one.read("nothing"), one.read("deep/er/file", max_bytes=10), one.read("/etc/shadow")):
            try:
                await work
                found["refused"].append("read")
            except SandboxError as error:
                found["refused"].append(str(error))
        await one.run_background(["sh", "-c", "echo started; sleep 60"], {}, "log")
        process = await one.open_process(["cat"], {})
        await process.write(b"over and back\n")
        found["live"] = (await anext(process.stdout)).decode()
        await process.kill()
        found["killed"] = await process.wait()
        found["long output"] = len((await sh(one, "seq 100000"))[1])
        async with asyncio.timeout(20):
            await one.run(["sh", "-c", "until [ -s log ]; do :; done"], {})
        found["background"] = (await one.read("log")).decode()
        started = time.monotonic()
        try:
            async with asyncio.timeout(0.5):
                await one.run(["sleep", "50"], {})
        except TimeoutError:
            found["cancelled after"] = time.monotonic() - started
        found["left"] = (await sh(one, "cat /proc/[0-9]*/comm"))[1].split()
        pid = one._process.pid  # type: ignore[union-attr]
    found["ended"] = not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1]
    try:
        await one.run(["true"], {})
    except SandboxError as error:
        found["after"] = str(error)
    return found


async def _result(runtime: BubblewrapRuntime, argv: list[str]) -> tuple[int, str]:
    result = await runtime.run(argv, {})
    return result.exit_code, result.stderr


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
    found: dict[str, Any] = {}
    for name, script in HOLDS.items():
        hold = f"import ctypes,mmap,os,time\nMB=bytes(2**20); files=[]\n{script}\ntime.sleep(10)\n"
        async with box(BubblewrapConfig(**SMALL)) as one:
            try:
                result = await one.run(["sh", "-c", 'python3 -c "$0"; sleep 60', hold], {})
                found[name] = f"ended by itself: {result}"
            except SandboxError as error:
                found[name] = str(error)
    async with box(BubblewrapConfig(**SMALL)) as one:
        found["100 MB, of eleven processes"] = (await one.run(["python3", "-c", SHARED], {})).stdout
        found["hidden"] = (await one.run(["python3", "-c", HIDES], {})).exit_code
    return found


async def background() -> dict[str, Any]:
    """What a command prints that leaves something in the background, and what becomes of that."""
    found: dict[str, Any] = {}
    async with box(BubblewrapConfig(**SMALL)) as one:
        for name, script in (
            ("quiet", "echo hello; sleep 60 &"),
            ("error", "echo hello >&2; sleep 60 & exit 3"),
            ("talks on", "echo hello; (for i in 1 2 3 4; do sleep 0.2; echo $i; done; sleep 60) &"),
            ("talks later", "echo hello; (until [ -e go ]; do sleep 0.05; done; echo more; touch lives) &"),
        ):
            found[name] = await sh(one, script)
        await one.write("go", b"")
        async with asyncio.timeout(20):
            found["lives"] = (await sh(one, "until [ -e lives ]; do sleep 0.05; done"))[0]
        found["long"] = len((await sh(one, "seq 100000; sleep 60 &"))[1])
    return found


async def signals() -> list[Any]:
    """Every signal there is, sent to the first process from inside."""
    async with box(BubblewrapConfig(**SMALL)) as one:
        return await sh(one, "for i in $(seq 1 64); do kill -$i 1; done 2> /dev/null; echo done")


async def limits() -> dict[str, str]:
    """How a box ends that goes over a limit: each in one of its own."""
    found = {}
    hold = "import mmap,time\nheld=[bytearray(60_000_000) for _ in range(2)]\ntime.sleep(60)\n"
    for name, script, more in (
        ("memory", f"for i in 1 2 3 4 5; do python3 -c '{hold}' & done; wait", {}),
        ("files", "i=0; while :; do i=$((i+1)); : > $i; done", {}),
        ("seconds", "sleep 60", {"seconds": 1}),
    ):
        async with box(BubblewrapConfig(**{**SMALL, **more})) as one:
            try:
                result = await one.run(["sh", "-c", script], {})
                found[name] = f"ended by itself: {result}"
            except SandboxError as error:
                found[name] = str(error)
    return found


async def orphaned() -> dict[str, Any]:
    """A process that holds a box is killed: what became of what ran inside."""
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
    before = _sleepers()
    process.kill()
    await process.wait()
    return {"before": before, "after": await asyncio.to_thread(_none_within, 20)}


def _none_within(seconds: float) -> int:
    end = time.monotonic() + seconds
    while (left := _sleepers()) and time.monotonic() < end:
        time.sleep(0.01)
    return left


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
        said = {}
        for name, argv in self.attempts.items():
            started = time.monotonic()
            try:
                async with asyncio.timeout(20):
                    result = await runtime.run_program(argv, {"ENDPOINT": endpoint, "SECRET": secret})
                said[name] = [result.exit_code, (result.stdout + result.stderr)[-300:]]
            except TimeoutError:
                said[name] = ["cut off", round(time.monotonic() - started)]
        trace.info["said"] = said
        return ProgramResult(0, "", "")


class CheckedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Right when the answer is 42; the check is written when it is needed, and runs in the box."""

    async def setup(self, trace, runtime) -> None:
        await runtime.write("answer", b"none yet")

    @vf.reward
    async def checked(self, trace, runtime) -> float:
        await runtime.write("check.py", b"import sys; sys.exit(open('/workspace/answer').read().strip() != '42')")
        left = await runtime.run(["sh", "-c", "cat /proc/[0-9]*/comm"], {})
        trace.info["left"] = left.stdout.split()
        for _ in range(20):
            if (await runtime.run(["python3", "-I", "check.py"], {})).exit_code == 0:
                return 1.0
        return 0.0


async def hostile() -> dict[str, Any]:
    os.environ["SCRIPTED_KEY"] = "none"
    found: dict[str, Any] = {}
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
        for name, more in (("kept out", {}), ("let stay", {"keep_processes": True})):
            harness = Hostile(HostileConfig(id="hostile"))
            harness.attempts = (
                attempts if name == "kept out" else {"rewrites the check": attempts["rewrites the check"]}
            )
            task = CheckedTask(vf.TaskData(idx=0, prompt="What is six times seven?"))
            async with (
                serving(lambda body: "fine") as (address, _),
                box(BubblewrapConfig(**SMALL)) as other,
                box(BubblewrapConfig(**SMALL, **more)) as mine,
            ):
                await other.write("mark", b"of the other box")
                agent = vf.make_agent(
                    vf.AgentConfig(
                        model="scripted",
                        client=EvalClientConfig(base_url=address, api_key_var="SCRIPTED_KEY"),
                        runtime=vf.SubprocessConfig(),
                        timeout={"rollout": 200},
                    )
                )
                agent.harness = harness
                trace = await agent.run(task, runtime=mine)
                alive = await other.alive()
            found[name] = {
                "ok": trace.ok,
                "errors": [error.message for error in trace.errors],
                "rewards": {key: value.score for key, value in trace.rewards.items()},
                "turns": trace.num_turns,
                "other box": alive,
                **trace.info,
            }
    server.close()
    found["reached"] = reached
    return found


async def exposed() -> dict[str, Any]:
    """A server inside, asked from the host, and one of the host that was not handed in."""
    import urllib.request

    async with box(BubblewrapConfig(**SMALL)) as one:
        await one.write("page", b"served from inside")
        await one.run_background(["python3", "-m", "http.server", "8123", "--bind", "127.0.0.1"], {}, "log")
        listens = "grep -q ':1FBB 00000000:0000 0A' /proc/net/tcp"
        await one.run(["sh", "-c", f"until {listens}; do :; done"], {})
        url = await one.expose(8123)
        page = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{url}/page", timeout=20).read().decode())
    return {"page": page}


async def rooms() -> list[int | None]:
    """How many episodes have room, where 10 GiB and 1,000 processes are left, and of them 4 GiB to a container."""
    found: list[int | None] = [max_episodes({})]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path, text in (
            ("proc/meminfo", f"MemTotal: 99 kB\nMemAvailable: {10 * 2**20} kB\n"),
            ("proc/sys/kernel/pid_max", "1000\n"),
        ):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        two = {"agent": BubblewrapConfig(memory=1), "judge": BubblewrapConfig(memory=1, processes=44)}
        found += [max_episodes(two, root=root), max_episodes({"agent": BubblewrapConfig(memory=99)}, root=root)]
        found.append(max_episodes({"agent": BubblewrapConfig(memory=1, processes=10)}, root=root))
        group = root / "sys/fs/cgroup"
        group.mkdir(parents=True)
        for file, text in (("memory.max", 6 * 2**30), ("memory.current", 2 * 2**30), ("pids.max", "max")):
            (group / file).write_text(f"{text}\n")
        found.append(max_episodes({"agent": BubblewrapConfig(memory=1, processes=10)}, root=root))
    return found


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(asyncio.run(globals()[sys.argv[1]]()), default=str), file=out)
