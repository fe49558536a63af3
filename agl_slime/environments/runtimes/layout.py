"""What a sandbox may use, and bubblewrap's arguments for it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from verifiers.v1.configs.runtime import NetworkPolicyConfig
from verifiers.v1.runtimes.base import BaseRuntimeInfo

GIB = 2**30
USER = 1000
HOME = "/home/agent"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ETC = (
    "alternatives ca-certificates fonts ld.so.cache ld.so.conf ld.so.conf.d localtime mime.types nsswitch.conf "
    "os-release protocols services ssl terminfo timezone"
)


class BubblewrapConfig(NetworkPolicyConfig):
    type: Literal["bubblewrap"] = "bubblewrap"
    allow: list[str] = Field(default_factory=list)
    """`[]`: the rollout's own endpoints and nothing else. `["*"]`: the host's network."""
    workdir: str = "/workspace"
    installs: Path | None = None
    """Where programs are installed on the host, seen as `/var/tmp`: read-only, but for `install`."""
    read_only: list[Path] = Field(default_factory=list)
    """More of the host's paths, seen in the same place."""
    memory: float = Field(2.0, gt=0)
    """GiB for all of its processes, and for each."""
    disk: float = Field(1.0, gt=0)
    """GiB for each of workspace, home and `/tmp`, which are in memory."""
    files: int = Field(100_000, gt=0)
    """In each of these three."""
    processes: int = Field(256, gt=0)
    seconds: float = Field(3600, gt=0)
    """How long the box lives."""
    output: int = Field(2**20, gt=0)
    """Bytes kept of what a command prints; the middle of more is left out."""
    keep_processes: bool = False
    """Let what an agent's program started live on when it ends, for tasks whose result is a running service. Otherwise
    it is killed, so that it cannot change what is judged."""

    @model_validator(mode="after")
    def _only_all_or_nothing(self) -> BubblewrapConfig:
        if self.allow not in ([], ["*"]) or (self.block and self.block != ["*"]):
            raise ValueError(
                f"bubblewrap: allow={self.allow}, block={self.block}: it can cut the network off (allow=[]) or leave "
                'it as it is (allow=["*"]); for lists of hosts take a container runtime'
            )
        return self


class BubblewrapInfo(BubblewrapConfig, BaseRuntimeInfo):
    pass


def layout(config: BubblewrapConfig, installing: bool, control: int, files: list[int]) -> list[str]:
    """bwrap's arguments, up to and with the first process. `control` is the socket that it inherits; the descriptors
    of files that bwrap reads are added to `files`."""
    root = os.geteuid() == 0
    # A host's root keeps no power inside: the first process becomes a user that nobody else is, which is also
    # what the kernel counts processes by.
    user = 600_000 + int.from_bytes(os.urandom(3), "big") if root else None
    disk = str(int(config.disk * GIB))
    words = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent"]
    words += ["--as-pid-1", "--new-session", "--clearenv", "--hostname", "box"]
    words += (
        ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if root
        else ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    )
    if not (installing or config.allow == ["*"]):
        words += ["--unshare-net"]
    for name in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    more = [path for path in [*config.read_only, Path(sys.base_prefix)] if not path.is_relative_to("/usr")]
    above = [str(parent) for path in more for parent in reversed(path.parents) if parent != Path("/")]
    for path in dict.fromkeys(["/etc", "/home", "/var", *above]):
        words += ["--perms", "0755", "--dir", path]  # bubblewrap's own would be its user's alone
    for name in [*ETC.split(), *(["resolv.conf", "hosts"] if "--unshare-net" not in words else [])]:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    number = user if root else USER
    for name, text in (
        ("passwd", f"root:x:0:0::/:/usr/sbin/nologin\nagent:x:{number}:{number}::{HOME}:/bin/sh\n"),
        ("group", f"root:x:0:\nagent:x:{number}:\n"),
        *([("hosts", "127.0.0.1 localhost box\n")] if "--unshare-net" in words else []),
    ):
        fd = os.memfd_create(name)
        os.write(fd, text.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        files.append(fd)
        words += ["--perms", "0444", "--ro-bind-data", str(fd), f"/etc/{name}"]
    words += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", disk, "--tmpfs", "/dev/shm"]
    words += ["--remount-ro", "/dev"]
    writable = ["/tmp", HOME, config.workdir]
    for path in writable:
        words += ["--perms", "1777" if path == "/tmp" else "0777", "--size", disk, "--tmpfs", path]
    if config.installs is not None:
        words += ["--bind" if installing else "--ro-bind", str(config.installs), "/var/tmp"]
    for path in dict.fromkeys(more):
        words += ["--ro-bind", str(path), str(path)]
    memory = int(config.memory * GIB)
    settings = {
        "control": control,
        "user": None if installing else user,  # who installs owns what it installs
        "memory": memory,
        "files": config.files,
        "writable": writable,
        "watch": 0.2,
        "limits": {"DATA": memory, "NPROC": config.processes, "FSIZE": int(config.disk * GIB), "CORE": 0},
    }
    source = Path(__file__).with_name("inside.py").read_text()
    python = os.path.realpath(sys.executable)
    return [*words, "--remount-ro", "/", "--chdir", "/", python, "-I", "-S", "-c", source, json.dumps(settings)]
