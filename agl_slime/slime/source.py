"""``AGLDataSource`` as slime's RolloutManager builds it: connected by ``args``, enqueueing tasks as they are asked for,
with evaluations, saved and loaded beside slime's checkpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agl_slime.datasource.source import DataSourceSettings, GroupSource, spell_ends
from agl_slime.errors import ConfigError, DataSourceError, spell_exception
from agl_slime.groups.ledger import Ledger
from agl_slime.groups.results import GroupResult
from agl_slime.loop.tasks import TaskGroup
from agl_slime.slime.args import PluginSettings
from agl_slime.slime.connection import Connection
from agl_slime.slime.pacing import Pacing
from agl_slime.slime.states import as_json, eval_data, state_path
from agl_slime.store.bridge import FINISHED
from agl_slime.support.agl import LightningStore, Rollout
from agl_slime.support.files import write_file
from agl_slime.support.threads import run_blocking, run_in_thread
from agl_slime.types import DataSource, Sample

logger = logging.getLogger(__name__)

# So many dropped groups in a row, and at least so many for each that is wanted, are no bad luck.
_HOPELESS = 8


class AGLDataSource(GroupSource, DataSource):
    """Groups of Samples from Agent Lightning rollouts, for slime's RolloutManager or any trainer.

    slime builds it as ``AGLDataSource(args)``: it connects to what ``agl_slime.slime.args`` describes, and where that
    gives it tasks, enqueues as many groups as are asked for, and with ``agl_max_staleness`` so far ahead of training as
    that allows: more would only make samples older. A group that is dropped is replaced. A program builds it as
    ``AGLDataSource(store=…, tokenizer=…, args=…, n_samples_per_prompt=…)`` and enqueues rollouts itself. ``stop`` ends
    its thread.
    """

    def __init__(
        self,
        args: Any = None,
        *,
        store: LightningStore | None = None,
        tokenizer: Any = None,
        n_samples_per_prompt: int | None = None,
        settings: DataSourceSettings | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        if store is None and args is None:
            raise ConfigError("AGLDataSource needs a store: pass store=… (an Agent Lightning LightningStore)")
        self._args = args
        plugin = PluginSettings.from_args(args) if store is None else None
        self._connection = connection = Connection(plugin) if plugin is not None and plugin.connected else None
        if store is None and connection is None:
            logger.warning(
                "AGLDataSource is connected to nothing and gives placeholders: set agl_store_url or agl_agent"
            )
        if connection is not None:
            store, tokenizer = connection.store, tokenizer or connection.tokenizer()
            settings = settings or connection.data_source_settings()
        self._cursor = connection.tasks if connection is not None else None
        self._pacing = Pacing.of(plugin, args) if plugin is not None and self._cursor is not None else None
        self._evals = connection.evals if connection is not None else []
        self._wanted = 0
        self._dropped_in_a_row = 0
        self._topping_up = asyncio.Lock()
        self._reconciling = False
        self._evaluated: dict[str, GroupResult] = {}
        self._loaded = False
        self._delivery: dict[str, Any] = {}
        durable = getattr(args, "rollout_data_transport", None) == "straw"
        self._delivery_path = Path(args.rollout_data_dir) / "agl_datasource.json" if durable else None
        super().__init__(
            store=store,
            tokenizer=tokenizer,
            n_samples_per_prompt=n_samples_per_prompt or getattr(args, "n_samples_per_prompt", None) or 1,
            settings=settings,
            ledger=ledger,
            reward_key=getattr(args, "reward_key", None),
            convert_validation=connection is not None,
            # slime with --save and without --save-interval never saves
            hold=None not in (getattr(args, "save", None), getattr(args, "save_interval", None)),
        )
        if connection is not None:
            connection.start()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        if self._pacing is not None and not self._pacing.on:
            if not self.settings.blocking:
                self.pace(getattr(self._args, "start_rollout_id", None) or 0)
            else:
                self._pacing = self._pacing.of_another_function()
        batch = None if self.settings.blocking else getattr(self._args, "rollout_batch_size", None)
        self.demand(batch or num_samples)
        return super().get_samples(num_samples)

    get_samples.__doc__ = GroupSource.get_samples.__doc__

    async def get_samples_async(self, num_samples: int) -> list[list[Sample]]:
        """``get_samples``, for slime's event loop. Groups that come after the caller was cancelled are given back."""
        taken: list[list[Sample]] = []
        cancelled = False

        def take() -> None:
            groups = self.get_samples(num_samples)
            with self._changed:
                if cancelled:
                    self.add_samples(groups)
                else:
                    taken.extend(groups)

        try:
            await run_in_thread(take)
        except BaseException:
            with self._changed:
                cancelled = True
                if taken:
                    self.add_samples(taken)
            raise
        return taken

    def demand(self, groups: int) -> None:
        """Have ``groups`` groups ready or under way, where this data source enqueues tasks itself; returns at once.
        Also begins to follow a remote store, or to look through one that tells of nothing: until then a saved state may
        be loaded."""
        self._begin()
        with self._changed:
            self._wanted = max(self._wanted, groups)
            self._follow_up()

    def pace(self, rollout_id: int) -> None:
        """slime asks for the groups of this rollout; with ``agl_max_staleness`` that is what training is paced by."""
        if self._pacing is not None:
            with self._changed:
                self._pacing.asked(rollout_id)
            if self.settings.blocking:
                run_blocking(self._ask_version(rollout_id))  # now: the weights change when slime goes on
            else:
                self._submit(self._ask_version, None)

    async def _ask_version(self, rollout_id: int | None) -> None:
        assert self._connection is not None
        version = await self._connection.weight_version()
        with self._changed:
            if self._pacing is not None:
                self._pacing.weights(version, rollout_id=rollout_id)
            self._follow_up()

    def _time_passed(self) -> None:
        super()._time_passed()
        if self._pacing is not None and self._pacing.on and not self.settings.blocking:
            self._submit(self._ask_version, None)

    def reject(self, samples: Sequence[Sequence[Sample]], reason: str) -> None:
        super().reject(samples, reason)
        if self._pacing is not None:
            with self._changed:
                self._pacing.rejected(len(samples))
                self._follow_up()

    def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """Run validation rollouts and wait for them: slime's evaluation data, an entry per rollout that succeeded in
        each data set.

        Raises ``DataSourceError`` when there are no evaluation tasks, when all rollouts failed, or at the deadline.
        """
        if not self._evals:
            what = "set agl_eval_tasks (AGL_SLIME_EVAL_TASKS) or --eval-prompt-data"
            raise DataSourceError(f"there are no evaluation tasks: {what}")
        self._begin()
        timeout_s = self.settings.get_timeout_s
        deadline = time.monotonic() + timeout_s
        with self._changed:
            names: dict[str, list[str]] = {}
            for one in self._evals:
                groups = one.cursor.take(one.rollouts)
                names[one.name] = [group.group_id for group in groups]
                self._submit(self._enqueue, groups, 1, "val", one.sampling)
            wanted = {name for group_ids in names.values() for name in group_ids}
            while not self._evaluated.keys() >= wanted:
                self.raise_if_dead()
                if time.monotonic() > deadline:
                    raise DataSourceError(f"evaluation {rollout_id} did not end within {timeout_s:g} s")
                self._changed.wait(1.0)
            members = {
                name: [member for group_id in group_ids for member in self._evaluated.pop(group_id).succeeded]
                for name, group_ids in names.items()
            }
        if not any(members.values()):
            ends = spell_ends(self.ledger.counts().reasons)
            raise DataSourceError(f"all {len(wanted)} rollouts of evaluation {rollout_id} failed: {ends}")
        return {name: eval_data(ended) for name, ended in members.items() if ended}  # slime divides by their number

    def save(self, rollout_id: Any) -> None:
        """Write the state beside the checkpoint (``args.save``), under the id of the step."""
        if (directory := getattr(self._args, "save", None)) is not None:
            self._write(state_path(directory, rollout_id), self.state())

    def load(self, rollout_id: Any = None) -> None:
        """Read what ``save`` wrote for that step (``args.load``); nothing where there is none, as on a fresh start."""
        self._loaded = True
        if self._delivery_path is not None:
            self._delivery_path.unlink(missing_ok=True)
        directory = getattr(self._args, "load", None)
        if directory is not None and (path := state_path(directory, rollout_id)).exists():
            self._read(path)

    def state_dict(self) -> dict[str, Any]:
        """The state, for the journal that newer managers keep of their batches; JSON values only."""
        state = self.state()
        with self._changed:
            self._ends.saved(state["waiting"])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave: a manager has died, and another one takes its journal over."""
        self.restore({**state})

    def delivered(self, rollout_id: int) -> list[list[Sample]] | None:
        """The batch of this step, when a manager before this one had it kept by ``deliver_once`` and died before slime
        knew that the queue has it. The first call goes on from what that manager kept, unless slime has called
        ``load``."""
        if (path := self._delivery_path) is None:
            return None
        if not self._loaded and path.exists():
            self._delivery = self._read(path)["delivery"]
        self._loaded = True
        return self._batch() if self._delivery.get("rollout_id") == rollout_id else None

    def deliver_once(self, rollout_id: int, groups: list[list[Sample]]) -> list[list[Sample]]:
        """Keep a batch on disk, with the state after it, before straw's durable queue is given it: under that transport
        slime restores no data source but its own. A manager that is asked for the same step again gives the same batch
        again, which the queue recognises; one that is asked for the next step knows that the queue has this one.
        Returns the groups as they will be read back."""
        if self._delivery_path is None:
            return groups
        delivery = {"rollout_id": rollout_id, "groups": [[sample.to_dict() for sample in group] for group in groups]}
        self._delivery = json.loads(as_json(delivery))
        self._write(self._delivery_path, {**self.state(), "delivery": self._delivery})
        return self._batch()

    def close(self) -> None:
        """``stop``, as slime calls it when a run has ended."""
        self.stop()

    def _batch(self) -> list[list[Sample]]:
        return [[Sample.from_dict(sample) for sample in group] for group in self._delivery["groups"]]

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        write_file(path, as_json(state))
        with self._changed:
            self._ends.saved(state["waiting"])

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            state = {**json.loads(path.read_text())}
            self.restore(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataSourceError(f"{path} is not a saved state: {spell_exception(error)}") from error
        return state

    def __len__(self) -> int:
        """Number of tasks in an epoch where this data source has a file of them, from which slime computes
        ``--num-epoch``; else the groups that are ready."""
        epoch = self._connection.epoch_size if self._connection is not None else None
        return super().__len__() if epoch is None else epoch

    def raise_if_dead(self) -> None:
        super().raise_if_dead()
        if self._connection is not None:
            self._connection.raise_if_dead()

    def stop(self, timeout_s: float = 5.0) -> None:
        if self._connection is not None and not self._stopped:
            self._connection.stop()
        super().stop(timeout_s)

    def state(self, *, checkpoint: int | None = None) -> dict[str, Any]:
        with self._changed:
            state = super().state(checkpoint=checkpoint)
            if self._cursor is not None:
                state["demand"] = self._cursor.state()
            if self._pacing is not None:
                state["pacing"] = self._pacing.state()
            return state

    def restore(self, state: dict[str, Any]) -> None:
        with self._changed:
            super().restore(state)
            if self._cursor is not None and state.get("demand") is not None:
                self._cursor.restore(state["demand"])
                self._reconciling = self._feeds
                if not self._feeds:
                    self._cursor.repeat()  # the store was in the process that saved
            if self._pacing is not None and self._cursor is not None:
                under_way = self._cursor.under_way if self._feeds else ()
                self._pacing.restore(state.get("pacing") or (), ready=self._groups.ready, under_way=under_way)

    async def _follow(self) -> None:
        await self._begun.wait()
        if self._reconciling:
            await self._reconcile()
        await super()._follow()

    async def _reconcile(self) -> None:
        """Find in the store the groups that were enqueued after the loaded state was saved, and those of that state
        that had not got there; this looks at all that the store holds, once."""
        assert self._cursor is not None
        found: dict[str, list[Rollout]] = {}
        for rollout in await self._patiently(self._store.query_rollouts):
            found.setdefault(str((rollout.metadata or {}).get("group_id")), []).append(rollout)
        with self._changed:
            # not those of which the store has forgotten a part, as after a state from before the last two
            whole = {name for name, rollouts in found.items() if len(rollouts) >= self.n_samples_per_prompt}
            self._cursor.reconcile(whole)
            if self._pacing is not None:
                self._pacing.reconciled(self._cursor.under_way)
            ours = [rollout for name in self._cursor.under_way for rollout in found[name]]
            for group_id in self._cursor.under_way:
                self.expect(group_id, size=self.n_samples_per_prompt)
            self._reconciling = False
            self.opened([rollout for rollout in ours if rollout.status not in FINISHED])

    async def _top_up(self) -> None:
        """Enqueue what is missing."""
        async with self._topping_up:
            with self._changed:
                if self._cursor is None or (missing := self._missing()) <= 0:
                    return
                groups = self._cursor.take(missing)
                if self._pacing is not None:
                    self._pacing.admitted(group.group_id for group in groups)
            await self._enqueue(groups, self.n_samples_per_prompt, "train")

    async def _enqueue(self, groups: Sequence[TaskGroup], size: int, mode: Any, sampling: Any = None) -> None:
        connection = self._connection
        assert connection is not None
        for group in groups:
            self.expect(group.group_id, size=size, mode=mode)
        enqueue = connection.enqueue
        self.opened(await self._patiently(lambda: enqueue(groups, size=size, mode=mode, sampling=sampling)))

    def _missing(self) -> int:
        if self._cursor is None or self._reconciling:
            return 0
        if self._pacing is not None and self._pacing.on:
            return self._pacing.free
        return self._wanted - len(self._groups.ready) - len(self._cursor.under_way)

    def _deliverable(self) -> int:
        if self._pacing is not None and self._pacing.on:
            return self._pacing.deliverable(self._groups.ready)
        return super()._deliverable()

    def _deliver(self, num_samples: int) -> list[list[Sample]]:
        if self._pacing is not None and self._pacing.on:
            num_samples = self._pacing.take(self._groups.ready, num_samples)
        groups = super()._deliver(num_samples)
        self._wanted = max(0, self._wanted - len(groups))
        return groups

    def _finalized(self, group: GroupResult) -> None:
        if any(one.cursor.done(group.group_id) for one in self._evals):
            self._evaluated[group.group_id] = group
        if self._cursor is None or not self._cursor.done(group.group_id):
            return
        if self._pacing is not None:
            self._pacing.finalized(group)
        self._dropped_in_a_row = 0 if group.ready else self._dropped_in_a_row + 1
        if self._dropped_in_a_row >= _HOPELESS * max(1, self._wanted):
            failures = {f"{member.failure}: {member.failure_message}" for member in group.members if not member.ok}
            examples = "; ".join(sorted(failures)[:3])
            dropped = f"{self._dropped_in_a_row} groups in a row were not fit to train on"
            raise DataSourceError(f"{dropped} ({group.reason}); {examples}")

    def _follow_up(self) -> None:
        super()._follow_up()
        if self._missing() > 0:
            self._submit(self._top_up)

    def _store_restarted(self) -> None:
        super()._store_restarted()
        if self._connection is not None:
            self._connection.forget()
        for one in self._evals:
            self._submit(self._enqueue, list(one.cursor.under_way.values()), 1, "val", one.sampling)
        if self._cursor is not None:
            self._cursor.repeat()
        if self._pacing is not None:
            self._pacing.lost()
        self._follow_up()

    def _more_to_come(self) -> bool:
        return self._connection is not None or super()._more_to_come()
