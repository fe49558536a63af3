"""``MegatronTrainRayActor`` of slime, in a process whose torch answers for CUDA. Ray's workers import this module."""

# ruff: noqa: E402
from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from agl_slime.tools.rehearse.megatron.cuda import install

install()

import numpy as np
import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from slime.backends.megatron_utils import actor, initialize

initialize.np = SimpleNamespace(__version__="1.26.4", random=np.random)  # init asserts NumPy 1, and uses the seed
# in float32 a checkpoint is copied into views of the parameters; bf16 has master weights
_load = DistributedOptimizer._set_main_param_and_optimizer_states
DistributedOptimizer._set_main_param_and_optimizer_states = torch.no_grad()(_load)


class MegatronTrainRayActor(actor.MegatronTrainRayActor):
    """slime's class: only the module's import differs."""


class RehearsedActor(MegatronTrainRayActor):
    """Rewards that are all equal, as of random answers, alternate, so that a step has a gradient. Each rank writes its
    optimizer's size at its start and with a checkpoint."""

    def init(self, *args: Any, **named: Any) -> Any:
        first = super().init(*args, **named)
        self._write("loaded")
        return first

    def save_model(self, *args: Any, **named: Any) -> None:
        super().save_model(*args, **named)
        self._write("saved")

    def _write(self, moment: str) -> None:
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        values = [value for part in optimizers for state in part.optimizer.state.values() for value in state.values()]
        size = sum(float(value.abs().sum()) for value in values if torch.is_tensor(value))
        Path(self.args.dump_details, f"{moment}_{self.role}_{self._rank}.json").write_text(json.dumps(size))

    def _get_rollout_data(self, *args: Any, **named: Any) -> Any:
        data = super()._get_rollout_data(*args, **named)
        if not any(data["rewards"]):
            data["rewards"] = [(-1.0) ** index for index in data["sample_indices"]]
        return data


gc.freeze()  # slime collects garbage per micro-batch: without the imports' million objects
