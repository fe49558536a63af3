"""``BubblewrapRuntime``: a sandbox without containers for verifiers' agents.

Each box has a fresh home, ``/tmp`` and workspace in size-limited memory, a read-only system, no process, file or socket
of the host, and a private network in which only verifiers' rollout listens. The host talks to the box's first process
over an unnamed socket. That process opens listening sockets inside and passes them out, so the host's event loop serves
the connections.

verifiers' ``RuntimeConfig`` is a closed union, so boxes are passed at run time: ``agent.run(task, runtime=box)``, or
``lend_boxes(env, {"agent": config})`` for the agents of an environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes.base import ProgramResult, Runtime, RuntimeProcess, register
from verifiers.v1.runtimes.subprocess import read_stream

from agl_slime.environments.runtimes.layout import HOME, PATH, BubblewrapConfig, BubblewrapInfo, layout


@dataclass
class Command:
    pid: int
    ended: asyncio.Future[int]


class BoxProcess(RuntimeProcess):
    def __init__(
        self,
        ask: Callable[..., Awaitable[Any]],
        stack: contextlib.AsyncExitStack,
        command: Command,
        stdin: asyncio.StreamWriter,
        out: asyncio.StreamReader,
        err: asyncio.StreamReader,
    ) -> None:
        self._ask, self._stack, self._command, self._stdin = ask, stack, command, stdin
        self.stdout, self.stderr = read_stream(out), read_stream(err)

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()

    async def wait(self) -> int:
        return await asyncio.shield(self._command.ended)

    async def poll(self) -> int | None:
        ended = self._command.ended
        return ended.result() if ended.done() and not ended.exception() else (-9 if ended.done() else None)

    async def terminate(self) -> None:
        await self._signal(signal.SIGTERM)

    async def kill(self) -> None:
        await self._signal(signal.SIGKILL)
        await self._stack.aclose()

    async def _signal(self, number: int) -> None:
        if not self._command.ended.done():
            await self._ask("signal", pid=self._command.pid, signal=number)


class Output:
    """A command's output: all of it, or beginning and end if it is longer than ``limit`` bytes."""

    def __init__(self, stream: asyncio.StreamReader, limit: int | None) -> None:
        self._stream = stream
        self._most = (sys.maxsize, 0) if limit is None else (limit // 2, limit - limit // 2)  # of beginning and end
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0
        self.received = 0
        """Bytes received."""
        self._keeping = True

    async def read(self) -> None:
        """Read to the end."""
        while chunk := await self._stream.read(2**16):
            self.received += len(chunk)
            if not self._keeping:
                continue
            free = max(0, self._most[0] - len(self._head))
            self._head += chunk[:free]
            self._tail += chunk[free:]
            excess = max(0, len(self._tail) - self._most[1])
            self._left_out += excess
            del self._tail[:excess]

    def take(self) -> bytes:
        """The output so far. Later output is read and dropped."""
        self._keeping = False
        cut = f"\n[{self._left_out} bytes left out]\n".encode() if self._left_out else b""
        return bytes(self._head) + cut + bytes(self._tail)


async def pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    out_reader: asyncio.StreamReader,
    out_writer: asyncio.StreamWriter,
) -> None:
    async def one_way(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(2**16):
                target.write(data)
                await target.drain()
            if target.can_write_eof():
                target.write_eof()

    try:
        await asyncio.gather(one_way(reader, out_writer), one_way(out_reader, writer))
    finally:
        writer.close()
        out_writer.close()


HEAD = struct.Struct("!I")
_QUIET_S = 0.5


class BubblewrapRuntime(Runtime):
    """One box. After its end its methods raise ``SandboxError`` with the reason."""

    _prepared: ClassVar[dict[tuple[Path, str | bytes], dict[bool, list[str]]]] = {}
    scripts_dir: ClassVar[str] = "/var/tmp/vf-scripts"

    def __init__(self, config: BubblewrapConfig, name: str | None = None, *, installing: bool = False) -> None:
        super().__init__(name)
        self.config = config
        self.info = BubblewrapInfo(**config.model_dump())
        self._installing = installing
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._ended: str | None = None  # why the box has ended
        self._reason: str | None = None  # reported by the first process before it ends
        self._data, self._fds = b"", []
        self._requests: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._number = 0
        self._sending = asyncio.Lock()
        self._hosts: set[int] = set()
        self._served: dict[int, asyncio.Server] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._background: set[asyncio.Task[None]] = set()  # readers of output from background processes
        register(self)

    # --- start and end -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise RuntimeError("the bubblewrap runtime needs bwrap: install the package bubblewrap")
        self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        files: list[int] = []
        try:
            command = [bwrap, *layout(self.config, self._installing, inner.fileno(), files)]
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                pass_fds=[inner.fileno(), *files],
                start_new_session=True,
            )
        finally:
            inner.close()
            for fd in files:
                os.close(fd)
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        ready = self._requests[0] = loop.create_future()
        loop.add_reader(self._control, self._receive)
        try:
            await asyncio.wait_for(ready, 30)
        except (SandboxError, TimeoutError) as error:
            self.cleanup()
            assert self._process.stderr is not None
            error_text = (await self._process.stderr.read(2000)).decode(errors="replace").strip()
            raise SandboxError(f"bubblewrap did not start: {error_text or error}") from error
        self._timer = loop.call_later(self.config.seconds, self._end, f"it lived {self.config.seconds:g} s")
        self.info.id = self.name

    def _end(self, why: str) -> None:
        """End the box and fail all pending calls with the reason."""
        if self._ended is not None:
            return
        self._ended = why
        error = SandboxError(f"the sandbox {self.name} has ended: {why}")
        for pending in [*self._requests.values(), *self._exits.values()]:
            if not pending.done():
                pending.set_exception(error)
                pending.exception()
        self._requests.clear()
        self._exits.clear()
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            if self._control is not None and self._control.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(self._control)
        self.cleanup()

    async def teardown(self) -> None:
        self._end("it was stopped")
        for task in [*self._tasks, *self._background]:
            task.cancel()
        if self._process is not None:
            await self._process.wait()

    def cleanup(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for server in self._served.values():
            server.close()
        self._served = {}
        if self._control is not None:
            self._control.close()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    # --- messages to and from its first process ----------------------------------------------------------------

    def _receive(self) -> None:
        assert self._control is not None
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 2**16, 16)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self._fds += fds
        self._data += data
        while len(self._data) >= HEAD.size:
            (size,) = HEAD.unpack_from(self._data)
            if len(self._data) < HEAD.size + size:
                break
            message = json.loads(self._data[HEAD.size : HEAD.size + size])
            self._data = self._data[HEAD.size + size :]
            self._handle(message)
        if not data:
            self._end(self._reason or "its first process ended")

    def _handle(self, message: dict[str, Any]) -> None:
        if "over" in message:
            self._reason = f"over its limit of {message['over']}: {message['why']}"
        elif "exit" in message:
            exited = self._exits.pop(message["id"], None)
            if exited is not None and not exited.done():
                exited.set_result(message["exit"])
        else:
            fd = self._fds.pop(0) if message.get("fd") else None
            request = self._requests.pop(message.get("id", 0), None)
            if request is not None and not request.done():
                request.set_result({**message, "fd": fd})
            elif fd is not None:
                os.close(fd)

    async def _ask(self, op: str, fds: tuple[int, ...] = (), number: int | None = None, **args: Any) -> dict[str, Any]:
        if self._ended is not None or self._control is None:
            raise SandboxError(f"the sandbox {self.name} has ended: {self._ended or 'it was not started'}")
        loop = asyncio.get_running_loop()
        if number is None:
            self._number += 1
            number = self._number
        request = self._requests[number] = loop.create_future()
        body = json.dumps({"id": number, "op": op, **args}).encode()
        async with self._sending:
            socket.send_fds(self._control, [HEAD.pack(len(body))], fds)
            await loop.sock_sendall(self._control, body)
        answer = await asyncio.wait_for(request, 60)
        if "error" in answer:
            raise SandboxError(f"{op} in the sandbox {self.name}: {answer['error']}")
        return answer

    async def _spawn(
        self, argv: list[str], env: dict[str, str], fds: tuple[int, int, int], agent: bool = False
    ) -> Command:
        self._number += 1
        number = self._number
        exited = self._exits[number] = asyncio.get_running_loop().create_future()
        base = {"PATH": PATH, "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"}
        installs = {"UV_CACHE_DIR": "/var/tmp/uv/cache", "UV_PYTHON_INSTALL_DIR": "/var/tmp/uv/python"}
        base |= {"PATH": f"/var/tmp/bin:{PATH}", **installs} if self.config.installs else {}
        if not agent:  # a judge must not import modules from the agent's home
            base["PYTHONNOUSERSITE"] = "1"
        answer = await self._ask(
            "spawn", fds, number, argv=argv, env={**base, **self.process_env(env)}, cwd=self.config.workdir, agent=agent
        )
        return Command(answer["pid"], exited)

    # --- verifiers' contract -----------------------------------------------------------------------------------

    async def prepare_uv_script(
        self, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        """The command of a script, which is prepared once for all boxes with the same ``installs``."""
        if self.config.installs is None:
            return await super().prepare_uv_script(script, env, activate=activate)
        key = self.config.installs, script
        if key not in self._prepared:  # in both forms: only a box that installs can write them
            prepare = super().prepare_uv_script
            self._prepared[key] = {form: await prepare(script, env, activate=form) for form in (True, False)}
        return [*self._prepared[key][activate]]

    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        return await self._run(argv, env)

    async def run_program(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        return await self._run(argv, env, agent=not self.config.keep_processes and not self._installing)

    async def _run(
        self,
        argv: list[str],
        env: dict[str, str],
        agent: bool = False,
        stdin_data: bytes | None = None,
        limit: int | None = None,
    ) -> ProgramResult:
        code, out, err = await self._communicate(argv, env, agent, stdin_data, limit or self.config.output)
        return ProgramResult(code, out.decode(errors="replace"), err.decode(errors="replace"))

    async def _communicate(
        self, argv: list[str], env: dict[str, str], agent: bool, stdin_data: bytes | None, limit: int | None
    ) -> tuple[int, bytes, bytes]:
        async with contextlib.AsyncExitStack() as stack:
            piped = self._piped(argv, env, agent, stdin_data is not None)
            command, stdin, *streams = await stack.enter_async_context(piped)
            outputs = [Output(stream, limit) for stream in streams]
            reading = [asyncio.ensure_future(output.read()) for output in outputs]
            stack.callback(lambda: [task.cancel() for task in reading])
            try:
                if stdin is not None:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        stdin.write(stdin_data or b"")
                        await stdin.drain()
                    stdin.close()
                code = await asyncio.shield(command.ended)
                await self._read_rest(outputs, reading, patient=limit is None)
            except asyncio.CancelledError:
                if self._ended is None:
                    with contextlib.suppress(SandboxError):
                        await asyncio.shield(self._ask("signal", pid=command.pid, signal=signal.SIGKILL))
                raise
            texts = [output.take() for output in outputs]
            if not all(task.done() for task in reading):  # a closed pipe would kill the background process
                self._keep_reading(reading, stack.pop_all())
            return code, texts[0], texts[1]

    async def _read_rest(self, outputs: list[Output], reading: list[asyncio.Task[None]], *, patient: bool) -> None:
        """Read the rest of an ended command's output. A background process may keep it open: unless ``patient``,
        reading then ends after a pause without output."""
        while not all(task.done() for task in reading):
            received = [output.received for output in outputs]
            await asyncio.wait(reading, timeout=None if patient else _QUIET_S)
            if not patient and received == [output.received for output in outputs]:
                return

    def _keep_reading(self, reading: list[asyncio.Task[None]], stack: contextlib.AsyncExitStack) -> None:
        async def read() -> None:
            async with stack:
                await asyncio.wait(reading)

        task = asyncio.get_running_loop().create_task(read())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @contextlib.asynccontextmanager
    async def _piped(
        self, argv: list[str], env: dict[str, str], agent: bool, with_stdin: bool
    ) -> AsyncIterator[tuple[Command, asyncio.StreamWriter | None, asyncio.StreamReader, asyncio.StreamReader]]:
        loop = asyncio.get_running_loop()
        pipes = [os.pipe(), os.pipe()]
        stdin_pipe = os.pipe() if with_stdin else None
        child_stdin = stdin_pipe[0] if stdin_pipe else os.open(os.devnull, os.O_RDONLY)
        transports: list[Any] = []
        try:
            readers = []
            for read, _ in pipes:
                reader = asyncio.StreamReader()
                transport, _protocol = await loop.connect_read_pipe(
                    lambda reader=reader: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb", 0)
                )
                transports.append(transport)
                readers.append(reader)
            writer = None
            if stdin_pipe:
                transport, protocol = await loop.connect_write_pipe(
                    asyncio.streams.FlowControlMixin, os.fdopen(stdin_pipe[1], "wb", 0)
                )
                transports.append(transport)
                writer = asyncio.StreamWriter(transport, protocol, None, loop)
            try:
                command = await self._spawn(argv, env, (child_stdin, pipes[0][1], pipes[1][1]), agent)
            finally:
                for fd in (child_stdin, pipes[0][1], pipes[1][1]):
                    os.close(fd)
            yield command, writer, readers[0], readers[1]
        finally:
            for transport in transports:
                transport.close()

    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        stack = contextlib.AsyncExitStack()
        agent = not self.config.keep_processes and not self._installing
        command, stdin, out, err = await stack.enter_async_context(self._piped(argv, env, agent, True))
        assert stdin is not None
        return BoxProcess(self._ask, stack, command, stdin, out, err)

    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        wrapped = ["sh", "-c", 'log=$1; shift; exec "$@" > "$log" 2>&1', "background", log, *argv]
        null = os.open(os.devnull, os.O_RDWR)
        try:
            await self._spawn(wrapped, env, (null, null, null))
        finally:
            os.close(null)

    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        argv = ["cat"] if max_bytes is None else ["head", "-c", str(max_bytes)]
        code, data, error = await self._communicate([*argv, "--", path], {}, False, None, None)
        if code:
            raise SandboxError(f"read {path!r}: {error.decode(errors='replace').strip()}")
        return data

    async def write(self, path: str, data: bytes) -> None:
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        result = await self._run(["sh", "-c", script, "write", path], {}, stdin_data=data)
        if result.exit_code:
            raise SandboxError(f"write {path!r}: {result.stderr.strip()}")

    # --- network -----------------------------------------------------------------------------------------------

    def host_url(self, url: str) -> str:
        """The same address inside, where connections to it are forwarded to the host from now on."""
        port = urlsplit(url).port
        if port is not None and not self._installing and self.config.network_restricted and port not in self._hosts:
            self._hosts.add(port)
            task = asyncio.get_running_loop().create_task(self._forward(port))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return url

    async def _forward(self, port: int) -> None:
        listening = socket.socket(fileno=(await self._ask("listen", port=port))["fd"])

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                out_reader, out_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.close()
                return
            await pump(reader, writer, out_reader, out_writer)

        self._served[port] = await asyncio.start_server(serve, sock=listening)

    async def expose(self, port: int) -> str:
        """An address of the host for a server inside."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                inner = socket.socket(fileno=(await self._ask("connect", port=port))["fd"])
            except SandboxError:
                writer.close()
                return
            await pump(reader, writer, *await asyncio.open_connection(sock=inner))

        server = self._served[-port] = await asyncio.start_server(serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def prepare_execution(self, routes: list[str] | None) -> None:
        """End the setup: wait for the routes, and exempt running processes from the clean-up after an agent."""
        if self._tasks:
            await asyncio.gather(*self._tasks)
        await self._ask("keep")
