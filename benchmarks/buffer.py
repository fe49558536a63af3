"""Rollout buffer: items per second and 99th percentile latency, with 64 writers, 16 kB items and a reader that takes
groups meanwhile.

    python benchmarks/buffer.py [--slime-dir DIR --slime-python PYTHON]

Beside ours stand slime's own buffer server (when its checkout and a Python with fastapi and uvicorn are named) and, as
the limit, an aiohttp server that only sends each body back. Each server is a process of its own; the client is one more
and speaks HTTP over bare sockets, so that it costs little. The reader takes 256 items at a time (slime's server gives
all it has, whatever is asked).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import tyro

from agl_slime.support.net import free_port

_ECHO = """
import sys
from aiohttp import web
async def echo(request):
    return web.Response(body=await request.read(), content_type="application/json")
app = web.Application(client_max_size=1 << 26)
app.router.add_post("/{tail:.*}", echo)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)
"""

_SLIME = """
import importlib.util, sys, uvicorn
spec = importlib.util.spec_from_file_location("slime_buffer", sys.argv[2] + "/slime_plugins/rollout_buffer/buffer.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
limits = {"limit_concurrency": 1000, "timeout_keep_alive": 5}
uvicorn.run(module.app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False, **limits)
"""

_OURS = "import sys; from agl_slime.buffer.server import main; sys.exit(main(sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the rollout buffer."""

    writers: int = 64
    """Connections that write."""
    items: int = 12_800
    """Items written in all; slime's server gets a quarter of them."""
    item_kb: float = 16.0
    """Size of an item in kilobytes."""
    group_size: int = 16
    """Items per group (16 is what slime's server starts with)."""
    tokens: bool = False
    """Fill items with token ids and log-probs instead of text."""
    slime_dir: Path | None = None
    """A checkout of slime."""
    slime_python: str = sys.executable
    """A Python with fastapi and uvicorn for slime's server."""


@dataclass(frozen=True)
class Row:
    name: str
    writes_per_s: float
    write_p50_ms: float
    write_p99_ms: float
    reads_items_per_s: float
    read_p99_ms: float
    cpu_us: float


class Connection:
    """One keep-alive connection that sends prepared requests."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        self._writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def post(self, path: str, body: bytes, *, minimal: bool = False) -> bytes:
        prefer = b"Prefer: return=minimal\r\n" if minimal else b""
        head = b"POST %s HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n" % (
            path.encode(),
            prefer,
            len(body),
        )
        self._writer.write(head + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"the server answered {answer[:200]!r}")
        start = answer.lower().index(b"content-length:") + 15
        return await self._reader.readexactly(int(answer[start : answer.index(b"\r", start)]))

    def close(self) -> None:
        self._writer.close()


def make_bodies(options: Options, *, count: int) -> list[bytes]:
    """Items of groups in the order in which concurrent generators write them."""
    rng = random.Random(0)
    long = "".join(rng.choices("abcdefgh \n", k=int(options.item_kb * 1000) + 5000))
    bodies = []
    for n in range(count):
        item = {
            "uid": f"{n:032x}",
            "instance_id": f"instance_{n // options.group_size}",
            "reward": float(rng.random() < 0.5),
            "extra_info": {},
        }
        if options.tokens:
            length = int(options.item_kb * 1000 / 28)
            item |= {
                "tokens": [rng.randrange(150_000) for _ in range(length)],
                "rollout_log_probs": [-rng.random() for _ in range(length)],
                "messages": [],
            }
        else:
            start = rng.randrange(5000)
            text = long[start : start + int(options.item_kb * 1000) - 250]
            item["messages"] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        bodies.append(json.dumps(item).encode())
    return bodies


async def measure(
    name: str,
    pid: int,
    port: int,
    options: Options,
    bodies: Sequence[bytes],
    *,
    per_request: int = 1,
    minimal: bool = False,
    reads: bool = True,
) -> Row:
    requests = list(bodies)
    if per_request > 1:
        requests = [b"[" + b",".join(bodies[n : n + per_request]) + b"]" for n in range(0, len(bodies), per_request)]
    left = iter(requests)
    write_s: list[float] = []
    read_s: list[float] = []
    read_items = 0

    async def write() -> None:
        connection = await Connection(port).open()
        for body in left:
            began = time.perf_counter()
            await connection.post("/buffer/write", body, minimal=minimal)
            write_s.append(time.perf_counter() - began)
        connection.close()

    async def read(connection: Connection) -> int:
        began = time.perf_counter()
        answer = await connection.post("/get_rollout_data", b'{"batch_size": 256}')
        took = time.perf_counter() - began
        found = answer.count(b'"raw_reward"') or answer.count(b'"uid"')
        if found:
            read_s.append(took)
        return found

    async def read_meanwhile(connection: Connection) -> None:
        nonlocal read_items
        while True:
            read_items += await read(connection)
            await asyncio.sleep(0.1)

    cpu_before = cpu_seconds(pid)
    reader = await Connection(port).open()
    reading = asyncio.create_task(read_meanwhile(reader)) if reads else None
    began = time.perf_counter()
    await asyncio.gather(*(write() for _ in range(options.writers)))
    took = time.perf_counter() - began
    if reading is not None:
        reading.cancel()
        await asyncio.wait({reading})
        reader.close()
        reader = await Connection(port).open()
        while found := await read(reader):
            read_items += found
    reader.close()
    return Row(
        name,
        len(bodies) / took,
        statistics.median(write_s) * 1000,
        _percentile(write_s, 99) * 1000,
        read_items / sum(read_s) if read_s else 0.0,
        _percentile(read_s, 99) * 1000 if read_s else 0.0,
        (cpu_seconds(pid) - cpu_before) / len(bodies) * 1e6,
    )


def cpu_seconds(pid: int) -> float:
    """Processor time that the server has used; Linux only, 0 elsewhere."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


@asynccontextmanager
async def server(*command: str, port: int) -> AsyncIterator[int]:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                (await Connection(port).open()).close()
                break
            except OSError:
                if process.returncode is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server did not start: {' '.join(command[:1])}") from None
                await asyncio.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        await process.wait()


async def run(options: Options) -> list[Row]:
    bodies = make_bodies(options, count=options.items)
    rows: list[Row] = []
    port = free_port()
    async with server(sys.executable, "-c", _ECHO, str(port), port=port) as pid:
        rows.append(await measure("aiohttp echo (limit)", pid, port, options, bodies, reads=False))
    if options.slime_dir is not None:
        port = free_port()
        async with server(options.slime_python, "-c", _SLIME, str(port), str(options.slime_dir), port=port) as pid:
            rows.append(await measure("slime's buffer", pid, port, options, bodies[: options.items // 4]))
    with tempfile.TemporaryDirectory() as directory:
        cases = [
            ("in memory", [], 1),
            ("on disk", ["--run-dir"], 1),
            ("in memory, 16 items per write", [], 16),
            ("on disk, 16 items per write", ["--run-dir"], 16),
        ]
        for number, (label, flags, per_request) in enumerate(cases):
            port = free_port()
            where = [*flags, f"{directory}/{number}"] if flags else []
            arguments = [
                "--port",
                str(port),
                "--group-size",
                str(options.group_size),
                "--keep-delivered-groups",
                "64",
                *where,
            ]
            async with server(sys.executable, "-c", _OURS, *arguments, port=port) as pid:
                rows.append(
                    await measure(
                        f"agl-slime, {label}", pid, port, options, bodies, per_request=per_request, minimal=True
                    )
                )
    return rows


def table(rows: Sequence[Row], options: Options) -> str:
    slime = next((row for row in rows if row.name.startswith("slime")), None)
    kind = "token ids and log-probs" if options.tokens else "text"
    writers = f"{options.writers} writers, items of {options.item_kb:g} kB ({kind})"
    lines = [
        f"{writers}, groups of {options.group_size}, one reader",
        "",
        f"| {'server':<38} | written items/s | vs slime | vs echo | p50 ms | p99 ms "
        "| read items/s | read p99 ms | CPU us/item |",
        f"|{'-' * 40}|----------------:|---------:|--------:|-------:|-------:"
        "|-------------:|------------:|------------:|",
    ]
    for row in rows:
        against_slime = f"{row.writes_per_s / slime.writes_per_s:.1f}x" if slime is not None else "-"
        read = (f"{row.reads_items_per_s:.0f}", f"{row.read_p99_ms:.1f}") if row.reads_items_per_s else ("-", "-")
        lines.append(
            f"| {row.name:<38} | {row.writes_per_s:>15.0f} | {against_slime:>8} "
            f"| {row.writes_per_s / rows[0].writes_per_s:>6.2f}x | {row.write_p50_ms:>6.1f} | {row.write_p99_ms:>6.1f} "
            f"| {read[0]:>12} | {read[1]:>11} | {row.cpu_us:>11.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    given = tyro.cli(Options)
    print(table(asyncio.run(run(given)), given))
