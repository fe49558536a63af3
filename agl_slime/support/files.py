"""Atomic writes of files and directories, safe against kills and power failures.

Content is written under a temporary name beside the target and renamed. The temporary name has the writer's host and
process; the next writer into the same directory removes the temporaries of killed ones.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import socket
import stat
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from agl_slime.errors import ConfigError, DiskFullError

_TEMPORARY = re.compile(
    r"\.(?P<target>.+)\.(?P<kind>new|old)-(?P<host>[^-]+)-(?P<pid>\d+)-(?P<process>[0-9a-f]{8})-\d+"
)
_HOST = re.sub(r"[^\w.]", "_", socket.gethostname()) or "localhost"
_PROCESS = uuid.uuid4().hex[:8]  # a restarted container has the same host name and pids
_COUNT = itertools.count()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_TOO_LARGE = ("File too large", "disk I/O error")  # of the system, of SQLite
_FULL_TEXTS = ("No space left", "disk is full", *_TOO_LARGE)  # of safetensors, of SQLite
_CHECKSUMS = "agl_slime_checksums.json"
LOCK = ".lock"
PIPE_SILENCE_S = 60.0
_pipes: dict[tuple[str, int, int], bytes] = {}
CACHE_VARIABLE = "AGL_SLIME_CACHE"
_MAX_AGE_S = 24 * 3600.0  # older temporaries are removed even if their writer may live, on another host for example


def cache_directory() -> Path:
    """The directory of what can be made again: ``AGL_SLIME_CACHE``, or ``agl-slime`` in the XDG cache."""
    xdg = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(CACHE_VARIABLE) or Path(xdg) / "agl-slime").absolute()


@contextmanager
def disk_full_as_error(path: Path) -> Iterator[None]:
    """Turn any library's error of a full disk while ``path`` is written into a ``DiskFullError``."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            named = getattr(cause, "errno", None) in _FULL or any(text in str(cause) for text in _FULL_TEXTS)
            if named or isinstance(cause, DiskFullError):
                directory = path if path.is_dir() else path.parent
                if any(text in str(cause) for text in _TOO_LARGE):
                    why = "it is too large for this process (ulimit -f), or the disk fails"
                    raise DiskFullError(f"a file in {directory} cannot be written: {why}") from error
                raise DiskFullError(f"no space left in {directory}; free some and retry or resume") from error
            cause = cause.__cause__ or cause.__context__
        raise


@contextmanager
def unwritable_as_error(flag: str, target: Path) -> Iterator[None]:
    """Turn an error of writing ``target`` into a ``ConfigError`` that asks for another place with ``flag``."""
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): name another place with {flag}") from error


@contextmanager
def whole_directory(target: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """A fresh directory that replaces ``target`` when the block succeeds, and is removed when it fails. A reader sees
    the old content, the new, or (between two renames) neither; never a part. ``durable`` flushes it to the disk
    first."""
    with _replacing(target, durable=durable) as fresh:
        fresh.mkdir()
        yield fresh


@contextmanager
def whole_file(target: str | os.PathLike[str], *, durable: bool = True) -> Iterator[IO[bytes]]:
    """As ``whole_directory``, for a file; readers always see the old content or the new."""
    with _replacing(target, durable=durable) as fresh, fresh.open("wb") as file:
        yield file


@contextmanager
def sole_owner(directory: Path) -> Iterator[None]:
    """Lock ``directory`` for this process while the block runs. Raises ``ConfigError`` with the other process's pid,
    and where the lock file cannot be written."""
    try:
        file = open(directory / LOCK, "a+")  # noqa: SIM115
    except OSError as error:
        fix = "name another place, or make it writable"
        raise ConfigError(f"{directory} cannot be written ({error.strerror}): {fix}") from error
    with file as lock:  # released when the file is closed or its process killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a failed start removes its lock file: a lock on a removed file excludes no process
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):
            lock.seek(0)
            raise ConfigError(f"{directory} is in use by process {lock.read() or '?'}; choose another") from None
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {_HOST}")
        lock.flush()
        yield


