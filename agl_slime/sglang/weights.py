"""New weights into every SGLang worker, from a checkpoint directory that the workers can read.

Per worker: pause → flush → update → verify → continue. The order is what both SGLang versions that we know of (0.5.15,
0.5.23) survive:

- ``pause`` with mode "abort" makes every running request answer with what it has (the client resumes it under the new
  weights) and holds back new ones, so the flush finds an idle engine.
- ``flush`` comes before the update and by itself. An update with ``flush_cache=true`` while requests are pending ends a
  0.5.15 server, and 0.5.23 answers it with 400 "Weights were updated, but the cache was not flushed". We always send
  ``flush_cache=false``: after a successful flush of a paused engine no entry of the old weights is left to be reused.
- ``verify`` reads ``/model_info`` while the worker is still paused; what it says there counts, not the update's status.
- ``continue`` is sent whatever happened before, or the worker would hold all requests for ever.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from agl_slime.errors import ConfigError, EngineError, EngineRequestError, WeightSyncError
from agl_slime.sglang.client import ClientSettings, PauseMode, SGLangClient
from agl_slime.sglang.transport import check_positive, checked_url

logger = logging.getLogger(__name__)

# One worker's steps, in order.
PHASES = ("pause", "flush", "update", "verify", "continue")


# Ctrl-C must end a run within seconds, also in the middle of a push.
_CONTINUE_AFTER_FAILURE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class WeightSyncSettings:
    """Limits of a weight sync; all times in seconds."""

    pause_mode: PauseMode = "abort"
    """What happens to running requests. "abort": they answer and are resumed by the client, with all their cache
    recomputed under the new weights, at the price of one prefill each. "retract" and "in_place" keep them inside
    SGLang, which then refuses to flush: entries of the old weights stay in the prefix cache and are mixed into later
    answers."""

    flush_timeout_s: float = 30.0
    """How long a paused worker may take to become idle; one decode step and the abort's way through its processes, so
    normally well below a second."""

    flush_poll_s: float = 0.05
    """Between two flushes while the worker is not idle yet."""

    update_timeout_s: float = 600.0
    """Loading the checkpoint on one worker: 140 GB (70B parameters in bfloat16) at 0.5 GB/s from a shared disk are 280
    s."""

    def __post_init__(self) -> None:
        if self.pause_mode not in ("abort", "retract", "in_place"):
            raise ConfigError(f"pause_mode must be abort, retract or in_place, got {self.pause_mode!r}")
        check_positive(self, "flush_timeout_s", "flush_poll_s", "update_timeout_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSync:
    """What one worker took: ``seconds`` by phase (see ``PHASES``), phases that were not reached left out; ``error`` is
    None when it has the new weights and runs."""

    url: str
    seconds: dict[str, float]
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSyncReport:
    """A successful push: every worker reports ``version``. ``seconds`` is wall time, finding the workers included."""

    version: str
    model_path: str
    seconds: float
    workers: tuple[WorkerSync, ...]


class DiskWeightSync:
    """Pushes checkpoints to all workers behind ``base_url`` (a server, or a router)."""

    def __init__(
        self,
        *,
        base_url: str,
        settings: WeightSyncSettings | None = None,
        client_settings: ClientSettings | None = None,
    ) -> None:
        self.base_url = checked_url(base_url)
        self.settings = settings or WeightSyncSettings()
        self.client_settings = client_settings or ClientSettings()
        self._pushing = False

    async def push(self, model_path: str, version: str) -> WeightSyncReport:
        """Load the checkpoint directory ``model_path`` (as the workers see it) on every worker, under weight version
        ``version``.

        Workers are taken at the same time, and found anew each time: a router's may come and go. Connections last for
        one push, so that successive pushes may come from different event loops.

        Raises:
            WeightSyncError: Some worker did not take the weights, reports another version, or could not be continued;
                all the others have been finished and continued by then. Also when a push of this object is still under
                way.
            EngineError: The workers could not be found.
        """
        if self._pushing:
            raise WeightSyncError(
                f"a push to {self.base_url} is still under way; wait for it before pushing version {version}"
            )
        self._pushing = True
        try:
            return await self._push(model_path, version)
        finally:
            self._pushing = False

    async def _push(self, model_path: str, version: str) -> WeightSyncReport:
        started = time.monotonic()
        async with SGLangClient(base_url=self.base_url, settings=self.client_settings) as client:
            urls = await client.workers()
        workers = await asyncio.gather(*(self._push_to(url, model_path, version) for url in urls))
        failed = [worker for worker in workers if worker.error is not None]
        if failed:
            reasons = "; ".join(f"{worker.url}: {worker.error}" for worker in failed)
            raise WeightSyncError(
                f"weight version {version} did not reach {len(failed)} of {len(workers)} workers: {reasons}"
            )
        report = WeightSyncReport(
            version=version, model_path=model_path, seconds=time.monotonic() - started, workers=tuple(workers)
        )
        logger.info("weight version %s on %d workers in %.2f s", version, len(workers), report.seconds)
        return report

    async def _push_to(self, url: str, model_path: str, version: str) -> WorkerSync:
        steps = _Steps()
        async with SGLangClient(base_url=url, settings=self.client_settings) as client:
            # once something has failed, or this task was cancelled, there is little hope and someone who waits
            patience_s = _CONTINUE_AFTER_FAILURE_S
            try:
                await self._update(steps, client, model_path, version)
                patience_s = self.client_settings.control_timeout_s
            except EngineError as error:
                steps.fail(error)
            finally:
                # also when the pause itself failed: it may have worked, and only its answer was lost
                try:
                    with steps.phase("continue"):
                        await client.continue_generation(timeout_s=patience_s)
                except EngineError as error:
                    steps.fail(error)
        return WorkerSync(url=url, seconds=steps.seconds, error="; ".join(steps.errors) or None)

    async def _update(self, steps: _Steps, client: SGLangClient, model_path: str, version: str) -> None:
        with steps.phase("pause"):
            await client.pause_generation(self.settings.pause_mode)
        with steps.phase("flush"):
            # with requests kept inside the worker is never idle, so there is nothing to wait for
            if self.settings.pause_mode == "abort":
                await self._flush(client)
        refusal = ""
        with steps.phase("update"):
            try:
                await client.update_weights_from_disk(model_path, version, timeout_s=self.settings.update_timeout_s)
            except EngineRequestError as error:
                # a server that has loaded them, and could not flush although it was not asked to: the version tells
                if "not flushed" not in str(error):
                    raise
                refusal = f", after {error}"
        with steps.phase("verify"):
            if (found := await client.weight_version()) != version:
                raise WeightSyncError(f"reports weight version {found} instead of {version}{refusal}")

    async def _flush(self, client: SGLangClient) -> None:
        """Until the worker is idle and its prefix cache empty."""
        deadline = time.monotonic() + self.settings.flush_timeout_s
        while True:
            try:
                return await client.flush_cache()
            except EngineRequestError as error:
                if time.monotonic() + self.settings.flush_poll_s >= deadline:
                    waited = f"{self.settings.flush_timeout_s:g} s"
                    raise WeightSyncError(f"still busy {waited} after the pause: {error}") from error
            await asyncio.sleep(self.settings.flush_poll_s)


@dataclass
class _Steps:
    """What one worker went through."""

    seconds: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    at: str = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.at = name
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = time.monotonic() - started

    def fail(self, error: EngineError) -> None:
        self.errors.append(f"{self.at}: {error}")
