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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError, TrainerError
from agl_slime.slime.versions import INSTALL_SLIME, load_by_path, logging_function, periodic_action

logger = logging.getLogger(__name__)

_HOOKS = "agl_slime.slime_hooks"
# What makes slime take its rollouts from here; flags of the person who starts the run come after these and win.
HOOK_FLAGS = (
    *("--data-source-path", "agl_slime.AGLDataSource"),
    *("--rollout-function-path", f"{_HOOKS}.generate_rollout"),
    *("--custom-reward-post-process-path", f"{_HOOKS}.normalize_rewards"),
    *("--custom-rollout-log-function-path", f"{_HOOKS}.log_rollout"),
    *("--custom-eval-rollout-log-function-path", f"{_HOOKS}.log_eval_rollout"),
)


def require_slime() -> None:
    """Raise ``MissingDependencyError`` with one sentence when slime or what it runs on is not installed."""
    if (
        importlib.util.find_spec("slime") is None or importlib.util.find_spec("slime.ray") is None
    ):  # on PyPI, "slime" is an empty package
        raise MissingDependencyError(INSTALL_SLIME)
    for module in ("ray", "torch"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"--trainer slime needs {module}: install slime's requirements, as its installation guide says"
            )


@dataclass(frozen=True, kw_only=True)
class SlimeRunSettings:
    """What the loop decides for slime. ``engine_urls``: engines that run already; empty when slime launches its own.

    ``router``: host and port of the router that agents use; slime registers its engines there. Without a host slime
    launches it at that port.
    """

    model: str
    num_rollout: int
    rollout_batch_size: int
    n_samples_per_prompt: int
    temperature: float
    max_new_tokens: int
    actor_num_nodes: int = 1
    actor_num_gpus_per_node: int = 1
    rollout_num_gpus: int = 0
    engine_urls: tuple[str, ...] = ()
    router: tuple[str | None, int] | None = None

    def flags(self) -> list[str]:
        """slime's flags for these settings."""
        flags = [
            *("--hf-checkpoint", self.model),
            *("--num-rollout", str(self.num_rollout)),
            *("--rollout-batch-size", str(self.rollout_batch_size)),
            *("--n-samples-per-prompt", str(self.n_samples_per_prompt)),
            *("--global-batch-size", str(self.rollout_batch_size * self.n_samples_per_prompt)),
            *("--rollout-temperature", str(self.temperature)),
            *("--rollout-max-response-len", str(self.max_new_tokens)),
            *("--actor-num-nodes", str(self.actor_num_nodes)),
            *("--actor-num-gpus-per-node", str(self.actor_num_gpus_per_node)),
            *("--advantage-estimator", "grpo"),
            *HOOK_FLAGS,
        ]
        if self.engine_urls:
            flags += ["--rollout-external-engine-addrs", *(url.removeprefix("http://") for url in self.engine_urls)]
        else:
            flags += ["--rollout-num-gpus", str(self.rollout_num_gpus)]
        if self.router is not None:
            host, port = self.router
            flags += [*(("--sglang-router-ip", host) if host else ()), "--sglang-router-port", str(port)]
        return flags


def parse_slime_args(flags: Sequence[str]) -> Any:
    """slime's own ``parse_args`` on ``flags``. Raises ``ConfigError`` when it refuses them."""
    require_slime()
    try:
        from slime.utils.arguments import parse_args  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingDependencyError(
            f"slime is installed, but not what it needs here ({error}); follow its installation guide"
        ) from error
    with _command_line(["train.py", *flags]):
        try:
            return parse_args()
        except ImportError as error:
            raise MissingDependencyError(
                f"slime is installed, but not what it needs here ({error}); follow its installation guide"
            ) from error
        except SystemExit as error:
            raise ConfigError("slime does not take its flags (after --); its own message is above") from error
        except (AssertionError, ValueError) as error:
            raise ConfigError(f"slime does not take its flags (after --): {error}") from error


