"""``Box``: bubblewrap around a launch script and all that its flags have imported, with limits of time, output, memory
and processes. Nothing of the machine can be written, signalled or connected to from inside."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from agl_slime.errors import ConfigError
from agl_slime.support.child import Child

_MOUNTED = 64  # entries of a directory that are mounted one by one, so that others can be made beside them
_DISK = str(2**28)  # bytes of each directory in memory
_LIMITS = {"FSIZE": 2**26, "DATA": 2**32, "CORE": 0}
_PROCESSES, _MEMORY, _POLL_S = 512, 2**30, 0.25
_NAMESPACES = "--unshare-user-try --unshare-pid --unshare-net --unshare-ipc --unshare-uts --unshare-cgroup-try"
_ISOLATION = (*_NAMESPACES.split(), "--cap-drop", "ALL", "--new-session", "--die-with-parent")
_MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}  # the kernel's number, and that of socket()


class Ended(NamedTuple):
    """The end of a command: its ``code``, ``None`` if it was stopped for a ``reason``, and the end of its output."""

    code: int | None
    reason: str
    output: str


def check_box() -> None:
    """Raise ``ConfigError`` where bubblewrap makes no box."""
    problem, fix, machine = "bubblewrap is not installed", "install it (apt-get install bubblewrap)", platform.machine()
    if shutil.which("bwrap"):
        probe = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", *_ISOLATION, "true"]
        finished = subprocess.run(probe, capture_output=True, text=True)
        if finished.returncode == 0 and machine in _MACHINES:
            return
        last = finished.stderr.strip().rpartition("\n")[2] or f"no filter of system calls for {machine}"
        problem, fix = f"bubblewrap makes no sandbox here ({last})", "allow user namespaces, or be root"
    raise ConfigError(
        f"{problem}, and without a sandbox a launch script can write and delete files of this machine: {fix}, or give "
        "--without-sandbox for a script that you trust"
    )


class Box:
    """A directory ``home`` of the host, which the command reads, with a file ``log`` that it may append to. ``mapped``:
    directories of the host by their other place in the box. Without a ``sandbox`` only the limits hold."""

    def __init__(self, scratch: Path, *, sandbox: bool = True, mapped: Mapping[str, Path] | None = None) -> None:
        if sandbox:
            check_box()
        self.home, self.sandbox, self._mapped = Path(tempfile.mkdtemp(dir=scratch)), sandbox, mapped or {}
        # opened here once: no path leads to files that the command may have replaced
        self._log = open(self.home / "log", "xb+", buffering=0)  # noqa: SIM115

    def write(self, name: str, text: str) -> Path:
        """Write a program or a request, before the command runs."""
        (path := self.home / name).parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def lines(self) -> list[str]:
        """Lines that were appended to ``log`` since the last call."""
        *whole, rest = self._log.read().split(b"\n")
        self._log.seek(-len(rest), os.SEEK_CUR)
        return [line.decode(errors="replace") for line in whole]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        places: Sequence[Path],
        needs: Iterable[str] = (),
        seconds: float,
        check: Callable[[], str] = str,
    ) -> Ended:
        """Run a command in the first of ``places`` to its end, or until ``check`` gives a reason to stop it. It can
        make files in ``places``; ``needs`` are texts that name the paths which it reads in directories of many
        entries."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as rules:
            options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "preexec_fn": _limit}
            if self.sandbox:
                rules.write(_filter())
                rules.seek(0)
                words = self._mounts(places, "\n".join((*needs, *command, *map(str, places), *env.values())))
                words += [*_ISOLATION, "--seccomp", str(rules.fileno()), "--chdir", str(places[0])]
                command, options["pass_fds"] = [str(shutil.which("bwrap")), *words, *command], [rules.fileno()]
            else:
                options["cwd"] = str(places[0])
            deadline, reason = time.monotonic() + seconds, ""
            with Child(command, name=command[0], env=env, **options) as child:
                while (code := child.wait(_POLL_S)) is None and not reason:
                    reason = check() or _over(child)
                    if not reason and time.monotonic() > deadline:
                        reason = f"it did not end within {seconds:g} s"
            size = os.fstat(output.fileno()).st_size
            if size >= _LIMITS["FSIZE"]:
                reason = f"it printed {_LIMITS['FSIZE'] >> 20} MiB"
            tail = os.pread(output.fileno(), 2**16, max(0, size - 2**16)).decode(errors="replace")
            return Ended(code, reason, tail.replace("\0", ""))  # the command may have cut the file

    def _mounts(self, writable: Sequence[Path], needs: str) -> list[str]:
        """A disk whose files are read-only, with space for new ones beside them in the usual places."""
        temporary, words = {*map(Path, ("/tmp", "/var/tmp", tempfile.gettempdir()))}, list[str]()
        places = {Path("/"), *temporary, Path.home(), *writable, *(Path(place).parent for place in self._mapped)}
        for place in sorted(places):
            entries = [entry for entry in _entries(place) if entry.path not in ("/dev", "/proc", "/run")]
            if len(entries) > _MOUNTED and place in temporary:
                entries = [entry for entry in entries if entry.path in needs]
            if len(entries) > _MOUNTED:
                continue
            words += ["--size", _DISK, "--tmpfs", str(place)]
            for entry in entries:
                if entry.is_symlink():
                    words += ["--symlink", os.readlink(entry.path), entry.path]
                elif entry.is_file() or entry.is_dir():  # no socket, pipe or device
                    words += ["--ro-bind-try", entry.path, entry.path]
        # else root would set the kernel's parameters there, without a capability
        words += ["--proc", "/proc", "--remount-ro", "/proc"]
        words += ["--dev", "/dev", "--size", _DISK, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
        for place, source in self._mapped.items():
            words += ["--ro-bind", str(source), place]
        words += ["--ro-bind", str(self.home), str(self.home)]
        return [*words, "--bind", str(self.home / "log"), str(self.home / "log")]


def _entries(place: Path) -> list[os.DirEntry[str]]:
    try:
        return [*os.scandir(place)]
    except OSError:  # it is not there, or another user's
        return []


def _limit() -> None:
    for name, value in _LIMITS.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard_limit = resource.getrlimit(kind)[1]
        value = value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)
        resource.setrlimit(kind, (value, value))


def _over(child: Child) -> str:
    try:
        children = psutil.Process(child.pid).children(recursive=True)
        if len(children) > _PROCESSES:
            return f"it started {len(children)} processes"
        if psutil.virtual_memory().available > _MEMORY:
            return ""
        return "it took nearly all memory" if sum(process.memory_info().rss for process in children) > _MEMORY else ""
    except psutil.Error:  # one has just ended
        return ""


def _filter() -> bytes:
    """Rules of seccomp in the kernel's BPF (code, jumps if true and false, value): no io_uring, and no socket but of
    IPv4, IPv6 and netlink, which the box has its own of. A Unix socket or a virtual machine's would reach the host."""
    arch, call = _MACHINES[platform.machine()]
    rules = f"""20 0 0 4, 15 0 8 {arch:x}, 20 0 0 0, 35 6 0 40000000, 15 5 0 1a9, 15 0 5 {call:x},
        20 0 0 10, 15 3 0 2, 15 2 0 a, 15 1 0 10, 6 0 0 50061, 6 0 0 7fff0000"""
    return b"".join(struct.pack("HBBI", *(int(word, 16) for word in rule.split())) for rule in rules.split(","))
