"""The Rollout Buffer without HTTP: task types, a writer that commits many requests at once, readers, generators.

Everything that may block (database, stages, parsing of large bodies, loading of generator files, processes) runs in
threads, and nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agl_slime.buffer.models import StartRequest, WrittenItem, check
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.runs import INTERRUPTED, SHIPPED_GENERATORS, Discovery, GeneratorRun, discover_generators, file_of
from agl_slime.buffer.settings import BufferSettings
from agl_slime.buffer.store import Batch, ItemStore
from agl_slime.errors import BufferRequestError, DiskFullError
from agl_slime.support.batching import Batcher
from agl_slime.support.database import Database
from agl_slime.support.threads import run_in_thread, run_user_code

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Requests per transaction: a commit costs about as much as ten items.
_MOST_REQUESTS_PER_COMMIT = 512
_FIRST_TASK_TYPE = "math"  # of items before any /start_rollout


@dataclass(slots=True)
class _Task:
    """A task type in use. ``lock``: one reader at a time, and none during the start of a run."""

    name: str
    group_size: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    run: GeneratorRun | None = None
    started: bool = False


class RolloutBuffer:
    """Stores items, delivers groups, runs generators. Create it in a thread: it loads generators, and the database of
    an earlier process. ``start`` and ``close`` belong to one event loop."""

    def __init__(self, *, settings: BufferSettings, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._tasks: dict[str, _Task] = {}
        self._discovery = Discovery()
        self._started_at = time.monotonic()
        self._temporary = tempfile.TemporaryDirectory(prefix="agl-slime-buffer-") if settings.run_dir is None else None
        self._logs = Path(self._temporary.name) if self._temporary else Path(settings.run_dir or ".", "generators")
        path = settings.run_dir / "buffer.sqlite" if settings.run_dir is not None else None
        self.store = ItemStore(
            database=Database(path=path, exclusive=path is not None),
            max_items=settings.max_buffer_size,
            keep_delivered=settings.delivered_window,
            clock=clock,
        )
        self._writes = Batcher(self._store, most=_MOST_REQUESTS_PER_COMMIT)
        self._url = ""
        self._discover()
        runs = self.store.latest_runs()
        for name in self.store.stored_tasks() - runs.keys():
            self._use_task(name)
        for name, run in runs.items():
            self._use_task(name, StartRequest.model_validate(run["payload"]), run["no"])

    async def start(self, url: str) -> None:
        """Restart the generators that ran before a restart. Generators reach this buffer at ``url``."""
        self._url = url.rstrip("/")
        for name, run in (await run_in_thread(self.store.latest_runs)).items():
            if run["state"] != "running":
                continue
            if self.settings.resume and name in self._discovery.generators:
                await run_in_thread(self._launch, self._tasks[name], run["no"], run["payload"])
            else:
                why = "--no-resume" if not self.settings.resume else f"the generator of task type {name!r} is gone"
                await run_in_thread(self.store.end_run, run["no"], INTERRUPTED, why)

    async def close(self) -> None:
        """End the generators and the writer; a run directory keeps all items."""
        runs = [task.run for task in self._tasks.values() if task.run is not None]
        await asyncio.gather(*(run_in_thread(run.stop, INTERRUPTED) for run in runs))
        await self._writes.close()
        await run_in_thread(self.store.close)
        if self._temporary is not None:
            self._temporary.cleanup()

    async def task_for(self, name: str | None) -> str:
        """The task type of a request: ``name``, or the only one in use. Raises ``BufferRequestError`` if it is unknown
        or ambiguous."""
        if name is None:
            in_use = [task.name for task in self._tasks.values() if task.started] or list(self._tasks)
            if len(in_use) > 1:
                choices = ", ".join(sorted(in_use))
                raise BufferRequestError(f"several task types are in use ({choices}); name one as task_type")
            name = in_use[0] if in_use else _FIRST_TASK_TYPE
        if name not in self._tasks:
            names = {*self._tasks, *self._discovery.generators, _FIRST_TASK_TYPE}
            if name not in names:
                raise _unknown_task_type(name, names)
            await run_in_thread(self._use_task, name)
        return name

    def task_of_key(self, key: str) -> str | None:
        """The task type of the generator with this secret key, whose stall timer is reset."""
        for task in self._tasks.values():
            if task.run is not None and task.run.key == key:
                task.run.note_request()
                return task.name
        return None

    async def write(self, task: str, items: Sequence[WrittenItem]) -> int:
        """Store items; returns the number of new ones when all are on disk."""
        return await self._writes.add((task, items))

    async def _store(self, requests: list[tuple[str, Sequence[WrittenItem]]]) -> Sequence[int | Exception]:
        try:
            return await run_in_thread(self.store.write, requests)
        except (sqlite3.Error, DiskFullError) as error:  # answers every writer: no item was stored
            logger.exception("A write could not be stored.")
            raise BufferRequestError(f"the items could not be stored: {error}", status=503) from error

    async def read(
        self, task: str, *, batch_size: int | None = None, request_id: str | None = None, ack: Sequence[str] = ()
    ) -> Batch | None:
        """Whole groups of at most ``batch_size`` items (``None``: of all ready groups), but at least one group."""
        entry = self._tasks[task]
        most = None if batch_size is None else max(1, batch_size // entry.group_size)
        claim = threading.Lock()
        read = partial(self.store.read, task, max_groups=most, request_id=request_id, ack=ack, claim=claim)
        return await self._in_time(entry, read, f"the groups of {task!r} could not be decided", claim)

    async def start_rollout(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Start the generator of ``payload["task_type"]``, ending a running one of that task type first."""
        request = check(StartRequest, payload)
        name = request.task_type
        if name not in self._discovery.generators:
            await run_user_code(self._discover)
        if name not in self._discovery.generators:
            raise _unknown_task_type(name, self._discovery.generators)
        payload = dict(payload)
        if request.input_file is not None:
            payload["input_file"] = str(await run_in_thread(self._input_file, request.input_file))
        if name not in self._tasks:
            await run_in_thread(self._use_task, name, request)
        start = partial(self._start_run, self._tasks[name], request, payload)
        run_no, reopened = await self._in_time(self._tasks[name], start, f"the run of {name!r} could not be started")
        return {"message": "Rollout started", "task_type": name, "run": run_no, "groups_handed_out_again": reopened}

    def _start_run(self, task: _Task, request: StartRequest, payload: dict[str, Any]) -> tuple[int, int]:
        if task.run is not None:
            task.run.stop("replaced")
            task.run = None
        reopened = 0
        if request.fresh:
            self.store.discard(task.name)
        else:
            reopened = self.store.resume(task.name, request.skip_instance_ids or (), request.trained_groups)
        payload.pop("trained_groups", None)
        run_no = self.store.start_run(task.name, payload)
        self._use_task(task.name, request, run_no)
        self._launch(task, run_no, payload)
        return run_no, reopened

    def _launch(self, task: _Task, run_no: int, payload: Mapping[str, Any]) -> None:
        def finished(state: str, error: str) -> None:
            # when the buffer stops, the run stays open in the database, to be resumed at the next start
            if state != INTERRUPTED or self.settings.run_dir is None or not self.settings.resume:
                self.store.end_run(run_no, state, error)

        try:
            task.run = GeneratorRun(
                path=file_of(self._discovery.generators[task.name]),
                payload=partial(self._payload_now, task, run_no, payload),
                log_path=self._logs / f"{''.join(c if c.isalnum() else '_' for c in task.name)}-{run_no}.log",
                on_end=finished,
                stall_s=self.settings.generator_stall_s,
                restarts=self.settings.generator_restarts,
            )
        except OSError as error:
            self.store.end_run(run_no, "failed", f"the process could not be started: {error}")
            message = f"the generator of {task.name!r} could not be started: {error}"
            raise BufferRequestError(message, status=503) from error

    def _payload_now(self, task: _Task, run_no: int, payload: Mapping[str, Any], key: str) -> dict[str, Any]:
        """The payload for a start at this moment, which skips whole groups in the buffer and names incomplete ones."""
        groups = self.store.undecided(task.name)
        whole = [group.instance_id for group in groups if group.count >= task.group_size]
        incomplete = [group.as_partial_group for group in groups if group.count < task.group_size]
        skip = [*(payload.get("skip_instance_ids") or ()), *self.store.finished_since(run_no), *whole]
        url = f"{self._url}/runs/{key}"  # implies the task type, and replaces the token
        return {**payload, "remote_buffer_url": url, "skip_instance_ids": skip, "partial_groups": incomplete}

    def _input_file(self, name: str) -> Path:
        directories = [directory.resolve() for directory in self.settings.input_dir or (Path.cwd(),)]
        try:
            path = (directories[0] / name).resolve()
            allowed = any(path.is_relative_to(directory) for directory in directories)
            if allowed and path.is_file():
                return path
        except (OSError, RuntimeError, ValueError) as error:
            raise BufferRequestError(f"input_file {name!r} cannot be used: {error}") from error
        if allowed:
            raise BufferRequestError(f"input_file {name!r}: there is no such file")
        message = f"input_file {name!r} lies outside of the allowed directories; start the buffer with --input-dir"
        raise BufferRequestError(message, status=403)

    def stats(self) -> dict[str, Any]:
        """All counts, for ``/stats``; blocks on the database."""
        counts = self.store.ledger.counts()
        runs = self.store.latest_runs()
        tasks: dict[str, Any] = {}
        for name, task in list(self._tasks.items()):
            run = runs.get(name)
            if run is not None:
                del run["payload"]
                run |= {"restarts": 0} if task.run is None else task.run.status(run["error"])
            tasks[name] = {**self.store.describe(name), "run": run}
        return {
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "held_items": self.store.held_items,
            "max_buffer_size": self.settings.max_buffer_size,
            "items": {
                "opened": counts.opened,
                "open": counts.open,
                "ready": counts.ready,
                "closed": {outcome.value: n for outcome, n in counts.closed.items()},
                "reasons": {": ".join(filter(None, (end.value, why))): n for (end, why), n in counts.reasons.items()},
            },
            "task_types": tasks,
            "generators": {name: file_of(generator).name for name, generator in self._discovery.generators.items()},
            "generator_problems": dict(self._discovery.problems),
        }

    def _discover(self) -> None:
        self._discovery = discover_generators(self.settings.generators or SHIPPED_GENERATORS)

    def _use_task(self, name: str, request: StartRequest | None = None, run_no: int | None = None) -> None:
        """Decide the groups of a task type by its generator's stages. A fresh run has a separate namespace of uids."""
        group_size = self.settings.group_size if request is None else request.group_size
        generator = self._discovery.generators.get(name)
        settings = replace(self.settings, group_size=group_size)
        pipeline = GroupPipeline(generator and vars(generator), settings=settings, task_type=name)
        fresh = request is not None and request.fresh
        scope = None if run_no is None else f"{name}#{run_no}" if fresh else name
        self.store.set_task(name, pipeline, scope=scope)
        task = self._tasks.setdefault(name, _Task(name, group_size))
        task.group_size = group_size
        task.started = task.started or run_no is not None

    async def _in_time(
        self, task: _Task, function: Callable[[], T], failure: str, claim: threading.Lock | None = None
    ) -> T:
        """The result of ``function``, or a 503 after the timeout: a stage or file of a user may hang."""

        async def call_exclusively() -> T:
            async with task.lock:
                return await run_user_code(function)  # may call custom stages

        call = asyncio.ensure_future(call_exclusively())
        done, _ = await asyncio.wait({call}, timeout=self.settings.request_timeout_s)
        if not done:
            if claim is None or claim.acquire(blocking=False):
                call.add_done_callback(_log_error)
                raise BufferRequestError(f"{failure} within {self.settings.request_timeout_s:g} s", status=503)
            await asyncio.wait({call})  # the delivery is being stored: it must reach its reader
        try:
            return call.result()
        except (sqlite3.Error, DiskFullError) as error:
            raise BufferRequestError(f"{failure}: {error}", status=503) from error


def _log_error(call: asyncio.Future[Any]) -> None:
    if not call.cancelled() and (error := call.exception()) is not None:
        logger.warning("A call that had timed out failed: %s", error)


def _unknown_task_type(name: str, names: Iterable[str]) -> BufferRequestError:
    choices = ", ".join(sorted(names)) or "none"
    return BufferRequestError(f"no generator has the task_type {name!r}; known are {choices}", status=404)
