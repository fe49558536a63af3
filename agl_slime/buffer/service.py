"""The Rollout Buffer without HTTP: task types, a writer that commits many requests at once, readers, generators.

Everything that may block (the database, the stages, loading generator files, ending processes) runs in threads; the
event loop only passes things on.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from agl_slime.buffer.discovery import SHIPPED_GENERATORS, Discovery, discover_generators
from agl_slime.buffer.errors import BufferRequestError
from agl_slime.buffer.generator_process import GeneratorProcess
from agl_slime.buffer.items import WrittenItem
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import BufferSettings
from agl_slime.buffer.store import Batch, Claim, ItemStore, WriteRequest, WriteResult
from agl_slime.support.database import Database
from agl_slime.support.threads import run_in_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Requests that one transaction may hold: a commit costs about as much as ten items.
_MOST_REQUESTS_PER_COMMIT = 512


@dataclass(slots=True)
class _Task:
    """A task type in use. ``lock``: one reader at a time, and none while a run is started."""

    name: str
    group_size: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: GeneratorProcess | None = None
    run_no: int | None = None
    run_key: str = ""
    restarts: int = 0
    last_error: str = ""


class RolloutBuffer:
    """Takes items, gives out groups, runs generators. ``start`` and ``close`` belong to one event loop."""

    def __init__(self, *, settings: BufferSettings, clock: Callable[[], float] = time.time) -> None:
        self.settings = settings
        self._clock = clock
        self._tasks: dict[str, _Task] = {}
        self._task_of_key: dict[str, _Task] = {}
        self._discovery = Discovery()
        self._started_at = time.monotonic()
        self._own_logs = tempfile.TemporaryDirectory(prefix="agl-slime-buffer-") if settings.run_dir is None else None
        path = settings.run_dir / "buffer.sqlite" if settings.run_dir is not None else None
        self.store = ItemStore(
            database=Database(path=path, exclusive=path is not None),
            max_items=settings.max_buffer_size,
            keep_delivered=settings.delivered_window,
            clock=clock,
        )
        self._writer = _Writer(self.store)
        self._url = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restarting: set[asyncio.Future[None]] = set()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Look for generators and take up what a former life left on disk; before the first request."""
        self._discovery = await run_in_thread(discover_generators, self._generator_directory)
        runs = self.store.last_runs()
        for name in dict.fromkeys([*self.store.stored_tasks(), *runs]):
            self._use_task(name, _group_size(runs[name]["payload"]) if name in runs else self.settings.group_size)

    async def start(self, url: str) -> None:
        """Start the generators of a former life again. ``url`` is where generators reach this buffer."""
        self._url = url.rstrip("/")
        self._loop = asyncio.get_running_loop()
        for name, run in self.store.last_runs().items():
            if run["state"] == "running":
                await self._take_up(self._tasks[name], run)

    async def close(self) -> None:
        """End the generators and the writer; what was written is kept when there is a run directory."""
        self._loop = None
        for restart in list(self._restarting):
            restart.cancel()
        processes = [task.process for task in self._tasks.values() if task.process is not None]
        await asyncio.gather(*(run_in_thread(process.stop, "interrupted") for process in processes))
        await run_in_thread(self._writer.stop)
        self.store.close()
        if self._own_logs is not None:
            self._own_logs.cleanup()

    # -- items --------------------------------------------------------------------------------------------------------

    def task_for(self, name: str | None) -> str:
        """The task type that a request without a path of its own means. Raises ``BufferRequestError`` when that cannot
        be said."""
        if name is not None:
            if name not in self._tasks:
                if name not in self._discovery.generators and name != self.settings.default_task_type:
                    raise BufferRequestError(
                        f"there is no task type {name!r}; known are {', '.join(self.known_tasks()) or 'none'}",
                        status=404,
                    )
                self._use_task(name, self.settings.group_size)
            return name
        started = [task.name for task in self._tasks.values() if task.run_no is not None] or list(self._tasks)
        if len(started) > 1:
            raise BufferRequestError(
                f"several task types are in use ({', '.join(sorted(started))}); name one as task_type"
            )
        if not started:
            return self.task_for(self.settings.default_task_type)
        return started[0]

    def known_tasks(self) -> list[str]:
        return sorted({*self._tasks, *self._discovery.generators, self.settings.default_task_type})

    def task_of_key(self, key: str) -> str | None:
        """The task type of the generator that was given this secret; it counts as heard of."""
        task = self._task_of_key.get(key)
        if task is None:
            return None
        if task.process is not None and key == task.run_key:
            task.process.heard()
        return task.name

    async def write(self, task: str, items: Sequence[WrittenItem]) -> WriteResult:
        """Store items; returns when they are on disk."""
        result = await self._writer.write(WriteRequest(task, items))
        if isinstance(result, BaseException):
            raise result
        return result

    async def read(
        self, task: str, *, batch_size: int | None = None, request_id: str | None = None, ack: Iterable[str] = ()
    ) -> Batch | None:
        """Whole groups of at most ``batch_size`` items together, but at least one group; all that are ready when it is
        ``None``."""
        entry = self._tasks[task]
        max_groups = None if batch_size is None else max(1, batch_size // entry.group_size)
        claim = Claim()
        reading = asyncio.ensure_future(
            self._exclusively(
                entry, self.store.read, task, max_groups=max_groups, request_id=request_id, ack=ack, claim=claim
            )
        )
        return await self._in_time(reading, f"the groups of {task!r} could not be decided", claim)

    # -- generators ---------------------------------------------------------------------------------------------------

    async def start_rollout(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Start the generator of ``payload["task_type"]``; a run of the same task type is ended first."""
        name = payload.get("task_type")
        if not isinstance(name, str):
            raise BufferRequestError(f"task_type is {name!r}; expected the name of a task type")
        if name not in self._discovery.generators:
            self._discovery = await run_in_thread(discover_generators, self._generator_directory)
        if name not in self._discovery.generators:
            known = ", ".join(sorted(self._discovery.generators)) or "none"
            raise BufferRequestError(f"no generator has the task type {name!r}; known are {known}", status=404)
        group_size = _group_size(payload)
        _check_lists(payload)
        given = (
            {**payload, "input_file": str(self._input_file(payload.get("input_file")))}
            if payload.get("input_file") is not None
            else dict(payload)
        )
        task = self._use_task(name, group_size)
        starting = asyncio.ensure_future(self._exclusively_async(task, self._start_run, task, given, group_size))
        run_no, again = await self._in_time(starting, f"the run of {name!r} could not be started")
        return {"message": "Rollout started", "task_type": name, "run": run_no, "groups_handed_out_again": again}

    async def _start_run(self, task: _Task, payload: dict[str, Any], group_size: int) -> tuple[int, int]:
        if task.process is not None:
            await run_in_thread(task.process.stop, "replaced")
        skip = list(payload.get("skip_instance_ids") or ())
        again = await run_in_thread(self.store.resume, task.name, skip, payload.get("trained_groups"))
        payload.pop("trained_groups", None)
        task.group_size = group_size
        await run_in_thread(self.store.set_task, task.name, self._pipeline(task.name, group_size))
        task.run_no = await run_in_thread(self.store.start_run, task.name, payload)
        task.restarts, task.last_error = 0, ""
        self._launch(task, payload, skip)
        return task.run_no, again

    async def _take_up(self, task: _Task, run: Mapping[str, Any]) -> None:
        """A generator that ran when the buffer died goes on where the items on disk end."""
        task.run_no = run["no"]
        payload = dict(run["payload"])
        if not self.settings.resume or task.name not in self._discovery.generators:
            reason = (
                "--no-resume"
                if not self.settings.resume
                else f"there is no generator of task type {task.name!r} any more"
            )
            await run_in_thread(self.store.end_run, run["no"], "interrupted", reason)
            return
        finished = await run_in_thread(self.store.finished_after, task.name, run["finished_before"])
        self._launch(task, payload, [*(payload.get("skip_instance_ids") or ()), *finished])

    def _launch(self, task: _Task, payload: Mapping[str, Any], skip: Sequence[Any]) -> None:
        """Start the process. What is held already is not to be made again: whole groups are skipped, parts of groups
        are named."""
        skip_instances = list(skip)
        partial: list[dict[str, Any]] = []
        for group in self.store.undecided(task.name):
            if group.count >= task.group_size:
                skip_instances.append(group.instance_id)
            else:
                partial.append({"instance_id": group.instance_id, "group_id": group.group_id, "items": group.count})
        key = secrets.token_urlsafe(16)
        task.run_key = key
        self._task_of_key[key] = task
        run_no = task.run_no
        assert run_no is not None
        data = {
            **payload,
            "remote_buffer_url": f"{self._url}/runs/{key}",  # names the task type, and stands for the token
            "skip_instance_ids": skip_instances,
            "partial_groups": partial,
        }
        try:
            task.process = GeneratorProcess(
                path=self._discovery.generators[task.name].path,
                payload=data,
                log_path=self._log_directory / f"{''.join(c if c.isalnum() else '_' for c in task.name)}-{run_no}.log",
                on_end=lambda state, error: self._run_ended(task.name, run_no, state, error),
                stall_s=self.settings.generator_stall_s,
            )
        except OSError as error:
            self.store.end_run(run_no, "failed", f"the process could not be started: {error}")
            raise BufferRequestError(
                f"the generator of {task.name!r} could not be started: {error}", status=503
            ) from error
        logger.info("The generator of %s runs as process %d.", task.name, task.process.pid)

    def _run_ended(self, name: str, run_no: int, state: str, error: str) -> None:
        if state == "interrupted" and self.settings.run_dir is not None and self.settings.resume:
            return  # the buffer ends: the run is taken up when it starts again
        if state in ("failed", "stalled"):
            logger.error("The generator of %s %s: %s", name, state, error)
            task = self._tasks[name]
            task.last_error = error
            if (
                task.restarts < self.settings.generator_restarts
                and self._loop is not None
                and not self._loop.is_closed()
            ):
                task.restarts += 1
                self._loop.call_soon_threadsafe(self._restart_later, task, run_no, state, error)
                return
        try:
            self.store.end_run(run_no, state, error)
        except sqlite3.Error as failure:
            logger.error("The end of run %d of %s could not be recorded: %s", run_no, name, failure)

    def _restart_later(self, task: _Task, run_no: int, state: str, error: str) -> None:
        restart = asyncio.ensure_future(self._restart(task, run_no, state, error))
        self._restarting.add(restart)
        restart.add_done_callback(self._restarting.discard)
        restart.add_done_callback(_look_at)

    async def _restart(self, task: _Task, run_no: int, state: str, error: str) -> None:
        """Take a failed run up where its items end, after a pause that grows with the number of failures."""
        try:
            await asyncio.sleep(min(60.0, 0.25 * 4**task.restarts))
            async with task.lock:
                if task.run_no == run_no:  # not replaced meanwhile
                    await self._take_up(task, self.store.last_runs()[task.name])
        except BufferRequestError:
            logger.exception("The generator of %s could not be started again.", task.name)
            await run_in_thread(self.store.end_run, run_no, state, error)

    def _input_file(self, given: Any) -> Path:
        if not isinstance(given, str) or "\0" in given:
            raise BufferRequestError(f"input_file is {given!r}; expected a path")
        directories = [directory.resolve() for directory in self.settings.input_directories]
        try:
            path = (directories[0] / given).resolve()
            allowed = any(path.is_relative_to(directory) for directory in directories)
            exists = allowed and path.is_file()
        except (OSError, RuntimeError) as error:
            raise BufferRequestError(f"input_file {given!r} cannot be used: {error}") from error
        if not allowed:
            raise BufferRequestError(
                f"input_file {given!r} lies outside of the allowed directories; start the buffer with --input-dir",
                status=403,
            )
        if not exists:
            raise BufferRequestError(f"input_file {given!r}: there is no such file")
        return path

    # -- figures ------------------------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, Any]:
        """Everything that is counted, for ``/stats``."""
        return await run_in_thread(self._stats)

    def _stats(self) -> dict[str, Any]:
        counts = self.store.ledger.counts()
        runs = self.store.last_runs()
        tasks: dict[str, Any] = {}
        for name, task in list(self._tasks.items()):
            run = runs.get(name)
            told = {key: run[key] for key in ("no", "state", "error", "started", "ended")} if run is not None else None
            if told is not None:
                told["restarts"] = task.restarts
                told["error"] = told["error"] or task.last_error
            if told is not None and task.process is not None and task.process.running:
                told["silent_s"] = round(task.process.silent_s, 3)
            tasks[name] = {**self.store.describe(name), "run": told}
        return {
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "held_items": self.store.held_items,
            "max_buffer_size": self.settings.max_buffer_size,
            "items": {
                "opened": counts.opened,
                "open": counts.open,
                "ready": counts.ready,
                "closed": {outcome.value: n for outcome, n in counts.closed.items()},
                "reasons": {
                    f"{outcome.value}: {reason}" if reason else outcome.value: n
                    for (outcome, reason), n in counts.reasons.items()
                },
            },
            "task_types": tasks,
            "generators": {name: generator.path.name for name, generator in self._discovery.generators.items()},
            "generator_problems": dict(self._discovery.problems),
        }

    # -- internals ----------------------------------------------------------------------------------------------------

    @property
    def _generator_directory(self) -> Path:
        return self.settings.generators or SHIPPED_GENERATORS

    @property
    def _log_directory(self) -> Path:
        return (
            self.settings.run_dir / "generators"
            if self.settings.run_dir is not None
            else Path(self._own_logs.name if self._own_logs else ".")
        )

    def _use_task(self, name: str, group_size: int) -> _Task:
        task = self._tasks.get(name)
        if task is None:
            self.store.set_task(name, self._pipeline(name, group_size))
            task = self._tasks[name] = _Task(name, group_size)
        return task

    def _pipeline(self, name: str, group_size: int) -> GroupPipeline:
        generator = self._discovery.generators.get(name)
        settings = self.settings.pipeline(group_size=group_size, task_type=name)
        return GroupPipeline.from_functions(generator.stages if generator is not None else {}, settings=settings)

    async def _exclusively(self, task: _Task, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        async with task.lock:
            return await run_in_thread(function, *args, **kwargs)

    async def _exclusively_async(self, task: _Task, function: Callable[..., Any], *args: Any) -> Any:
        async with task.lock:
            return await function(*args)

    async def _in_time(self, work: asyncio.Future[T], failure: str, claim: Claim | None = None) -> T:
        """The result, or a 503 when it takes too long: a stage or a file of somebody else's that hangs must not hang
        its callers."""
        done, _ = await asyncio.wait({work}, timeout=self.settings.request_timeout_s)
        if not done:
            if claim is None or claim.take():
                work.add_done_callback(_look_at)
                raise BufferRequestError(f"{failure} within {self.settings.request_timeout_s:g} s", status=503)
            await asyncio.wait({work})  # the stages are done and the hand-out is being stored: it must reach its reader
        try:
            return work.result()
        except sqlite3.Error as error:
            raise BufferRequestError(f"{failure}: {error}", status=503) from error


class _Writer:
    """A thread that stores what has come in since it last looked, all in one transaction."""

    def __init__(self, store: ItemStore) -> None:
        self._store = store
        self._queue: queue.SimpleQueue[tuple[WriteRequest, asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="agl-slime-buffer-writer", daemon=True)
        self._thread.start()

    async def write(self, request: WriteRequest) -> WriteResult | BufferRequestError:
        future: asyncio.Future[WriteResult | BufferRequestError] = asyncio.get_running_loop().create_future()
        self._queue.put((request, future))
        return await future

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _main(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            ending = False
            while len(batch) < _MOST_REQUESTS_PER_COMMIT:
                try:
                    entry = self._queue.get_nowait()
                except queue.Empty:
                    break
                if entry is None:
                    ending = True
                    break
                batch.append(entry)
            try:
                results: Sequence[WriteResult | BufferRequestError] = self._store.write(
                    [request for request, _ in batch]
                )
            except Exception as error:  # answered to every writer; none of their items was stored
                logger.exception("A write could not be stored.")
                results = [BufferRequestError(f"the items could not be stored: {error}", status=503)] * len(batch)
            futures = [future for _, future in batch]
            loop = futures[0].get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, futures, results)
            if ending:
                return


def _resolve(futures: Sequence[asyncio.Future[Any]], results: Sequence[Any]) -> None:
    for future, result in zip(futures, results, strict=True):
        if not future.done():
            future.set_result(result)


def _look_at(work: asyncio.Future[Any]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.warning("Work that nobody waited for any more ended with: %s", error)


def _group_size(payload: Mapping[str, Any]) -> int:
    """``num_repeat_per_sample``; slime's client sends it as text."""
    given = payload.get("num_repeat_per_sample", 1)
    try:
        whole = isinstance(given, float) and given.is_integer()  # 3.0 is an integer in JSON Schema
        size = int(given) if (isinstance(given, (int, str)) or whole) and not isinstance(given, bool) else 0
    except ValueError:
        size = 0
    if not 1 <= size <= 1_000_000:
        raise BufferRequestError(f"num_repeat_per_sample is {given!r}; expected an integer from 1 to 1000000")
    return size


def _check_lists(payload: Mapping[str, Any]) -> None:
    for name in ("skip_instance_ids", "trained_groups"):
        value = payload.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(entry, (str, int)) for entry in value)
        ):
            raise BufferRequestError(f"{name} is of type {type(value).__name__}; expected a list of ids")
    sampling = payload.get("sampling_params")
    if sampling is not None and not isinstance(sampling, dict):
        raise BufferRequestError(f"sampling_params is of type {type(sampling).__name__}; expected an object")
