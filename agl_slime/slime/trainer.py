"""slime as the trainer of an ``OnlineRLLoop``: its placement groups, RolloutManager and actors, made by its own
functions.

slime's own loop is not used here (``examples/slime`` shows that way round): the loop collects, then asks the manager
for the batch, the actors for a step, and the actors for a weight update, in the order of slime's own ``train.py``. The
manager's process takes the rollouts from the loop's store over HTTP.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError, TrainerError
from agl_slime.slime.versions import RolloutSide, manager_shape, parse_args
from agl_slime.support.slime import HOOK_NAMES, INSTALL_SLIME, TRAINER_NAMES, find, find_optional, installed


def require_slime() -> None:
    """Raise ``MissingDependencyError`` with one sentence when slime or what it runs on is not installed, or when one of
    the names that the trainer needs is at none of its places."""
    if not installed():
        raise MissingDependencyError(INSTALL_SLIME)
    for module in ("ray", "torch"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(
                f"--trainer slime needs {module}: install what slime's installation guide says"
            )
    for name in {**HOOK_NAMES, **TRAINER_NAMES}:
        find(name)
    manager_shape()


def parse_slime_args(flags: Sequence[str]) -> Any:
    """slime's own ``parse_args`` on ``flags``, its restore plan as the attribute ``agl_restore_plan``. Raises
    ``ConfigError`` when it refuses them."""
    require_slime()
    before, sys.argv = sys.argv, ["train.py", *flags]  # slime and Megatron parse sys.argv and nothing else
    try:
        args, args.agl_restore_plan = parse_args()
        return args
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
        self._side = RolloutSide(args, vars(args).pop("agl_restore_plan", None))
        self._actor: Any = None
        self._critic: Any = None
        self._cleanup = ExitStack()
        self._next: int | None = None
        self.saved: int | None = None
        """The last rollout id of which a checkpoint was written."""
        self.updates = 0
        """Weight updates so far, which is the version that slime gives the weights."""

    @property
    def args(self) -> Any:
        return self._side.args

    @property
    def first_rollout_id(self) -> int:
        """Where training goes on, above 0 after a checkpoint was loaded; known after ``start``."""
        return int(self.args.start_rollout_id or 0)

    @property
    def router_url(self) -> str | None:
        """The router that slime launched or was given, where its driver is told; known after ``start``."""
        host, port = getattr(self.args, "sglang_router_ip", None), getattr(self.args, "sglang_router_port", None)
        return f"http://{host}:{port}" if host and port else None

    def start(self) -> None:
        """Start Ray where it does not run, slime's manager and its actors, and bring the weights to the engines."""
        import ray

        side = self._side
        actor = getattr(self.args, "agl_actor_cls", None)
        options = {"actor_cls": resolve_name(actor)} if actor else {}
        if not ray.is_initialized():
            ray.init()
            self._cleanup.callback(ray.shutdown)
        find("configure_logger")()
        self._cleanup.callback(side.close)  # also when it came only half-way
        side.place()
        find("init_tracking")(self.args)
        self._cleanup.callback(find("finish_tracking"), self.args)
        self._cleanup.callback(side.close)  # before tracking ends, as in slime's own driver
        side.start()
        create = find("create_training_models")
        self._actor, self._critic = create(self.args, side.placements, side.manager, **options)
        self._cleanup.callback(self._let_go)
        self.updates = int(getattr(self.args, "update_weight_start_version", 0) or 0)
        self.update_weights()

    def train(self, rollout_id: int) -> int | None:
        """Take the next batch of groups in the manager's process and train on it; save when slime's ``--save-interval``
        says so. Returns the tokens under the loss mask in what reached the actors; ``None`` under nixl, whose tensors
        are for the actors alone."""
        import ray

        args, side = self.args, self._side
        data = ray.get(side.manager.generate.remote(rollout_id))
        # counted where the data lies: bringing a batch to the driver for a number would be dear
        count = ray.remote(num_cpus=0)(tokens_under_mask)
        counted = getattr(args, "rollout_data_transport", None) != "nixl"
        tokens = [count.remote(box.inner) for box in data] if counted else None
        if args.offload_rollout:
            ray.get(side.manager.offload.remote())
        actor_trains = not args.use_critic or rollout_id >= args.num_critic_only_steps
        values: Any = self._critic.async_train(rollout_id, data) if args.use_critic else None
        if actor_trains:
            external = {"external_data": values} if args.use_critic else {}
            values = self._actor.async_train(rollout_id, data, **external)
        ray.get(values)
        total = None if tokens is None else sum(ray.get(tokens))  # before slime lets go of what straw keeps
        side.call_manager("training_completed", rollout_id)
        if self.saves(rollout_id):
            self._save(rollout_id, actor_trains)
            self.saved = rollout_id
        if not args.offload_train:
            (self._actor if actor_trains else self._critic).clear_memory()
        self._next = rollout_id + 1
        return total

    def saves(self, rollout_id: int) -> bool:
        """Whether slime writes a checkpoint after this step."""
        args, due = self.args, find("should_run_periodic_action")
        return bool(due(rollout_id, args.save_interval, self._side.per_epoch, args.num_rollout))

    def update_weights(self) -> str:
        """Bring the weights to every engine, the way ``--update-weight-mode`` and ``-transport`` say; returns their
        version."""
        import ray

        if self._actor is None:
            raise TrainerError("slime's actors have not been started: call start() first.")
        side, first = self._side, self._next is None
        if self.args.offload_rollout:
            ray.get(side.manager.onload_weights.remote())
        # nobody begins a rollout while engines drain; what was running goes on with the new weights
        was_paused = None if first else side.call_manager("pause_rollout_admission")
        self._actor.update_weights()
        self.updates += 1
        if first:
            side.call_manager("training_ready")
            if getattr(self.args, "check_weight_update_equal", False):
                ray.get(side.manager.check_weights.remote(action="compare"))
        elif self._next != self.args.num_rollout:
            side.call_manager("resume_rollout_admission", was_paused)
        if self.args.offload_rollout:
            ray.get(side.manager.onload_kv.remote())
        return str(self.updates)

    def stop(self) -> None:
        """End all that ``start`` began, and Ray if ``start`` started it. Safe to call in any state."""
        self._cleanup.close()

    def _save(self, rollout_id: int, actor_trains: bool) -> None:
        import ray

        args, side = self.args, self._side
        if (save := find_optional("save_checkpoint")) is not None:
            plan = {"actor_trains": actor_trains, "restore_plan": side.restore_plan}
            save(args, rollout_id, self._actor, self._critic, side.manager, **plan)
            return
        for model in [self._actor] * actor_trains + [self._critic] * bool(args.use_critic):
            model.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)
        if getattr(args, "rollout_global_dataset", True):  # the data source's state, beside the checkpoint
            ray.get(side.manager.save.remote(rollout_id))

    def _let_go(self) -> None:
        self._actor = self._critic = None  # Ray ends an actor that nobody holds


def tokens_under_mask(rank_data: Any) -> int:
    """Tokens under the loss mask in what a training rank is sent: a batch, or a reference to one on disk."""
    data = rank_data.load() if hasattr(rank_data, "load") else rank_data
    masks = (mask.load() if hasattr(mask, "load") else mask for mask in data["loss_masks"])
    return sum(int(sum(mask)) for mask in masks)
