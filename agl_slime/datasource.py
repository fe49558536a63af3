"""``AGLDataSource``: finished rollouts of a ``LightningStore`` as groups of Samples, for slime's RolloutManager or any trainer.

A background thread with its own event loop learns which rollouts have ended, reads and converts them, and puts settled groups into a queue that
``get_samples`` takes from. A ``BridgeStore`` tells it the moment a rollout ends; other stores are asked about the rollouts that are known to be in
flight and, where nobody announces them, looked through for new ones.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from agl_slime._agl import LightningStore
from agl_slime.collector import collect
from agl_slime.datasource_state import DataSourceState, load_state, save_state
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.groups.assembler import GroupAssembler
from agl_slime.groups.ledger import Ledger
from agl_slime.groups.outcome import GroupResult, MemberResult, Outcome
from agl_slime.groups.policy import GroupPolicy, MinimumViableGroup
from agl_slime.types import DataSource, Sample, set_rollout_id

logger = logging.getLogger(__name__)

MemberListener = Callable[[MemberResult], None]
GroupListener = Callable[[GroupResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceSettings:
    """``get_timeout_s``: longest wait of ``get_samples`` before it says that nothing came. ``poll_interval_s``: pause between looks at a store that
    does not tell of finished rollouts; a look never takes more than a tenth of the time. ``policy``: when a group is fit to train on.
    """

    get_timeout_s: float = 600.0
    poll_interval_s: float = 0.1
    policy: GroupPolicy = field(default_factory=MinimumViableGroup)

    def __post_init__(self) -> None:
        if self.get_timeout_s <= 0:
            raise ConfigError(f"get_timeout_s must be positive, got {self.get_timeout_s}")
        if self.poll_interval_s <= 0:
            raise ConfigError(f"poll_interval_s must be positive, got {self.poll_interval_s}")


class AGLDataSource(DataSource):
    """Groups of Samples from Agent Lightning rollouts.

    slime builds it as ``AGLDataSource(args)``; a program as ``AGLDataSource(store=…, tokenizer=…, args=…, n_samples_per_prompt=…)``. ``stop`` ends
    its thread.

    Rollouts are grouped by ``metadata["group_id"]``. A group that was announced with ``expect`` has the announced size, any other
    ``n_samples_per_prompt``; with one sample per prompt a rollout without a group id is a group of its own.
    """

    def __init__(
        self,
        args: Any = None,
        *,
        store: LightningStore | None = None,
        tokenizer: Any = None,
        n_samples_per_prompt: int | None = None,
        settings: DataSourceSettings | None = None,
        on_member: MemberListener | None = None,
        on_group: GroupListener | None = None,
    ) -> None:
        if store is None:
            raise ConfigError("AGLDataSource needs a store: pass store=… (an Agent Lightning LightningStore)")
        self.args = args
        self.settings = settings or DataSourceSettings()
        self.n_samples_per_prompt = n_samples_per_prompt or getattr(args, "n_samples_per_prompt", None) or 1
        self.ledger = Ledger()
        self._store = store
        self._tokenizer = tokenizer
        self._reward_key: str | None = getattr(args, "reward_key", None)
        self._on_member = on_member
        self._on_group = on_group
        self._assembler = GroupAssembler(policy=self.settings.policy)
        self._ready: deque[list[Sample]] = deque()
        self._ready_members: dict[int, list[str]] = {}  # group_index -> rollout ids, for the ledger
        self._changed = threading.Condition()
        self._next_index = 0
        self._next_group_index = 0
        self._next_rollout_number = 0
        self._failure: BaseException | None = None
        self._stopped = False
        self._announced = False
        self._collecting: set[str] = set()
        self._feed = _CompletionFeed(self)
        self._feed.start()

    # -- what slime calls --------------------------------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups, oldest first; waits until that many are ready or nothing more can come.

        Fewer groups come back when no rollout is in flight any more, or at the deadline. Raises ``DataSourceError`` when there is none at the
        deadline: an empty list would make slime's default rollout function spin.
        """
        deadline = time.monotonic() + self.settings.get_timeout_s
        with self._changed:
            while len(self._ready) < num_samples:
                self.raise_if_dead()
                if self._ready and not self._in_flight():
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, 1.0))
            if not self._ready and num_samples > 0:
                counts = self.ledger.counts()
                raise DataSourceError(
                    f"no group of samples became ready within {self.settings.get_timeout_s:g} s "
                    f"({counts.open} rollouts in flight, {counts.ready} ready, ended: {_spell(counts.reasons)})"
                )
            groups = [self._ready.popleft() for _ in range(min(num_samples, len(self._ready)))]
            for group in groups:
                for rollout_id in self._ready_members.pop(_group_index(group), []):
                    self.ledger.close(rollout_id, Outcome.TRAINED)
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back; they are handed out again before newer ones."""
        with self._changed:
            self._ready.extendleft(reversed(samples))
            self._changed.notify_all()

    def save(self, rollout_id: Any) -> None:
        """Write the groups that wait and the counters beside the checkpoint (``args.save``), under the id of the step."""
        directory = getattr(self.args, "save", None)
        if directory is None:
            return
        with self._changed:
            groups = [[sample.to_dict() for sample in group] for group in self._ready]
            state = DataSourceState(
                groups=groups, index=self._next_index, group_index=self._next_group_index, rollout_number=self._next_rollout_number
            )
        save_state(Path(directory), rollout_id, state)

    def load(self, rollout_id: Any = None) -> None:
        """Read what ``save`` wrote for that step (``args.load``); does nothing when there is none, as on a fresh start."""
        directory = getattr(self.args, "load", None)
        state = load_state(Path(directory), rollout_id) if directory is not None else None
        if state is None:
            return
        with self._changed:
            self._ready.extend([Sample.from_dict(sample) for sample in group] for group in state.groups)
            self._next_index = max(self._next_index, state.index)
            self._next_group_index = max(self._next_group_index, state.group_index)
            self._next_rollout_number = max(self._next_rollout_number, state.rollout_number)
            self._changed.notify_all()

    def __len__(self) -> int:
        """Number of groups that are ready."""
        return len(self._ready)

    # -- what the loop calls -----------------------------------------------------------------------------------------------------------------

    def expect(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Announce a group before its rollouts are enqueued: its size and mode, so that failures settle it too."""
        with self._changed:
            self._announced = True
            self._assembler.announce(group_id, size=size, mode=mode)

    def opened(self, rollout_ids: Sequence[str]) -> None:
        """These rollouts were enqueued: they are in flight in the ledger, and are asked about if the store does not tell of their end."""
        for rollout_id in rollout_ids:
            self.ledger.open(rollout_id)

    def listen(self, *, on_member: MemberListener | None = None, on_group: GroupListener | None = None) -> None:
        """Call these for each rollout that has ended and each group that has settled from now on; on the data source's thread, so they must be
        quick."""
        self._on_member = on_member
        self._on_group = on_group

    def notify(self, rollout_id: str) -> None:
        """A rollout may have ended: look at it now. From any thread."""
        self._feed.push(rollout_id)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; waiting calls raise. Safe to call twice."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._changed.notify_all()
        self._feed.stop(timeout_s)

    def __enter__(self) -> AGLDataSource:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # -- on the background thread ----------------------------------------------------------------------------------------------------------------

    async def _take(self, rollout_id: str) -> None:
        """Read, convert and settle one rollout that may have ended."""
        if rollout_id in self._collecting:
            return
        self._collecting.add(rollout_id)
        try:
            member = await collect(self._store, rollout_id, tokenizer=self._tokenizer, reward_key=self._reward_key)
        finally:
            self._collecting.discard(rollout_id)
        if member is not None:
            self._settle(member)

    def _settle(self, member: MemberResult) -> None:
        self.ledger.open(member.rollout_id)  # a rollout that nobody announced is opened by its end
        with self._changed:
            if not self.ledger.is_open(member.rollout_id):
                return  # reported twice
            group = self._assembler.add(member, default_size=self.n_samples_per_prompt if member.mode == "train" else 1)
            if not member.ok:
                self.ledger.close(member.rollout_id, member.outcome_if_failed, member.failure or "")
            elif member.mode != "train":
                self.ledger.close(member.rollout_id, Outcome.VALIDATED)
            if group is not None and group.mode == "train":
                self._settle_group(group)
            self._changed.notify_all()
        if self._on_member is not None:
            self._on_member(member)
        if group is not None and self._on_group is not None:
            self._on_group(group)

    def _settle_group(self, group: GroupResult) -> None:
        if not group.ready:
            for member in group.succeeded:
                self.ledger.close(member.rollout_id, Outcome.FILTERED, "group_incomplete")
            return
        samples: list[Sample] = []
        for member in group.succeeded:
            for sample in member.samples:
                sample.group_index = self._next_group_index
                sample.index = self._next_index
                set_rollout_id(sample, self._next_rollout_number)
                self._next_index += 1
                samples.append(sample)
            self._next_rollout_number += 1
            self.ledger.ready(member.rollout_id)
        self._ready_members[self._next_group_index] = [member.rollout_id for member in group.succeeded]
        self._next_group_index += 1
        self._ready.append(samples)

    # -- state -----------------------------------------------------------------------------------------------------------------------------------

    def _in_flight(self) -> bool:
        # Without announcements nobody knows what is still to come: wait for the deadline.
        return not self._announced or self.ledger.counts().open > 0 or len(self._assembler) > 0

    def raise_if_dead(self) -> None:
        """Raise ``DataSourceError`` when the thread has ended."""
        if self._stopped:
            raise DataSourceError("the data source was stopped")
        if self._failure is not None:
            raise DataSourceError(f"the data source's thread ended: {self._failure}") from self._failure

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()


