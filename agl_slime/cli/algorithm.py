"""``SlimeAlgorithm``: online RL for users of ``agentlightning.Trainer``.

    algorithm = SlimeAlgorithm(model_path=…, sglang_url=…)
    trainer = agl.Trainer(algorithm=algorithm, store=agl_slime.BridgeStore(), n_runners=8)
    trainer.fit(agent, train_dataset, val_dataset=val_dataset)

The agent is any LitAgent, unchanged; it finds the model under training as the resource ``main_llm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from agl_slime.cli.local import run_training
from agl_slime.cli.options import PATHS
from agl_slime.cli.settings import train_config
from agl_slime.cli.wiring import RunInputs
from agl_slime.errors import ConfigError
from agl_slime.loop.settings import LoopSettings, RunResult
from agl_slime.runner.concurrent import ConcurrentRunner
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import Algorithm, LightningStore, otlp_export_misses_store

# Settings of a run that the Trainer or the agent has, and how to give them there.
_SET_ELSEWHERE = {
    "agent": "give it to Trainer.fit",
    "tasks": "give Trainer.fit a train_dataset",
    "eval_tasks": "give Trainer.fit a val_dataset",
    "runners": "give the Trainer n_runners and a strategy",
    "max_concurrent": "give the Trainer a runner, such as ConcurrentRunner",
    "max_turns": "set max_turns of the agent",
    "multi_turn_scheduler": "set scheduler of the agent",
    "external_plugins": "import them where the agent is defined",
}


class SlimeAlgorithm(Algorithm):
    """Trains the policy that the agents talk to: with slime, or with the local trainer (``trainer="local"``), which
    needs neither Ray nor a GPU.

    Args:
        model_path: Hugging Face checkpoint that the policy starts from.
        sglang_url: SGLang server or router; by default the local trainer starts an ``engine`` and slime its own.
        slime_flags: slime's own command-line flags, for ``trainer="slime"``.
        settings: further arguments of ``agl_slime.cli.settings.train_config``; ``store_host`` is the address at which
            slime's manager reaches the store.

    The Trainer's store should be ``agl_slime.BridgeStore()``: slime's manager reaches it over HTTP, and it notifies of
    finished rollouts. Raises ``ConfigError`` for an unknown setting, and for one that the Trainer or the agent has.
    """

    def __init__(
        self,
        *,
        model_path: str | Path,
        sglang_url: str | None = None,
        trainer: Literal["slime", "local"] = "slime",
        slime_flags: Sequence[str] = (),
        console: Console | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        names = [name for name in (*PATHS, "local") if name not in _SET_ELSEWHERE]
        for name in settings.keys() - set(names):
            hint = _SET_ELSEWHERE.get(name, f"the settings are {', '.join(names)}")
            raise ConfigError(f"SlimeAlgorithm has no setting {name!r}: {hint}")
        if trainer not in ("slime", "local"):
            raise ConfigError(f"trainer must be 'slime' or 'local', got {trainer!r}")
        self.config = train_config(model_path=Path(model_path), sglang_url=sglang_url, trainer=trainer, **settings)
        self.slime_flags = tuple(slime_flags)
        self.result: RunResult | None = None
        """The result of the run once it has ended."""
        self._console = console

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Called by ``Trainer.fit``. Raises ``AglSlimeError`` with one sentence when the run cannot start or
        continue."""
        tasks = _tasks(train_dataset, name="train_dataset")
        val_tasks = _tasks(val_dataset, name="val_dataset") if val_dataset is not None else None
        config = self.config
        if val_tasks is None:
            never = replace(config.loop, eval_interval=0, eval_rollouts=LoopSettings().eval_rollouts)
            config = replace(config, loop=never)
        resources = dict(self.get_initial_resources() or {})
        store = _unwrapped(self.get_store())
        # Agent Lightning's runners start no gateway, so the loop's process has one for them
        behind = not isinstance(getattr(self.get_trainer(), "runner", None), ConcurrentRunner)
        self._check_trainer(behind)
        inputs = RunInputs(store=store, tasks=tasks, val_tasks=val_tasks, resources=resources, behind_gateway=behind)
        self.result = await run_training(
            config, slime_flags=self.slime_flags, program_inputs=inputs, console=self._console
        )

    def _check_trainer(self, behind: bool) -> None:
        """Raise ``ConfigError`` for parts of the Trainer that would lose rollouts."""
        if self.get_llm_proxy() is not None:
            raise ConfigError(
                "Trainer(llm_proxy=…) with SlimeAlgorithm: agents use our gateway, which keeps sampled tokens; leave "
                "llm_proxy out"
            )
        if behind and self.get_store().capabilities.get("otlp_traces") and otlp_export_misses_store():
            raise ConfigError(
                "Agent Lightning's runners in separate processes send spans, emitted rewards among them, by "
                "OpenTelemetry's OTLP exporter, which from 1.45 on does not find its store: install "
                "opentelemetry-exporter-otlp-proto-http<1.45, or give the Trainer runner=ConcurrentRunner() or a "
                "SharedMemoryExecutionStrategy"
            )


def _unwrapped(store: LightningStore) -> LightningStore:
    """The ``BridgeStore`` inside the wrappers of an execution strategy; else ``store``."""
    inner: Any = store
    for _ in range(4):
        if isinstance(inner, BridgeStore):
            return inner
        inner = getattr(inner, "store", None)
    return store


def _tasks(dataset: Any, *, name: str) -> list[Any]:
    """The tasks of an Agent Lightning data set, which has a length and an index."""
    if dataset is None or len(dataset) == 0:
        raise ConfigError(f"{name} is empty; fit() needs at least one task")
    return [dataset[i] for i in range(len(dataset))]
