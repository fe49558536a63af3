"""Names of 0.1's first layout that a user may have written: they go on working in this version, with a warning that
names the new place.

An old module that is gone is imported as one that looks each name up in the rooms where its contents went. Where a room
has taken an old module's name (``agl_slime.loop``), the room's ``__init__`` does the same by ``names_from``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OLD_MODULES = {
    f"agl_slime.{old}": [f"agl_slime.{home}" for home in homes.split()]
    for old, homes in {
        "_agl": "support.agl",
        "algorithm": "run.algorithm",
        "buffer.discovery": "buffer.runs",
        "buffer.errors": "errors",
        "buffer.generators.work": "buffer.client",
        "checkpoint": "loop.checkpoint",
        "collector": "datasource.read",
        "config": "run.settings",
        "groups.database": "support.database",
        "groups.filters": "groups.policy",
        "groups.ledger_disk": "groups.ledger",
        "groups.outcome": "groups.results",
        "groups.pipeline": "buffer.pipeline buffer.settings",
        "groups.stages": "buffer.stages",
        "loading": "rollout.loading",
        "report.rundir": "report.files",
        "report.standard": "report.reporters",
        "report.tensorboard": "report.metrics",
        "rollout.api_multi_turn": "rollout.batched.api_multi_turn",
        "rollout.configure": "rollout.loading",
        "rollout.context": "tokens.conversation",
        "rollout.facts": "rollout.session",
        "rollout.loss_scale": "rollout.outcome",
        "rollout.multi_turn": "rollout.batched.multi_turn",
        "rollout.reward": "rollout.outcome",
        "rollout.sampler": "rollout.batched.sampler",
        "rollout.samples": "rollout.batched.samples",
        "rollout.stop": "rollout.scheduler rollout.session",
        "rollout.template": "tokens.template",
        "runner.garbage": "runner.process",
        "runner.plan": "runner.base",
        "runner.pools": "runner runner.base runner.processes",
        "runner.ray_pool": "runner.ray",
        "sglang.embedded": "engine demo",
        "sglang.embedded.demos": "demo.formats",
        "sglang.embedded.policy": "demo.policy demo.tokenizer",
        "sglang.embedded.process": "engine.process",
        "sglang.embedded.server": "engine.server",
        "sglang.embedded.tokenizer": "demo.tokenizer",
        "sglang.payloads": "sglang.generation",
        "slime.settings": "slime.args",
        "slime.single": "slime.generate",
        "store_batch": "store.client store.server",
        "store_feed": "store.feed store.client store.server",
        "tasks": "loop.tasks",
        "threads": "support.threads",
        "tokenizer": "tokens.tokenizer",
        "trace.codec": "tokens.codec",
        "trace.forks": "tokens.forks",
        "trace.mask_generators": "tokens.masks",
        "trace.masks": "tokens.masks",
        "trainers.batch": "trainers.local.batch",
        "trainers.loss": "trainers.local.loss",
        "trainers.model": "trainers.local.model",
        "trainers.settings": "trainers.local.settings",
        "trainers.slime": "slime.trainer",
        "training_run": "run.local run.parts",
    }.items()
}
"""Old module: where its names are looked for, in this order."""
_RENAMED = {"PersistentLedger": "Ledger", "RolloutFacts": "RolloutStats", "GivenParts": "RunParts"}


def names_from(module: str, *homes: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that finds old names in ``homes``. Raises ``AttributeError`` where none has it."""

    def get(name: str) -> Any:
        if not name.startswith("__"):
            for home in homes:
                new = _RENAMED.get(name, name)
                found = getattr(import_module(home), new, None)
                if found is not None:
                    place = getattr(found, "__module__", home)  # and not a room that only imports it
                    text = f"{module}.{name} is now {place}.{new}; the old name goes with the next version"
                    warnings.warn(text, FutureWarning, stacklevel=2)
                    return found
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


class _MovedModules(MetaPathFinder, Loader):
    """Asked last, so only for what is nowhere else."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in _OLD_MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = names_from(module.__name__, *_OLD_MODULES[module.__name__])  # type: ignore[method-assign]


def install() -> None:
    """Called once, by ``agl_slime/__init__``."""
    sys.meta_path.append(_MovedModules())


__all__ = ["install", "names_from"]