class _CompletionFeed:
    """The thread of a data source: where ids of finished rollouts come in, by subscription, by hand or by looking."""

    def __init__(self, source: AGLDataSource) -> None:
        self._source = source
        self._store = source._store
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[str | None] | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="agl-slime-datasource", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def push(self, rollout_id: str | None) -> None:
        loop, queue = self._loop, self._queue
        if loop is None or queue is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(queue.put_nowait, rollout_id)
        except RuntimeError:
            logger.debug("The data source's loop closed before rollout %s could be handed to it.", rollout_id)

    def stop(self, timeout_s: float) -> None:
        self.push(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the thread has no caller; whoever waits for samples must hear of it
            logger.error("The data source's thread ended: %s", error, exc_info=error)
            self._source._fail(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue()
        subscribe = getattr(self._store, "subscribe_finished", None)
        unsubscribe = subscribe(lambda rollout: self.push(rollout.rollout_id)) if subscribe is not None else None
        look: Coroutine[Any, Any, None] = self._look_at_open() if subscribe is not None else self._look_for_all()
        looker = asyncio.create_task(look)
        looker.add_done_callback(self._looker_ended)
        takers: set[asyncio.Task[None]] = set()
        self._ready.set()
        try:
            while (rollout_id := await self._queue.get()) is not None:
                taker = asyncio.create_task(self._source._take(rollout_id))
                takers.add(taker)
                taker.add_done_callback(takers.discard)
                taker.add_done_callback(self._taker_ended)
        finally:
            looker.cancel()
            if unsubscribe is not None:
                unsubscribe()
            if takers:
                await asyncio.wait(takers, timeout=1.0)

    def _taker_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._source._fail(error)

    def _looker_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._source._fail(error)

    async def _look_at_open(self) -> None:
        """A safety net under the subscription: rollouts in flight are asked about now and then, so that the store's watchdog runs and nothing that
        ended unseen is waited for."""
        while True:
            await asyncio.sleep(max(5.0, self._source.settings.poll_interval_s))
            for rollout_id in self._source.ledger.open_ids():
                self.push(rollout_id)

    async def _look_for_all(self) -> None:
        """Without a subscription: ask about the rollouts in flight, and look through the store for rollouts that nobody announced."""
        seen_finished: set[str] = set()
        while True:
            began = time.monotonic()
            open_ids = self._source.ledger.open_ids()
            if open_ids or self._source._announced:
                for rollout_id in open_ids:
                    self.push(rollout_id)
            else:
                # Walks every rollout that the store holds: for small runs and tests. Loops announce what they enqueue.
                for rollout in await _query_finished(self._store):
                    if rollout.rollout_id not in seen_finished:
                        seen_finished.add(rollout.rollout_id)
                        self.push(rollout.rollout_id)
            cost = time.monotonic() - began
            await asyncio.sleep(max(self._source.settings.poll_interval_s, 9 * cost))


async def _query_finished(store: LightningStore) -> Sequence[Any]:
    for _ in range(10):
        try:
            return [*await store.query_rollouts(status_in=["succeeded", "failed", "cancelled"])]
        except RuntimeError as error:
            # a store that is not thread-safe may change while it is walked; look again
            if "changed size" not in str(error):
                raise
    return []


def _group_index(group: Sequence[Sample]) -> int:
    return group[0].group_index if group and group[0].group_index is not None else -1


def _spell(reasons: dict[tuple[Outcome, str], int]) -> str:
    return ", ".join(f"{count} {outcome.value}{f' ({reason})' if reason else ''}" for (outcome, reason), count in reasons.items()) or "none"
