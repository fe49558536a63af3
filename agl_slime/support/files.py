"""Files and directories that are there as a whole or not at all, also after a kill or a power failure.

Whatever is written goes to a temporary name beside the target first. The temporaries carry host and process of their
writer; those that a killed writer left are removed by the next one that writes into the same directory.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
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
_PROCESS = uuid.uuid4().hex[:8]  # a container that starts again has the host name and the pids of before
_COUNT = itertools.count()
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXTS = ("No space left", "disk is full")  # of safetensors, of SQLite
_CHECKSUMS = "agl_slime_checksums.json"
LOCK = ".lock"
# After this nobody writes to it any more, whether its writer can be asked (another host cannot) or not.
_MAX_AGE_S = 24 * 3600.0


@contextmanager
def disk_full_as_error(path: Path) -> Iterator[None]:
    """Around whatever writes to ``path``: however a library says that there is no space left, it is a
    ``DiskFullError``."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            named = getattr(cause, "errno", None) in _FULL or any(text in str(cause) for text in _FULL_TEXTS)
            if named or isinstance(cause, DiskFullError):
                where = path if path.is_dir() else path.parent
                raise DiskFullError(f"no space left in {where}; make room there, and go on or try again") from error
            cause = cause.__cause__ or cause.__context__
        raise


@contextmanager
def whole_directory(target: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """A fresh directory to write into; it takes the place of ``target`` when the block ends well, and is removed when
    it does not. A reader sees the old content, or the new, or (between two renames) neither; never a part. ``durable``
    writes it through to the disk first."""
    with _replacing(target, durable=durable) as fresh:
        fresh.mkdir()
        yield fresh


@contextmanager
def whole_file(target: str | os.PathLike[str], *, durable: bool = True) -> Iterator[IO[bytes]]:
    """As ``whole_directory``, a file to write into, whose readers always see the old content or the new."""
    with _replacing(target, durable=durable) as fresh, fresh.open("wb") as file:
        yield file


@contextmanager
def sole_owner(directory: Path) -> Iterator[None]:
    """This process and no other writes into ``directory``, as far as they ask here, while the block runs. Raises
    ``ConfigError`` with the other's pid."""
    with open(directory / LOCK, "a+") as lock:  # it is let go when the file is closed, or its process killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # a start that failed removes the file that it made: a lock on that one keeps nobody out
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
    """A directory in ``parent`` for as long as the block lasts. One whose process was killed is removed by the next
    that is made there."""
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    path = _temporary(parent / name, "new")
    path.mkdir()
    try:
        yield path
    finally:
        remove(path)


def write_file(target: str | os.PathLike[str], content: bytes | str, *, durable: bool = True) -> None:
    """Write ``content`` (text as UTF-8) in place of ``target``, see ``whole_file``."""
    with whole_file(target, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def write_checksums(directory: Path) -> None:
    """Write the checksums of the files of ``directory`` beside them; those of its subdirectories are not among them."""
    sums = {path.name: _checksum(path) for path in directory.iterdir() if path.is_file() and path.name != _CHECKSUMS}
    (directory / _CHECKSUMS).write_text(json.dumps(sums))


def verify_checksums(directory: Path) -> None:
    """Raise ``ValueError`` or ``OSError`` unless each file that ``write_checksums`` recorded is there as it was."""
    try:
        sums = json.loads(_regular(directory / _CHECKSUMS).read_bytes())
        for name, checksum in sums.items():
            if _checksum(_regular(directory / name)) != checksum:
                raise ValueError(f"{name} is not as it was written")
    except (AttributeError, RecursionError):
        raise ValueError(f"{_CHECKSUMS} is not as it was written") from None


def remove_leftovers(directory: Path) -> None:
    """Remove what killed writers left in ``directory``. A target that was moved aside and not replaced is put back."""
    for path in list(directory.iterdir()):
        found = _TEMPORARY.fullmatch(path.name)
        if found is None or _may_live(path, found):
            continue
        with suppress(OSError):  # another process clears up as well
            if found["kind"] == "old" and not (target := path.with_name(found["target"])).exists():
                path.rename(target)
            else:
                remove(path)


def remove_directory(path: Path) -> None:
    """Remove a directory so that a kill in between leaves all of it or nothing under its name."""
    aside = _temporary(path, "new")  # what is left of it is removed like other leftovers
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
        remove(fresh)  # only there when something went wrong


def _checksum(path: Path) -> list[int]:
    """Size and CRC-32, which is four times as fast as SHA-256: against damage, not against forgery."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
        return [file.tell(), value]


def _regular(path: Path) -> Path:
    if not path.is_file():  # also a FIFO, on which reading would hang
        raise FileNotFoundError(f"{path.name} is missing")
    return path


def remove(path: Path) -> None:
    """Remove a file, or a directory with all in it, where there is one."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _temporary(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{_HOST}-{os.getpid()}-{_PROCESS}-{next(_COUNT)}")


def _may_live(path: Path, writer: re.Match[str]) -> bool:
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
    except PermissionError:  # the process is somebody else's
        pass
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
