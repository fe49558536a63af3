"""``MegatronTrainRayActor`` of slime, in a process whose torch answers for CUDA. Ray's workers import this module."""

# ruff: noqa: E402
from __future__ import annotations

import gc
from types import SimpleNamespace

from agl_slime.tools.rehearse.megatron.cuda import install

install()

import numpy as np
from slime.backends.megatron_utils import actor, initialize

initialize.np = SimpleNamespace(__version__="1.26.4", random=np.random)  # init asserts NumPy 1, and uses the seed


class MegatronTrainRayActor(actor.MegatronTrainRayActor):
    """slime's class: only the module's import differs."""


gc.freeze()  # slime collects garbage per micro-batch: without the imports' million objects
