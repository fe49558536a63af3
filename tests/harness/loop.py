"""A whole loop around a scripted engine: real store, runner, data source and HTTP; the model and the trainer are
scripted."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from agl_slime import SGLangLitAgent
from agl_slime.data.policy import MinimumViableGroup
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.events import Event, IterationFinished, RolloutFinished, RunFinished
from agl_slime.loop.online import OnlineRLLoop
from agl_slime.loop.settings import LoopSettings
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore
from agl_slime.types import Sample
from tests.harness.engine_faults import answering
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import QUICK, ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

SMALL = {"num_iterations": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_timeout_s": 60.0}
SMALL |= {"max_replaced_groups": 0, "failure_patience_s": 0}
# waits for every member of a group, so that all failures are counted
PATIENT = DataSourceSettings(get_timeout_s=60, policy=MinimumViableGroup(drop_early=False))
_ARGUMENTS = {"sync": "weight_sync_fn", "save": "save_fn"}
_ARGUMENTS |= {name: name for name in ("start", "val_llm", "val_sync_fn", "val_tasks")}
TASKS = [{"prompt": f"say hello to {name}", "name": name} for name in ("Ada", "Alan", "Grace", "Edsger")]


class HelloAgent(SGLangLitAgent):
    """One turn; a reward of 1. ``judge`` replaces the reward."""

    def __init__(self, *, judge: Callable[[dict[str, Any], str], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**{"tokenizer": small_tokenizer(), "client_settings": QUICK, **kwargs})
        self._judge = judge

    def compute_reward(self, task: dict[str, Any], response: str) -> Any:
        return self._judge(task, response) if self._judge is not None else 1.0


class Recorder:
    """An observer that keeps the events, and passes them to ``on_event``."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.closed = 0
        self._on_event = on_event

    def handle(self, event: Event) -> None:
        self.events.append(event)
        if self._on_event is not None:
            self._on_event(event)

    def close(self) -> None:
        self.closed += 1

    def events_of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [dict(event.metrics) for event in self.events_of(IterationFinished)]

    @property
    def rollouts(self) -> list[RolloutFinished]:
        return self.events_of(RolloutFinished)

    @property
    def end(self) -> RunFinished:
        [event] = self.events_of(RunFinished)
        return event


class Trainer:
    """Takes the samples of each iteration and keeps them."""

    def __init__(self, source: GroupSource, *, n: int) -> None:
        self._source = source
        self._n = n
        self.batches: list[list[list[Sample]]] = []

    def __call__(self, iteration: int) -> dict[str, float]:
        self.batches.append(self._source.get_samples(self._n))
        return {"train/loss": 0.5}


class LoopCase:
    """A loop that is ready to run, and the events of it."""

    def __init__(
        self,
        *,
        agent: Any,
        url: str,
        model: str = "scripted",
        store: LightningStore | None = None,
        train: Callable[[int], Any] | None = None,
        tasks: Any = None,
        source_settings: DataSourceSettings = PATIENT,
        source: GroupSource | None = None,
        max_concurrent: int = 64,
        on_event: Callable[[Event], None] | None = None,
        runners: RunnerPlan | None = None,
        **options: Any,
    ) -> None:
        """``options`` are fields of ``LoopSettings`` and the arguments of the loop in ``_ARGUMENTS``."""
        arguments = {_ARGUMENTS[name]: options.pop(name) for name in _ARGUMENTS.keys() & options.keys()}
        runner = RunnerSettings(max_concurrent=max_concurrent, poll_interval_s=0.01, heartbeat_interval_s=0)
        self.settings = LoopSettings(**{**SMALL, **options})
        if source is None:
            store = store if store is not None else BridgeStore()
            source = GroupSource(store=store, tokenizer=small_tokenizer(), settings=source_settings)
        assert source._store is not None
        self.source, self.store = source, source._store if store is None else store
        self.trainer = Trainer(self.source, n=self.settings.rollout_batch_size)
        self.recorder = Recorder(on_event)
        try:
            self.loop = OnlineRLLoop(
                store=self.store,
                agent=agent,
                tasks=tasks if tasks is not None else TASKS,
                llm=LLM(endpoint=url, model=model, sampling_parameters={"max_new_tokens": 8, "temperature": 1.0}),
                data_source=self.source,
                slime_train_fn=train or self.trainer,
                settings=self.settings,
                runners=runners or RunnerPlan(settings=runner),
                observer=self.recorder,
                **arguments,
            )
        except Exception:
            self.source.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.stop()

    @property
    def reasons(self) -> dict[str, int]:
        """``rollout/failed/<reason>`` of the last iteration."""
        counts = self.recorder.metrics[-1].items()
        prefix = "rollout/failed/"
        return {name.removeprefix(prefix): count for name, count in counts if name.startswith(prefix)}

    def check_ledger(self) -> None:
        """Every rollout has had exactly one end, and nothing is kept of it."""
        counts = self.source.ledger.counts()
        assert counts.opened == sum(counts.closed.values())
        assert (counts.open, counts.ready) == (0, 0)
        if self.recorder.end.reason == "finished":
            assert (self.loop._schedule._numbers, self.source.ingestor.on_end) == ({}, {})


@contextmanager
def hello_engine(**kwargs: Any) -> Iterator[ScriptedEngine]:
    """An engine in another thread that answers each prompt with "hello"."""
    tokenizer = small_tokenizer()
    eos = tokenizer.eos_token_id
    assert isinstance(eos, int)
    words = tokenizer.encode("hello", add_special_tokens=False)
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "eos_id": eos,
        "next_id": answering(words, end_id=eos),
        "decode": lambda ids: tokenizer.decode(list(ids)),
    }
    with in_thread(ScriptedEngine(**{**settings, **kwargs})) as engine:
        yield engine


def threads_of_ours() -> list[str]:
    """Names of the package's live threads; the pool's stay for the next run."""
    ours = ("agl-slime-runner", "agl-slime-datasource")
    return [thread.name for thread in threading.enumerate() if thread.name in ours]