class SlimeTrainer:
    """Drives slime's manager and actors. The methods block and belong in a thread; they must not run at the same time
    as one another.

    Args:
        args: what ``parse_slime_args`` returned, with ``agl_store_url`` (and ``agl_store_token``) set.
        actor_cls: in place of slime's Megatron actor; ``args.agl_actor_cls`` names one by path.
    """

    def __init__(self, *, args: Any, actor_cls: type | None = None) -> None:
        self.args = args
        path = getattr(args, "agl_actor_cls", None)
        self._actor_cls = actor_cls or (load_by_path(path) if path else None)
        self._manager: Any = None
        self._actor: Any = None
        self._critic: Any = None
        self._per_epoch: int | None = None
        self._started_ray = False
        self._tracking = False
        self.updates = int(getattr(args, "update_weight_start_version", 0) or 0)
        """Weight updates so far, which is the version that slime gives the weights."""

    @property
    def first_rollout_id(self) -> int:
        """Where training goes on, above 0 after a checkpoint was loaded."""
        return int(self.args.start_rollout_id or 0)

    def start(self) -> None:
        """Start Ray where it does not run, slime's manager and its actors, and bring the start weights to the engines."""
        import ray
        from slime.ray.placement_group import (  # pyright: ignore[reportMissingImports]
            create_placement_groups,
            create_rollout_manager,
            create_training_models,
        )

        if not ray.is_initialized():
            ray.init()
            self._started_ray = True
        logging_function("configure_logger")()
        groups = create_placement_groups(self.args)
        logging_function("init_tracking")(self.args)
        self._tracking = True
        self._manager, self._per_epoch = create_rollout_manager(self.args, groups["rollout"])
        options = {} if self._actor_cls is None else {"actor_cls": self._actor_cls}
        self._actor, self._critic = create_training_models(self.args, groups, self._manager, **options)
        if self.args.offload_rollout:
            ray.get(self._manager.onload_weights.remote())
        self._push()
        if self.args.offload_rollout:
            ray.get(self._manager.onload_kv.remote())

    def train(self, rollout_id: int) -> int:
        """Take the next batch of groups in the manager's process and train on it; save when slime's ``--save-interval``
        says so.

        Returns the tokens under the loss mask in what reached the actors.
        """
        import ray

        args = self.args
        data = ray.get(self._manager.generate.remote(rollout_id))
        # counted where the data lies: bringing a batch to the driver for a number would be dear
        count = ray.remote(num_cpus=0)(_tokens_under_mask)
        tokens = [count.remote(box.inner) for box in data]
        if args.offload_rollout:
            ray.get(self._manager.offload.remote())
        actor_trains = not args.use_critic or rollout_id >= args.num_critic_only_steps
        if args.use_critic:
            values = self._critic.async_train(rollout_id, data)
            ray.get(self._actor.async_train(rollout_id, data, external_data=values) if actor_trains else values)
        else:
            ray.get(self._actor.async_train(rollout_id, data))
        if periodic_action(rollout_id, args.save_interval, self._per_epoch, args.num_rollout):
            self.save(rollout_id, actor_trained=actor_trains)
        if not args.offload_train:
            (self._actor if actor_trains else self._critic).clear_memory()
        return sum(ray.get(tokens))

    def update_weights(self) -> str:
        """Bring the new weights to every engine, the way ``--update-weight-mode`` and ``-transport`` say; returns their
        version."""
        import ray

        if self.args.offload_rollout:
            ray.get(self._manager.onload_weights.remote())
        self._push()
        if self.args.offload_rollout:
            ray.get(self._manager.onload_kv.remote())
        return str(self.updates)

    def save(self, rollout_id: int, *, actor_trained: bool = True) -> None:
        """Write slime's checkpoint of this step and the data source's state beside it."""
        import ray

        last = rollout_id == self.args.num_rollout - 1
        if actor_trained:
            self._actor.save_model(rollout_id, force_sync=last)
        if self._critic is not None:
            self._critic.save_model(rollout_id, force_sync=last)
        if self.args.rollout_global_dataset:
            ray.get(self._manager.save.remote(rollout_id))

    def stop(self) -> None:
        """End the manager, and Ray if ``start`` started it. Safe to call in any state."""
        if "ray" not in sys.modules:
            return
        import ray

        if self._manager is not None:
            manager, self._manager = self._manager, None
            try:
                ray.get(manager.dispose.remote(), timeout=10)
            except Exception as error:
                # the run is over, and the manager may be what ended it
                logger.warning("slime's rollout manager did not end in good order: %s", error)
            ray.kill(manager)
        if self._tracking:
            logging_function("finish_tracking")(self.args)
            self._tracking = False
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def _push(self) -> None:
        if self._actor is None:
            raise TrainerError("slime's actors have not been started: call start() first.")
        self._actor.update_weights()
        self.updates += 1


def _tokens_under_mask(rank_data: dict[str, Any]) -> int:
    return sum(int(sum(mask)) for mask in rank_data["loss_masks"])


@contextmanager
def _command_line(argv: list[str]) -> Any:
    # slime and Megatron parse sys.argv and nothing else
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before
