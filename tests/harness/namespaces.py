"""``Network``: several hosts on one machine, each in Linux namespaces of its own, on one bridge.

A host has its own network, name, processes, ``/etc/hosts`` and ``/dev/shm``, and shares the file system. Bridge and
hosts end with the process that made them, however it ends: nothing is left on the machine, and its own network is not
touched. Needs util-linux and iproute2, and root or user namespaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError

_TOOLS = ("unshare", "nsenter", "ip")
INTERFACE = "eth0"
# The first process of a PID namespace: the namespace ends with it, and it ends with its standard input. The process id
# is read while /proc is still the one of the caller; children that it inherits are reaped because it ignores SIGCHLD.
_FIRST = """set -e
trap '' CHLD
read -r pid _ < /proc/self/stat
{setup}
echo "$pid"
exec cat > /dev/null
"""
_BRIDGE = """ip link set lo up
ip link add bridge type bridge
ip link set bridge up"""
_HOST = """hostname "$1"
mount -t proc proc /proc
mount --bind "$2" /etc/hosts
shift 2
for path do mount -t tmpfs -o mode=1777 tmpfs "$path"; done
ip link set lo up"""
_ADDRESSES = f"""set -e
ip address add "$1/24" dev {INTERFACE}
ip address add "$2/64" dev {INTERFACE} nodad 2> /dev/null || true
ip link set {INTERFACE} up
ip route add default dev {INTERFACE}
ip -6 route add default dev {INTERFACE} 2> /dev/null || true"""

_PROBE = """set -e
ip link add name near type bridge
ip link add name one type veth peer name two
mount -t tmpfs tmpfs /dev/shm"""


def why_no_namespaces() -> str | None:
    """The reason why this machine allows no ``Network``, as a sentence, or ``None``."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed: hosts in namespaces need Linux with util-linux and iproute2"
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    kinds = ("--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc")
    # apart from the scripts of Network: a fault of theirs is no reason to go without hosts
    finished = subprocess.run(["unshare", *user, *kinds, "sh", "-c", _PROBE], capture_output=True, text=True)
    if finished.returncode:
        what = finished.stderr.strip().splitlines()[-1:] or [f"code {finished.returncode}"]
        return f"this machine allows no namespaces ({what[0]}): be root, or allow user namespaces"
    return None


class Process(subprocess.Popen[Any]):
    """A process on a host. A signal reaches it, and not the ``nsenter`` in front of it."""

    def send_signal(self, sig: int) -> None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), sig)
                return
        super().send_signal(sig)


class _Namespaces:
    """The namespaces of one first process, which lives until ``end``."""

    def __init__(self, command: Sequence[str], *, setup: str, arguments: Sequence[str] = ()) -> None:
        script = ["sh", "-c", _FIRST.format(setup=setup), "sh", *arguments]
        self._process = subprocess.Popen(
            [*command, *script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            what = errors.strip().splitlines()[-1:] or ["no output"]
            raise ConfigError(f"the namespaces of a host were not made: {what[0]}; see whether this user may make them")
        self.pid = int(line)

    def enter(self, *kinds: str) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self.pid), *user, *(f"--{kind}" for kind in kinds), "--"]

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.communicate()


class Host:
    """One host of a ``Network``: addresses, commands, its cable and its power."""

    def __init__(self, *, name: str, number: int, network: Network, private: Sequence[str]) -> None:
        self.name, self.address, self.address6 = name, f"10.77.0.{number}", f"fd77::{number:x}"
        self._port, self._switch, self._stack = f"port{number}", network.switch, ExitStack()
        self._processes: list[Process] = []
        with network.hosts_file.open("a") as file:
            file.write(f"{self.address} {name}\n{self.address6} {name}\n")
        kinds = ("--net", "--uts", "--mount", "--pid", "--fork")
        self._space = _Namespaces(
            [*self._switch.enter("net", "mount", "pid"), "unshare", *kinds],
            setup=_HOST,
            arguments=[name, str(network.hosts_file), *private],
        )
        self._stack.callback(self._space.end)
        peer = ["peer", "name", INTERFACE, "netns", str(self._space.pid)]
        self._bridge("ip", "link", "add", self._port, "type", "veth", *peer)
        self._bridge("ip", "link", "set", self._port, "master", "bridge", "up")
        self.run(["sh", "-c", _ADDRESSES, "sh", self.address, self.address6])

    def command(self, argv: Sequence[str], *, cwd: str | Path | None = None) -> list[str]:
        """The command line that runs ``argv`` on this host, in ``cwd`` or the current directory."""
        inside = ["env", "-C", str(cwd or Path.cwd()), *argv]
        return [*self._space.enter("net", "uts", "mount", "pid"), *inside]

    def start(self, argv: Sequence[str], *, cwd: str | Path | None = None, **options: Any) -> Process:
        """Start a command, which ends with the host at the latest."""
        self._processes.append(process := Process(self.command(argv, cwd=cwd), **options))
        return process

    def run(
        self, argv: Sequence[str], *, cwd: str | Path | None = None, timeout_s: float = 60.0, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; ``CalledProcessError``, with its output, if it fails."""
        given = {"check": True, "capture_output": True, "text": True, "timeout": timeout_s, **options}
        return subprocess.run(self.command(argv, cwd=cwd), **given)

    def cut(self) -> None:
        """Unplug the cable: what is sent is lost, and neither side gets an error from it."""
        self._bridge("ip", "link", "set", self._port, "down")

    def restore(self) -> None:
        self._bridge("ip", "link", "set", self._port, "up")

    def kill(self) -> None:
        """Cut the power: every process ends at once, and no connection is closed towards the other hosts."""
        if self._port:
            self.cut()
            self._port = ""
            self._stack.close()
            for process in self._processes:
                process.communicate()

    def _bridge(self, *argv: str) -> None:
        subprocess.run([*self._switch.enter("net"), *argv], check=True, capture_output=True, timeout=30)


class Network:
    """A bridge, and the hosts that ``add`` connects to it; a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Network:
        self.hosts_file = Path(self._stack.enter_context(tempfile.TemporaryDirectory())) / "hosts"
        self.hosts_file.write_text("127.0.0.1 localhost\n::1 localhost\n")
        user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
        self.switch = _Namespaces(["unshare", *user, "--net", "--mount", "--pid", "--fork"], setup=_BRIDGE)
        self._stack.callback(self.switch.end)
        return self

    def __exit__(self, *_exception: object) -> None:
        for host in self.hosts.values():
            host.kill()
        self._stack.close()

    def add(self, name: str, *, private: Sequence[str] = ("/dev/shm",)) -> Host:
        """A host of this name, 10.77.0.1 and following ones. Each directory in ``private`` is an empty one of the
        host."""
        host = Host(name=name, number=len(self.hosts) + 1, network=self, private=private)
        self.hosts[name] = host
        return host