@contextmanager
def scratch_directory(parent: Path, name: str) -> Iterator[Path]:
    """A temporary directory in ``parent`` while the block runs; the next removes what killed processes left."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    path = _temporary(parent / name, "new")
    path.mkdir()
    try:
        yield path
    finally:
        remove(path)


def write_file(target: str | os.PathLike[str], content: bytes | str, *, durable: bool = True) -> None:
    """Replace ``target`` by ``content`` (text as UTF-8), see ``whole_file``."""
    with whole_file(target, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_whole(path: Path) -> bytes:
    """The content of a file; a pipe, such as a shell's ``<(command)``, is read once and its content kept for the next
    call. Raises ``OSError``, also for a device, and for a pipe that is silent for a minute."""
    status = path.stat()
    if (stat.S_ISCHR(status.st_mode) and not path.samefile(os.devnull)) or stat.S_ISBLK(status.st_mode):
        raise OSError(errno.EINVAL, "it is a device; give a file or a pipe")
    if not stat.S_ISFIFO(status.st_mode):
        return path.read_bytes()
    key = str(path), status.st_dev, status.st_ino
    if key not in _pipes:
        chunks = list[bytes]()
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            while not chunks or chunks[-1]:
                if not poll.poll(PIPE_SILENCE_S * 1000):
                    raise OSError(errno.ETIMEDOUT, f"nothing was written to this pipe for {PIPE_SILENCE_S:g} s")
                if (chunk := pipe.read(1 << 20)) is not None:
                    chunks.append(chunk)
        _pipes[key] = b"".join(chunks)
    return _pipes[key]


def write_checksums(directory: Path) -> None:
    """Write the checksums of the files of ``directory``, without subdirectories, beside them."""
    sums = {path.name: _checksum(path) for path in directory.iterdir() if path.is_file() and path.name != _CHECKSUMS}
    (directory / _CHECKSUMS).write_text(json.dumps(sums))


def verify_checksums(directory: Path) -> None:
    """Raise ``ValueError`` or ``OSError`` when a file that ``write_checksums`` recorded is missing or has changed."""
    try:
        sums = json.loads(_regular(directory / _CHECKSUMS).read_bytes())
        for name, checksum in sums.items():
            if _checksum(_regular(directory / name)) != checksum:
                raise ValueError(f"{name} is not as it was written")
    except (AttributeError, RecursionError):
        raise ValueError(f"{_CHECKSUMS} is not as it was written") from None


def remove_leftovers(directory: Path) -> None:
    """Remove temporaries of killed writers in ``directory``; restore a target that was moved away and not replaced."""
    for path in list(directory.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or _may_be_in_use(path, match):
            continue
        with suppress(OSError):  # another process may do the same
            if match["kind"] == "old" and not (target := path.with_name(match["target"])).exists():
                path.rename(target)
            else:
                remove(path)


def remove_directory(path: Path) -> None:
    """Remove a directory; after a kill in between, its name has all of it or nothing."""
    aside = _temporary(path, "new")
    with suppress(OSError):
        path.rename(aside)
        remove(aside)


@contextmanager
def _replacing(target: str | os.PathLike[str], *, durable: bool) -> Iterator[Path]:
    target = Path(target).absolute()
    fresh = _temporary(target, "new")
    try:
        with disk_full_as_error(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target.parent)
            yield fresh
            if durable:
                for path in [*fresh.rglob("*"), fresh]:
                    _flush(path)
            if fresh.is_dir() and target.exists():
                previous = _temporary(target, "old")
                target.rename(previous)
                fresh.rename(target)
                remove(previous)
            else:
                fresh.replace(target)
            if durable:
                _flush(target.parent)
    finally:
        remove(fresh)  # exists only after a failure


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32 (four times as fast as SHA-256), against damage, not forgery."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
        return [file.tell(), value]


def _regular(path: Path) -> Path:
    if not path.is_file():  # reading a FIFO would hang
        raise FileNotFoundError(f"{path.name} is missing")
    return path


def remove(path: Path) -> None:
    """Remove a file or a directory tree, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _temporary(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{_HOST}-{os.getpid()}-{_PROCESS}-{next(_COUNT)}")


def _may_be_in_use(path: Path, writer: re.Match[str]) -> bool:
    try:
        if time.time() - path.lstat().st_mtime > _MAX_AGE_S:
            return False
        if writer["host"] != _HOST:
            return True
        if int(writer["pid"]) == os.getpid():
            return writer["process"] == _PROCESS
        os.kill(int(writer["pid"]), 0)
    except (ProcessLookupError, FileNotFoundError):
        return False
    except PermissionError:  # another user's process
        pass
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
