"""New weights into every SGLang worker, from a checkpoint directory that the workers can read.

Per worker: pause → flush → update → verify → continue. SGLang 0.5.15 and 0.5.23 need this order:

- ``pause`` with mode "abort" makes every running request answer with its tokens so far (the client resumes it under the
  new weights) and holds back new ones, so the flush finds an idle engine.
- ``flush`` comes before the update and by itself. An update with ``flush_cache=true`` while requests are pending ends a
  0.5.15 server, and 0.5.23 answers it with 400 "Weights were updated, but the cache was not flushed". We always send
  ``flush_cache=false``: after a successful flush of a paused engine no entry of the old weights is left to be reused.
- ``verify`` reads ``/model_info`` while the worker is still paused; its version counts, not the update's status.
- From a directory also where server and trainer share a machine: /update_weights_from_tensor takes pickled handles of
  torch's shared memory, ends a server whose client does not share memory by files, and wants two more calls around it
  in 0.5.23. A directory in /dev/shm is shared memory as well.
- ``continue`` is sent after any failure too; without it the worker would hold back all requests for ever.

Paused with ``retract`` or ``in_place``, running requests stay in the engine and one answer has tokens of two versions;
only an engine that lists the version of each token is asked for that (``check_pause``). With ``retract`` the new
weights recompute the KV cache, and the order above holds. After ``in_place`` tokens stand on the old weights' KV cache,
and running requests keep the flush from happening: SGLang reuses prefixes of the old weights for later ones, too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from agl_slime.engine.client.client import ClientSettings, PauseMode, SGLangClient
from agl_slime.engine.client.transport import checked_url
from agl_slime.errors import EngineError, EngineRequestError, WeightSyncError
from agl_slime.support.net import shown_url

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Ctrl-C must end a run within seconds, also in the middle of a push.
_CONTINUE_AFTER_FAILURE_S = 3.0
_FLUSH_POLL_S = 0.02


class DiskWeightSync:
    """Pushes checkpoints to all workers behind ``base_url`` (a server, or a router).

    ``flush_timeout_s`` is how long a paused worker may take to become idle, normally well below a second;
    ``update_timeout_s`` covers loading on one worker: 140 GB (70B parameters in bfloat16) at 0.5 GB/s are 280 s.
    ``pause`` decides what happens to running requests.
    """

    def __init__(
        self,
        *,
        base_url: str,
        client_settings: ClientSettings | None = None,
        pause: PauseMode = "abort",
        flush_timeout_s: float = 30.0,
        update_timeout_s: float = 600.0,
    ) -> None:
        self.base_url = checked_url(base_url)
        self.client_settings = client_settings or ClientSettings()
        self.pause: PauseMode = pause
        self._flush_timeout_s, self._update_timeout_s = flush_timeout_s, update_timeout_s
        self._pushing = False

    async def check_pause(self) -> str:
        """Check once, before the first push, whether every worker supports ``pause``. Where one does not, ``pause``
        becomes "abort" and the returned sentence has the reason; empty when all do."""
        if self.pause == "abort":
            return ""
        # a worker that a killed run left paused would not answer
        await self.ask_each_worker(SGLangClient.continue_generation)
        lists_versions = await self.ask_each_worker(SGLangClient.lists_weight_versions)
        if (url := next((url for url, lists in lists_versions.items() if not lists), None)) is None:
            return ""
        mode, self.pause = self.pause, "abort"
        reason = f"the engine at {shown_url(url)} does not say which weight version sampled which token"
        then = "a weight update aborts running requests, and they are taken up again under the new weights"
        return f"{reason}, so it is not paused with {mode!r}: {then}"

    async def dtype(self) -> str:
        """The dtype that all workers compute in (bfloat16, ...); empty where it differs or is unknown."""
        dtypes = set((await self.ask_each_worker(SGLangClient.dtype)).values())
        return dtypes.pop() if len(dtypes) == 1 else ""

    async def ask_each_worker(self, ask: Callable[[SGLangClient], Awaitable[T]]) -> dict[str, T]:
        """Each worker's answer, by its URL."""
        async with SGLangClient(base_url=self.base_url, settings=self.client_settings) as client:
            urls = await client.workers()
        answers = {}
        for url in urls:
            async with SGLangClient(base_url=url, settings=self.client_settings) as client:
                answers[url] = await ask(client)
        return answers

    async def push(self, model_path: str, version: str) -> tuple[str, ...]:
        """Load the checkpoint directory ``model_path`` (as the workers see it) on every worker, under weight version
        ``version``. Returns the workers' URLs.

        Workers are updated at the same time and listed at each push: a router's may change. Connections last for one
        push, so that successive pushes may come from different event loops.

        Raises:
            WeightSyncError: Some worker did not take the weights, reports another version, or could not be continued;
                all the others have been finished and continued by then. Also when another push of this object is
                running.
            EngineError: The workers could not be listed.
        """
        if self._pushing:
            raise WeightSyncError(f"a push is still running; wait before pushing {version}")
        self._pushing = True
        started = time.monotonic()
        try:
            async with SGLangClient(base_url=self.base_url, settings=self.client_settings) as client:
                urls = await client.workers()
            failures = await asyncio.gather(*(self._push_to(url, model_path, version) for url in urls))
        finally:
            self._pushing = False
        failed = [f"{shown_url(url)}: {failure}" for url, failure in zip(urls, failures, strict=True) if failure]
        if failed:
            count = f"{len(failed)} of {len(urls)} workers"
            raise WeightSyncError(f"weight version {version} did not reach {count}: {'; '.join(failed)}")
        logger.info("weight version %s on %d workers in %.2f s", version, len(urls), time.monotonic() - started)
        return urls

    async def _push_to(self, url: str, model_path: str, version: str) -> str:
        """The failures on one worker; empty when it has the new weights and runs."""
        failures: list[str] = []
        async with SGLangClient(base_url=url, settings=self.client_settings) as client:
            # short after a failure or a cancellation: the caller waits and success is unlikely
            patience_s = _CONTINUE_AFTER_FAILURE_S
            step, refusal = "pause", ""
            try:
                await client.pause_generation(self.pause)
                step = "flush"
                await self._flush(client)
                step = "update"
                try:
                    await client.update_weights_from_disk(model_path, version, timeout_s=self._update_timeout_s)
                except EngineRequestError as error:
                    if "not flushed" not in str(error):
                        raise
                    refusal = f", after {error}"  # loaded nevertheless: the version decides
                step = "verify"
                if (reported := await client.weight_version()) != version:
                    raise WeightSyncError(f"reports weight version {reported} instead of {version}{refusal}")
                patience_s = self.client_settings.control_timeout_s
            except EngineError as error:
                failures.append(f"{step}: {error}")
            finally:
                # also when the pause itself failed: it may have worked, and only its answer was lost
                try:
                    await client.continue_generation(timeout_s=patience_s)
                except EngineError as error:
                    failures.append(f"continue: {error}")
        return "; ".join(failures)

    async def _flush(self, client: SGLangClient) -> None:
        """Wait until the worker is idle and its prefix cache empty; after a pause in place, try once."""
        deadline = time.monotonic() + self._flush_timeout_s
        while True:
            try:
                return await client.flush_cache()
            except EngineRequestError as error:
                if self.pause == "in_place":
                    return None
                if time.monotonic() + _FLUSH_POLL_S >= deadline:
                    waited = f"{self._flush_timeout_s:g} s"
                    raise WeightSyncError(f"still busy {waited} after the pause: {error}") from error
            await asyncio.sleep(_FLUSH_POLL_S)
