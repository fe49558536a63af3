"""slime as the trainer of an ``OnlineRLLoop``, with placement groups, RolloutManager and actors from slime's functions.

The loop collects rollouts and then calls the manager for the batch, and the actors for a step and a weight update, in
the order of slime's ``train.py``. The manager's process reads the rollouts from the loop's store over HTTP.
(``examples/slime`` uses slime's own training loop instead.)
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pkgutil import resolve_name
from typing import Any
from urllib.parse import urlsplit

from agl_slime.errors import ConfigError, MissingDependencyError, TrainerError
from agl_slime.runner.ray import require_reachable
from agl_slime.support.net import http_url
from agl_slime.support.slime import HOOK_NAMES, INSTALL_SLIME, TRAINER_NAMES, find, find_optional, installed
from agl_slime.train.slime.versions import RolloutSide, manager_shape, parse_args, router_of


def require_slime() -> None:
    """Raise ``MissingDependencyError`` when slime, ray or torch is not installed, and ``UnknownVersionError`` when
    slime lacks a name that the trainer needs."""
    if not installed():
        raise MissingDependencyError(INSTALL_SLIME)
    for module in ("ray", "torch"):
        if importlib.util.find_spec(module) is None:
            raise MissingDependencyError(f"--trainer slime needs {module}: follow slime's installation guide")
    for name in {**HOOK_NAMES, **TRAINER_NAMES}:
        find(name)
    manager_shape()


def parse_slime_args(flags: Sequence[str]) -> Any:
    """The result of slime's ``parse_args`` for ``flags``, with its restore plan as the attribute ``agl_restore_plan``.
    Raises ``ConfigError`` for invalid flags."""
    require_slime()
    argv, sys.argv = sys.argv, ["train.py", *flags]  # slime and Megatron parse sys.argv and nothing else
    try:
        args, args.agl_restore_plan = parse_args()
        return args
    except ImportError as error:
        fix = "follow its installation guide"
        raise MissingDependencyError(f"slime needs a missing package ({error}): {fix}") from error
    except SystemExit as error:
        raise ConfigError("slime rejects its flags (after --); its own message is above") from error
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"slime rejects its flags (after --): {error}") from error
    finally:
        sys.argv = argv


class SlimeTrainer:
    """Drives slime's manager and actors. The methods block and belong in a thread, one call at a time.

    ``args`` comes from ``parse_slime_args``, with ``agl_store_url`` (and ``agl_store_token``) set; ``agl_actor_cls`` is
    the path of a class that replaces slime's Megatron actor.
    """

    def __init__(self, *, args: Any) -> None:
        self._side = RolloutSide(args, vars(args).pop("agl_restore_plan", None))
        self._actor: Any = None
        self._critic: Any = None
        self._cleanup = ExitStack()
        self._next: int | None = None
        self.saved: int | None = None
        """The rollout id of the last checkpoint."""
        self.updates = 0
        """Weight updates so far: slime's weight version."""

    @property
    def args(self) -> Any:
        return self._side.args

    @property
    def first_rollout_id(self) -> int:
        """The first rollout id, above 0 after a checkpoint was loaded; valid after ``start``."""
        return int(self.args.start_rollout_id or 0)

    @property
    def router_url(self) -> str | None:
        """The router that slime launched or was given, if its args have it; valid after ``start``."""
        host, port = router_of(self.args)
        if not host:  # the manager launched it, on the host where Ray put the manager
            host, port = self._side.router()
        return http_url(host, port) if host and port else None

    def start(self) -> None:
        """Start Ray if necessary, slime's manager and its actors, and update the engines' weights."""
        import ray

        side = self._side
        actor = getattr(self.args, "agl_actor_cls", None)
        options = {"actor_cls": resolve_name(actor)} if actor else {}
        if not ray.is_initialized():
            ray.init()
            self._cleanup.callback(ray.shutdown)
        store = urlsplit(getattr(self.args, "agl_store_url", None) or "").hostname
        require_reachable(ray, store or "", setting="--store-host")
        find("configure_logger")()
        self._cleanup.callback(side.close)  # also after a partial start
        side.place()
        find("init_tracking")(self.args)
        self._cleanup.callback(find("finish_tracking"), self.args)
        self._cleanup.callback(side.close)  # before tracking ends, as in slime's own driver
        side.start()
        create = find("create_training_models")
        self._actor, self._critic = create(self.args, side.placements, side.manager, **options)
        if not self.args.offload_train:  # the release's actors would push what they have loaded last, the reference
            ranks = getattr(self._actor, "_actor_handlers", ())
            ray.get([rank._switch_model.remote("actor") for rank in ranks if hasattr(rank, "_switch_model")])
        self._cleanup.callback(self._release_actors)
        self.updates = int(getattr(self.args, "update_weight_start_version", 0) or 0)
        self.update_weights()

    def train(self, rollout_id: int) -> int | None:
        """Take the next batch in the manager's process, train on it, and save if due by slime's ``--save-interval``.
        Returns the tokens under the loss mask that reached the actors; ``None`` under nixl, whose tensors only the
        actors can read."""
        import ray

        args, side = self.args, self._side
        data = ray.get(side.manager.generate.remote(rollout_id))
        # counted next to the data: the driver need not fetch the batch
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
        total = None if tokens is None else sum(ray.get(tokens))  # before slime lets straw delete the batch
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
        """Update the weights of every engine by ``--update-weight-mode`` and ``-transport``; returns their version."""
        import ray

        if self._actor is None:
            raise TrainerError("slime's actors have not been started: call start() first.")
        side, first = self._side, self._next is None
        if self.args.offload_rollout:
            ray.get(side.manager.onload_weights.remote())
        # no rollout starts while engines drain; running rollouts continue with the new weights
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
        """End everything that ``start`` started, including Ray. Safe to call in any state."""
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

    def _release_actors(self) -> None:
        self._actor = self._critic = None  # Ray ends actors without references


def tokens_under_mask(rank_data: Any) -> int:
    """Tokens under the loss mask in a training rank's data: a batch, or a reference to one on disk."""
    data = rank_data.load() if hasattr(rank_data, "load") else rank_data
    masks = (mask.load() if hasattr(mask, "load") else mask for mask in data["loss_masks"])
    return sum(int(sum(mask)) for mask in masks)
