"""``SlimeAlgorithm``: online RL for users of ``agentlightning.Trainer``.

    trainer = agl.Trainer(algorithm=SlimeAlgorithm(model_path=…, sglang_url=…), store=agl_slime.BridgeStore(), n_runners=8)
    trainer.fit(agent, train_dataset, val_dataset=val_dataset)

The agent is any LitAgent, unchanged; it finds the model under training as the resource ``main_llm``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agl_slime.errors import ConfigError
from agl_slime.loop.settings import RunResult
from agl_slime.run.local import run_training
from agl_slime.run.parts import GivenParts
from agl_slime.run.settings import TrainConfig
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import Algorithm, LightningStore

# Fields of TrainConfig that the data sets and the Trainer decide.
_NOT_OURS = frozenset({"agent", "tasks", "eval_tasks", "max_concurrent", "model_path", "sglang_url", "trainer"})


class SlimeAlgorithm(Algorithm):
    """Trains the policy that the agents talk to: with slime, or with the local trainer (``trainer="local"``), which
    needs neither Ray nor a GPU.

    Args:
        model_path: Hugging Face checkpoint that the policy starts from.
        sglang_url: SGLang server or router; without it the local trainer starts an embedded engine, and slime launches
            engines of its own.
        trainer: ``"slime"`` or ``"local"``.
        slime_flags: slime's own command-line flags, for ``trainer="slime"``.
        settings: any other field of ``agl_slime.run.settings.TrainConfig``: ``num_iterations``, ``rollout_batch_size``,
            ``n_samples_per_prompt``, ``temperature``, ``eval_interval``, ``output_dir`` …

    With ``trainer="slime"`` the Trainer needs ``store=agl_slime.BridgeStore()``, which slime's manager reaches over
    HTTP; with any store it is what tells of finished rollouts at once, where others are asked about those in flight.
    """

    def __init__(
        self,
        *,
        model_path: str | Path,
        sglang_url: str | None = None,
        trainer: str = "slime",
        slime_flags: Sequence[str] = (),
        console: Console | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        known = set(TrainConfig.__dataclass_fields__) - _NOT_OURS
        if unknown := sorted(set(settings) - known):
            raise ConfigError(
                f"SlimeAlgorithm has no setting {unknown[0]!r}; the settings are {', '.join(sorted(known))}"
            )
        if trainer not in ("slime", "local"):
            raise ConfigError(f"trainer must be 'slime' or 'local', got {trainer!r}")
        self.config = TrainConfig(model_path=Path(model_path), sglang_url=sglang_url, trainer=trainer, **settings)  # type: ignore[arg-type]
        self.slime_flags = tuple(slime_flags)
        self.result: RunResult | None = None
        """What the run came to, once it has ended."""
        self._console = console

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        """Called by ``Trainer.fit``. Raises ``AglSlimeError`` with one sentence when the run cannot start or go on."""
        tasks = _tasks(train_dataset, name="train_dataset")
        val_tasks = _tasks(val_dataset, name="val_dataset") if val_dataset is not None else None
        config = self.config if val_tasks is not None else replace(self.config, eval_interval=0)
        resources = dict(self.get_initial_resources() or {})
        given = GivenParts(store=in_process(self.get_store()), tasks=tasks, val_tasks=val_tasks, resources=resources)
        self.result = await run_training(config, slime_flags=self.slime_flags, given=given, console=self._console)


def in_process(store: LightningStore) -> LightningStore:
    """The ``BridgeStore`` inside the wrapper that an execution strategy put around it; the wrapper itself when there is
    none."""
    inner: Any = store
    for _ in range(4):
        if isinstance(inner, BridgeStore):
            return inner
        inner = getattr(inner, "store", None)
    return store


def _tasks(dataset: Any, *, name: str) -> list[Any]:
    """Agent Lightning's data sets have a length and are indexed; nothing else is asked of them."""
    if dataset is None or len(dataset) == 0:
        raise ConfigError(f"{name} is empty; fit() needs at least one task")
    return [dataset[i] for i in range(len(dataset))]


__all__ = ["SlimeAlgorithm"]
