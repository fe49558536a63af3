"""``AGLDataSource``, the data source that slime's RolloutManager builds from ``args``: it enqueues tasks on request,
runs evaluations, and is saved and loaded with slime's checkpoints."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from agl_slime.data.ledger import Ledger
from agl_slime.data.results import rollout_of
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.data.teacher import TeacherError, Teachers
from agl_slime.errors import ConfigError, DataSourceError, format_exception
from agl_slime.store.client import RemoteStore
from agl_slime.support.agl import LightningStore
from agl_slime.support.files import write_file
from agl_slime.support.threads import run_blocking
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.connection import Connection
from agl_slime.train.slime.flags import evaluates, warn_of_flags
from agl_slime.train.slime.hooks import credits_tokens
from agl_slime.train.slime.producer import NO_EVALUATION, TaskProducer
from agl_slime.train.slime.replay import in_slimes_form
from agl_slime.train.slime.staleness import StalenessController
from agl_slime.types import DataSource, Sample, flat_samples, sample_from_json, sample_to_json

logger = logging.getLogger(__name__)


class AGLDataSource(DataSource):
    """Groups of Samples from Agent Lightning rollouts, for slime's RolloutManager or any trainer.

    slime builds it as ``AGLDataSource(args)``, with the settings of ``agl_slime.train.slime.args``. If these name
    tasks, it enqueues as many groups as slime requests, or as ``agl_max_staleness`` admits, and replaces dropped
    groups. A program builds it as ``AGLDataSource(store=…, tokenizer=…, args=…, n_samples_per_prompt=…)``; a program
    that enqueues rollouts itself announces them to ``groups``, a ``GroupSource``. ``stop`` ends its thread."""

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
            logger.warning("AGLDataSource has no store and returns placeholders: set agl_store_url or agl_agent")
        self._producer: TaskProducer | None = None
        teachers: Teachers | None = None
        if plugin is not None and connection is not None:
            warn_of_flags(args)
            if getattr(args, "eval_interval", None) and evaluates(args) and not connection.evals:
                raise DataSourceError(f"--eval-interval {args.eval_interval}: {NO_EVALUATION}")
            store, tokenizer = connection.store, tokenizer or connection.tokenizer()
            teachers = connection.teachers
            if teachers is not None and tokenizer is not None:
                run_blocking(check_once(teachers, tokenizer))
            settings = settings or connection.data_source_settings()
            self._producer = TaskProducer(connection, StalenessController.from_settings(plugin, args, connection.tasks))
        self._loaded = False
        # slime with --save and without --save-interval never saves
        self._saves = None not in (getattr(args, "save", None), getattr(args, "save_interval", None))
        self._after_batch: dict[int, dict[str, Any]] = {}
        self._delivery: dict[str, Any] = {}
        durable = getattr(args, "rollout_data_transport", None) == "straw"
        self._delivery_path = Path(args.rollout_data_dir) / "agl_datasource.json" if durable else None
        self._tokenizer = tokenizer
        # a loop in another process counts groups as well: there a teacher's failure may not make one incomplete
        self._teachers = teachers
        self._score_late = plugin is not None and plugin.store_url is not None
        self.groups = GroupSource(
            store=store,
            tokenizer=tokenizer,
            n_samples_per_prompt=n_samples_per_prompt or getattr(args, "n_samples_per_prompt", None) or 1,
            settings=settings,
            ledger=ledger,
            reward_key=getattr(args, "reward_key", None),
            reward_spans=credits_tokens(args),
            convert_validation=connection is not None,
            hold=self._saves,
            producer=self._producer,
            replay_files=connection.replay_files if connection is not None else None,
            removes_replay=not getattr(args, "agl_replay_kept", False),
            annotate=teachers if not self._score_late else None,
        )
        if connection is not None:
            connection.start()

    # -- calls by slime -----------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups; see ``GroupSource.get_samples``."""
        if self._producer is not None:
            self._producer.begin_unnumbered(getattr(self._args, "start_rollout_id", None) or 0)
            blocking = self.groups.settings.blocking
            self._producer.request(
                (None if blocking else getattr(self._args, "rollout_batch_size", None)) or num_samples
            )
        groups = self.groups.get_samples(num_samples)
        if self._teachers is not None and self._score_late:
            run_blocking(score_delivered(groups, self._teachers))
        return [*in_slimes_form(groups, self._tokenizer)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back; they are delivered again before newer ones."""
        self.groups.add_samples(samples)

    def reject(self, samples: Sequence[Sequence[Sample]], reason: str) -> None:
        """Count delivered groups as filtered for ``reason`` and not as trained."""
        self.groups.reject(samples, reason)
        if self._producer is not None:
            self._producer.reject(len(samples))

    def demand(self, groups: int) -> None:
        """Request that this number of groups be ready or in flight, if this data source enqueues tasks; returns at
        once. Also starts to follow or scan the store; a saved state can be loaded before this call only."""
        if self._producer is not None:
            self._producer.request(groups)
        else:
            self.groups.follower.begin()

    def begin_rollout(self, rollout_id: int) -> None:
        """Note that slime requests the groups of this rollout, by which ``agl_max_staleness`` counts steps. With
        ``agl_planned``, deliver next the groups that another process has planned for it."""
        store = self._connection.store if self._connection is not None else None
        if getattr(self._args, "agl_planned", False) and isinstance(store, RemoteStore):
            self.groups.reserve_whole(run_blocking(store.planned(rollout_id)))
        if self._producer is not None:
            self._producer.begin_rollout(rollout_id)

    def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """Run the evaluation rollouts; returns slime's evaluation data, with an entry per successful rollout of each
        data set. Raises ``DataSourceError`` without evaluation tasks, when all rollouts failed, or at the deadline."""
        if self._producer is None:
            raise DataSourceError("there are no evaluation tasks: set agl_store_url or agl_agent")
        return self._producer.evaluate(rollout_id)

    def metrics(self) -> dict[str, float]:
        """The metrics ``agl/…``: rollouts in flight, ready groups, and outcomes since the start."""
        return self.groups.metrics()

    def __len__(self) -> int:
        """The tasks per epoch, if tasks come from a file (slime computes ``--num-epoch`` from it); else the number of
        ready groups."""
        epoch = self._connection.epoch_size if self._connection is not None else None
        return len(self.groups) if epoch is None else epoch

    # -- saved states -------------------------------------------------------------------------------------------------

    def save(self, rollout_id: Any) -> None:
        """Write the state of this step beside slime's checkpoint (``args.save``), unless ``keep_batch`` has."""
        if (state := self._after_batch.pop(rollout_id, None)) is not None:
            self.groups.saved(state)
        elif (directory := getattr(self._args, "save", None)) is not None:
            self._write(state_path(directory, rollout_id), self.groups.state())

    def load(self, rollout_id: Any = None) -> None:
        """Restore the state of this step (``args.load``), if there is one."""
        self._loaded = True
        if self._delivery_path is not None:
            self._delivery_path.unlink(missing_ok=True)
        directory = getattr(self._args, "load", None)
        if directory is not None and (path := state_path(directory, rollout_id)).exists():
            self._read(path)

    def state_dict(self) -> dict[str, Any]:
        """The state, as JSON values, for the journal of main's RolloutManager."""
        state = self.groups.state()
        self.groups.saved(state)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``, in a manager that takes over the journal of a dead one."""
        self.groups.restore({**state})

    def kept_batch(self, rollout_id: int) -> list[list[Sample]] | None:
        """The batch of this step, if an earlier manager saved it by ``keep_batch`` and died before slime knew that the
        queue has it. The first call restores the earlier manager's state, unless slime has called ``load``."""
        if (path := self._delivery_path) is None:
            return None
        if not self._loaded and path.exists():
            self._delivery = self._read(path)["delivery"]
        self._loaded = True
        return self._batch() if self._delivery.get("rollout_id") == rollout_id else None

    def keep_batch(self, rollout_id: int, groups: list[list[Sample]]) -> list[list[Sample]]:
        """Write the state after a batch already now: slime calls ``save`` once its own checkpoint is complete, and
        under ``train_async.py`` when the next batch is delivered, too.

        Under straw, whose queue is durable, save the batch as well, before the queue receives it: slime restores only
        its own data source. A restarted manager returns the same batch for the same step, which the queue recognises; a
        request for the next step means that the queue has this one. Returns the groups as they will be read back."""
        if self._saves:
            self._after_batch[rollout_id] = state = self.groups.state()
            write_file(state_path(self._args.save, rollout_id), as_json(state))
            for step in [step for step in self._after_batch if step < rollout_id - 1]:  # which slime did not save
                del self._after_batch[step]
                state_path(self._args.save, step).unlink(missing_ok=True)
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
        return [*in_slimes_form(groups, self._tokenizer)]

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

    # -- stop ---------------------------------------------------------------------------------------------------------

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and this process's runner; waiting calls raise. Safe to call twice."""
        if self._connection is not None:
            self._connection.stop()
        self.groups.stop(timeout_s)
        if self._teachers is not None:
            run_blocking(self._teachers.aclose())

    close = stop

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def state_path(directory: str | Path, rollout_id: Any) -> Path:
    """The file of a data source's state, under ``rollout/`` of the checkpoint directory, as slime's own."""
    return Path(directory) / "rollout" / f"agl_datasource_{rollout_id}.json"


def as_json(state: dict[str, Any]) -> str:
    try:
        return json.dumps(state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataSourceError(f"a sample's metadata is not JSON ({error}); keep plain values in it") from error


async def check_once(teachers: Teachers, tokenizer: Any) -> None:
    """``teachers.check`` on an event loop that ends afterwards. Raises ``ConfigError`` and ``EngineError``."""
    async with teachers:
        await teachers.check(tokenizer)


async def score_delivered(groups: Sequence[Sequence[Sample]], teachers: Teachers) -> None:
    """Score the samples of groups that another process counts as complete: a rollout that the teacher fails on stays in
    its group and out of the loss (``remove_sample``), with its own log-probs in place of the teacher's."""
    rollouts: dict[object, list[Sample]] = {}
    for sample in flat_samples(groups):
        if sample.teacher_log_probs is None:
            rollouts.setdefault(rollout_of(sample) or id(sample), []).append(sample)
    async with teachers:  # the connections are of this event loop, which ends
        results = await asyncio.gather(*map(teachers.score, rollouts.values()), return_exceptions=True)
    for samples, error in zip(rollouts.values(), results, strict=True):
        if isinstance(error, TeacherError):
            logger.warning("Rollout %s is not trained on: %s", rollout_of(samples[0]), error)
            for sample in samples:
                sample.remove_sample = True
                sample.teacher_log_probs = list(sample.rollout_log_probs or [0.0] * sample.response_length)
        elif isinstance(error, BaseException):
            raise error
