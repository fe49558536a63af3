"""``AGLDataSource`` as slime's RolloutManager builds it: connected by ``args``, enqueueing tasks as they are asked for,
with evaluations, saved and loaded beside slime's checkpoints."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from agl_slime.datasource.source import DataSourceSettings, GroupSource
from agl_slime.errors import ConfigError, DataSourceError, format_exception
from agl_slime.groups.ledger import Ledger
from agl_slime.slime.args import PluginSettings
from agl_slime.slime.connection import Connection
from agl_slime.slime.producer import TaskProducer
from agl_slime.slime.replay import with_tensors, with_train_inputs
from agl_slime.slime.staleness import StalenessController
from agl_slime.slime.states import as_json, state_path
from agl_slime.store.client import RemoteStore
from agl_slime.support.agl import LightningStore
from agl_slime.support.files import write_file
from agl_slime.support.threads import run_blocking, run_in_thread
from agl_slime.types import DataSource, Sample, sample_from_json, sample_to_json

logger = logging.getLogger(__name__)


class AGLDataSource(DataSource):
    """Groups of Samples from Agent Lightning rollouts, for slime's RolloutManager or any trainer.

    slime builds it as ``AGLDataSource(args)``: it connects to what ``agl_slime.slime.args`` describes, and where that
    gives it tasks, enqueues as many groups as are asked for, and with ``agl_max_staleness`` so far ahead of training as
    that allows: more would only make samples older. A group that is dropped is replaced. A program builds it as
    ``AGLDataSource(store=…, tokenizer=…, args=…, n_samples_per_prompt=…)``; who enqueues rollouts himself announces
    them to ``groups``, the ``GroupSource`` that it holds. ``stop`` ends its thread.
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
        self._demand: TaskProducer | None = None
        if plugin is not None and connection is not None:
            store, tokenizer = connection.store, tokenizer or connection.tokenizer()
            settings = settings or connection.data_source_settings()
            self._demand = TaskProducer(connection, StalenessController.of(plugin, args))
        self._loaded = False
        self._delivery: dict[str, Any] = {}
        durable = getattr(args, "rollout_data_transport", None) == "straw"
        self._delivery_path = Path(args.rollout_data_dir) / "agl_datasource.json" if durable else None
        self._tokenizer = tokenizer
        self.groups = GroupSource(
            store=store,
            tokenizer=tokenizer,
            n_samples_per_prompt=n_samples_per_prompt or getattr(args, "n_samples_per_prompt", None) or 1,
            settings=settings,
            ledger=ledger,
            reward_key=getattr(args, "reward_key", None),
            convert_validation=connection is not None,
            # slime with --save and without --save-interval never saves
            hold=None not in (getattr(args, "save", None), getattr(args, "save_interval", None)),
            producer=self._demand,
            replay_files=connection.replay_files if connection is not None else None,
            removes_replay=not getattr(args, "agl_replay_kept", False),
        )
        if connection is not None:
            connection.start()

    # -- what slime calls ---------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups, as ``GroupSource.get_samples``."""
        if self._demand is not None:
            self._demand.begin_unnumbered(getattr(self._args, "start_rollout_id", None) or 0)
            blocking = self.groups.settings.blocking
            self._demand.want((None if blocking else getattr(self._args, "rollout_batch_size", None)) or num_samples)
        return [*with_train_inputs(with_tensors(self.groups.get_samples(num_samples)), self._tokenizer)]

    async def get_samples_async(self, num_samples: int) -> list[list[Sample]]:
        """``get_samples``, for slime's event loop. Groups that come after the caller was cancelled are given back."""
        taken: list[list[Sample]] = []
        cancelled = False

        def take() -> None:
            groups = self.get_samples(num_samples)
            with self.groups.changed:
                if cancelled:
                    self.add_samples(groups)
                else:
                    taken.extend(groups)

        try:
            await run_in_thread(take)
        except BaseException:
            with self.groups.changed:
                cancelled = True
                if taken:
                    self.add_samples(taken)
            raise
        return taken

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back; they are delivered again before newer ones."""
        self.groups.add_samples(samples)

    def reject(self, samples: Sequence[Sequence[Sample]], reason: str) -> None:
        """These groups were delivered and are not trained on, for ``reason``."""
        self.groups.reject(samples, reason)
        if self._demand is not None:
            self._demand.rejected(len(samples))

    def demand(self, groups: int) -> None:
        """Have ``groups`` groups ready or under way, where this data source enqueues tasks itself; returns at once.
        Also begins to follow a remote store, or to look through one that tells of nothing: until then a saved state may
        be loaded."""
        if self._demand is not None:
            self._demand.want(groups)
        else:
            self.groups.follower.begin()

    def pace(self, rollout_id: int) -> None:
        """slime asks for the groups of this rollout; with ``agl_max_staleness`` that is what training is paced by.
        Where another process plans the steps (``agl_planned``), its groups are those that are delivered next."""
        store = self._connection.store if self._connection is not None else None
        if getattr(self._args, "agl_planned", False) and isinstance(store, RemoteStore):
            self.groups.reserve_whole(run_blocking(store.planned(rollout_id)))
        if self._demand is not None:
            self._demand.pace(rollout_id)

    def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """Run validation rollouts and wait for them: slime's evaluation data, an entry per rollout that succeeded in
        each data set.

        Raises ``DataSourceError`` when there are no evaluation tasks, when all rollouts failed, or at the deadline.
        """
        if self._demand is None:
            raise DataSourceError("there are no evaluation tasks: set agl_store_url or agl_agent")
        return self._demand.evaluate(rollout_id)

    def metrics(self) -> dict[str, float]:
        """``agl/…``: where rollouts stand, and how many ended how since the start."""
        return self.groups.metrics()

    def __len__(self) -> int:
        """Number of tasks in an epoch where this data source has a file of them, from which slime computes
        ``--num-epoch``; else the groups that are ready."""
        epoch = self._connection.epoch_size if self._connection is not None else None
        return len(self.groups) if epoch is None else epoch

    # -- saved states -------------------------------------------------------------------------------------------------

    def save(self, rollout_id: Any) -> None:
        """Write the state beside the checkpoint (``args.save``), under the id of the step."""
        if (directory := getattr(self._args, "save", None)) is not None:
            self._write(state_path(directory, rollout_id), self.groups.state())

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
        state = self.groups.state()
        self.groups.saved(state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what ``state_dict`` gave: a manager has died, and another one takes its journal over."""
        self.groups.restore({**state})

    def delivered(self, rollout_id: int) -> list[list[Sample]] | None:
        """The batch of this step, when a manager before this one had it kept by ``keep_batch`` and died before slime
        knew that the queue has it. The first call goes on from what that manager kept, unless slime has called
        ``load``."""
        if (path := self._delivery_path) is None:
            return None
        if not self._loaded and path.exists():
            self._delivery = self._read(path)["delivery"]
        self._loaded = True
        return self._batch() if self._delivery.get("rollout_id") == rollout_id else None

    def keep_batch(self, rollout_id: int, groups: list[list[Sample]]) -> list[list[Sample]]:
        """Keep a batch on disk, with the state after it, before straw's durable queue is given it: under that transport
        slime restores no data source but its own. A manager that is asked for the same step again gives the same batch
        again, which the queue recognises; one that is asked for the next step knows that the queue has this one.
        Returns the groups as they will be read back."""
        if self._delivery_path is None:
            return groups
        delivery = {
            "rollout_id": rollout_id,
            "groups": [[sample_to_json(sample) for sample in group] for group in groups],
        }
        self._delivery = json.loads(as_json(delivery))
        self._write(self._delivery_path, {**self.groups.state(), "delivery": self._delivery})
        return self._batch()

    def _batch(self) -> list[list[Sample]]:
        groups = [[sample_from_json(sample) for sample in group] for group in self._delivery["groups"]]
        return [*with_train_inputs(with_tensors(groups), self._tokenizer)]

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        write_file(path, as_json(state))
        self.groups.saved(state)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            state = {**json.loads(path.read_text())}
            self.groups.restore(state)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataSourceError(f"{path} is not a saved state: {format_exception(error)}") from error
        return state

    # -- its end ------------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread, and the runner of this process; waiting calls raise. Safe to call twice."""
        if self._connection is not None:
            self._connection.stop()
        self.groups.stop(timeout_s)

    close = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
