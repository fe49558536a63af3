"""slime as the trainer of an ``OnlineRLLoop``: its placement groups, RolloutManager and actors, made by its own
functions.

slime's own loop is not used here (``examples/slime`` shows that way round): the loop collects, then asks the manager
for the batch, the actors for a step, and the actors for a weight update. The manager's process takes the rollouts from
the loop's store over HTTP.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError, TrainerError
from agl_slime.slime.versions import INSTALL_SLIME, logging_function

logger = logging.getLogger(__name__)


def require_slime() -> None:
    """Raise ``MissingDependencyError`` with one sentence when slime or what it runs on is not installed."""
    # on PyPI, "slime" is an empty package
    if importlib.util.find_spec("slime") is None or importlib.util.find_spec("slime.ray") is None:
        raise MissingDependencyError(INSTALL_SLIME)
    for module in ("ray", "torch"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"--trainer slime needs {module}: install what slime's installation guide says"
            )


def parse_slime_args(flags: Sequence[str]) -> Any:
    """slime's own ``parse_args`` on ``flags``. Raises ``ConfigError`` when it refuses them."""
    require_slime()
    before, sys.argv = sys.argv, ["train.py", *flags]  # slime and Megatron parse sys.argv and nothing else
    try:
        from slime.utils.arguments import parse_args  # pyright: ignore[reportMissingImports]

        return parse_args()
    except ImportError as error:
        raise MissingDependencyError(f"slime needs what is not installed ({error}): follow its guide") from error
    except SystemExit as error:
        raise ConfigError("slime does not take its flags (after --); its own message is above") from error
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"slime does not take its flags (after --): {error}") from error
    finally:
        sys.argv = before


class SlimeTrainer:
    """Drives slime's manager and actors. The methods block and belong in a thread; they must not run at the same time
    as one another.

    ``args`` is what ``parse_slime_args`` returned, with ``agl_store_url`` (and ``agl_store_token``) set, and
    ``agl_actor_cls`` where an actor takes the place of slime's Megatron one, named by its path.
    """

    def __init__(self, *, args: Any) -> None:
        self.args = args
        self._manager: Any = None
        self._actor: Any = None
        self._critic: Any = None
        self._per_epoch: int | None = None
        self._cleanup = ExitStack()
        self.saved: int | None = None
        """The last rollout id of which a checkpoint was written."""
        self.updates = int(getattr(args, "update_weight_start_version", 0) or 0)
        """Weight updates so far, which is the version that slime gives the weights."""

    @property
    def first_rollout_id(self) -> int:
        """Where training goes on, above 0 after a checkpoint was loaded; known after ``start``."""
        return int(self.args.start_rollout_id or 0)

    def start(self) -> None:
        """Start Ray where it does not run, slime's manager and its actors, and bring the weights to the engines."""
        import ray
        from slime.ray.placement_group import (  # pyright: ignore[reportMissingImports]
            create_placement_groups,
            create_rollout_manager,
            create_training_models,
        )

        actor = getattr(self.args, "agl_actor_cls", None)
        options = {"actor_cls": resolve_name(actor)} if actor else {}
        if not ray.is_initialized():
            ray.init()
            self._cleanup.callback(ray.shutdown)
        logging_function("configure_logger")()
        groups = create_placement_groups(self.args)
        logging_function("init_tracking")(self.args)
        self._cleanup.callback(logging_function("finish_tracking"), self.args)
        self._manager, self._per_epoch = create_rollout_manager(self.args, groups["rollout"])
        self._cleanup.callback(self._end_manager)
        self._actor, self._critic = create_training_models(self.args, groups, self._manager, **options)
        self.update_weights()

    def train(self, rollout_id: int) -> int:
        """Take the next batch of groups in the manager's process and train on it; save when slime's ``--save-interval``
        says so. Returns the tokens under the loss mask in what reached the actors."""
        import ray
        from slime.utils.misc import should_run_periodic_action  # pyright: ignore[reportMissingImports]

        args = self.args
        data = ray.get(self._manager.generate.remote(rollout_id))
        # counted where the data lies: bringing a batch to the driver for a number would be dear
        count = ray.remote(num_cpus=0)(_tokens_under_mask)
        tokens = [count.remote(box.inner) for box in data]
        if args.offload_rollout:
            ray.get(self._manager.offload.remote())
        actor_trains = not args.use_critic or rollout_id >= args.num_critic_only_steps
        values: Any = self._critic.async_train(rollout_id, data) if args.use_critic else None
        if actor_trains:
            external = {"external_data": values} if args.use_critic else {}
            values = self._actor.async_train(rollout_id, data, **external)
        ray.get(values)
        if should_run_periodic_action(rollout_id, args.save_interval, self._per_epoch, args.num_rollout):
            for model in [self._actor] * actor_trains + [self._critic] * bool(args.use_critic):
                model.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)
            if args.rollout_global_dataset:  # the data source's state, beside the checkpoint
                ray.get(self._manager.save.remote(rollout_id))
            self.saved = rollout_id
        if not args.offload_train:
            (self._actor if actor_trains else self._critic).clear_memory()
        return sum(ray.get(tokens))

    def update_weights(self) -> str:
        """Bring the weights to every engine, the way ``--update-weight-mode`` and ``-transport`` say; returns their
        version."""
        import ray

        if self._actor is None:
            raise TrainerError("slime's actors have not been started: call start() first.")
        if self.args.offload_rollout:
            ray.get(self._manager.onload_weights.remote())
        self._actor.update_weights()
        self.updates += 1
        if self.args.offload_rollout:
            ray.get(self._manager.onload_kv.remote())
        return str(self.updates)

    def stop(self) -> None:
        """End the manager, and Ray if ``start`` started it. Safe to call in any state."""
        self._cleanup.close()

    def _end_manager(self) -> None:
        import ray

        try:
            ray.get(self._manager.dispose.remote(), timeout=10)
        except Exception as error:
            # the run is over, and the manager may be what ended it
            logger.warning("slime's rollout manager did not end in good order: %s", error)
        ray.kill(self._manager)


def _tokens_under_mask(rank_data: dict[str, Any]) -> int:
    return sum(int(sum(mask)) for mask in rank_data["loss_masks"])
