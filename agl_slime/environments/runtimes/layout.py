"""The limits of a sandbox, and bubblewrap's arguments for it."""

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
    """`[]`: the rollout's endpoints only. `["*"]`: the host's network."""
    workdir: str = "/workspace"
    installs: Path | None = None
    """The host's directory of installed programs, mounted at `/var/tmp`; only `install` can write to it."""
    read_only: list[Path] = Field(default_factory=list)
    """More paths of the host, mounted read-only at the same place."""
    memory: float = Field(2.0, gt=0)
    """GiB for all processes together."""
    disk: float = Field(1.0, gt=0)
    """GiB for each of workspace, home and `/tmp`, which are in memory."""
    files: int = Field(100_000, gt=0)
    """Files in each of these three."""
    processes: int = Field(256, gt=0)
    seconds: float = Field(3600, gt=0)
    """Lifetime of the box."""
    output: int = Field(2**20, gt=0)
    """Bytes kept of a command's output; the middle of longer output is left out."""
    keep_processes: bool = False
    """Let processes that an agent's program started survive it, for tasks whose result is a running service. By default
    they are killed, so that they cannot change the result before it is judged."""

    @model_validator(mode="after")
    def _check_network(self) -> BubblewrapConfig:
        if self.allow not in ([], ["*"]) or (self.block and self.block != ["*"]):
            raise ValueError(
                f"bubblewrap: allow={self.allow}, block={self.block}: it offers no network (allow=[]) or the host's "
                '(allow=["*"]); for lists of hosts take a container runtime'
            )
        return self


class BubblewrapInfo(BubblewrapConfig, BaseRuntimeInfo):
    pass


def layout(config: BubblewrapConfig, installing: bool, control: int, files: list[int]) -> list[str]:
    """bwrap's arguments with the command of the first process. `control` is the socket that it inherits; file
    descriptors for bwrap are added to `files`."""
    root = os.geteuid() == 0
    # Under root the first process becomes an unused user id: it has no privileges, and the kernel's limit of processes
    # counts per user.
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
    mounts = [path for path in [*config.read_only, Path(sys.base_prefix)] if not path.is_relative_to("/usr")]
    above = [str(parent) for path in mounts for parent in reversed(path.parents) if parent != Path("/")]
    for path in dict.fromkeys(["/etc", "/home", "/var", *above]):
        words += ["--perms", "0755", "--dir", path]  # bubblewrap's default mode is 0700
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
    for path in dict.fromkeys(mounts):
        words += ["--ro-bind", str(path), str(path)]
    memory = int(config.memory * GIB)
    settings = {
        "control": control,
        "user": None if installing else user,  # installed files belong to the host's user
        "memory": memory,
        "files": config.files,
        "writable": writable,
        "watch": 0.2,
        "limits": {"DATA": memory, "NPROC": config.processes, "FSIZE": int(config.disk * GIB), "CORE": 0},
    }
    source = Path(__file__).with_name("inside.py").read_text()
    python = os.path.realpath(sys.executable)
    return [*words, "--remount-ro", "/", "--chdir", "/", python, "-I", "-S", "-c", source, json.dumps(settings)]
