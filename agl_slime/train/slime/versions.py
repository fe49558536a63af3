"""Differences between slime's release and main, by feature; nothing else adapts to them. ``agl_slime.support.slime``
knows where names are, ``agl_slime.types`` the fields of ``Sample``.

|                                   | v0.3.1, v0.3.2 (624b824) | main (0.4.0)                             |
|-----------------------------------|--------------------------|------------------------------------------|
| ``create_rollout_manager`` takes  | args, pg                 | args, restore_plan                       |
| it returns                        | manager and a number     | ``RolloutStartup``, which has ``close``  |
| the driver reserves the GPUs      | yes                      | no                                       |
| step notifications, pauses        | no                       | ``training_ready``, ``…_completed``      |
| a checkpoint is written by        | the driver               | ``save_checkpoint``                      |
| rewards are normalised            | by position              | by group_index                           |
| ``args.rollout_global_dataset``   | yes                      | no                                       |
| ``train_async.py``                | yes                      | no (#2391)                               |
| resumed groups                    | in order of return       | or oldest first (#2390)                  |
| a bound on staleness              | no                       | no                                       |

docs/slime-versions.md says which commits were read.
"""

from __future__ import annotations

import inspect
import logging
import re
import uuid
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from agl_slime.errors import UnknownVersionError
from agl_slime.support.slime import find, find_optional, version
from agl_slime.types import HAS_SLIME, sample_from_fields

logger = logging.getLogger(__name__)

_DISPOSE_TIMEOUT_S = 10.0
_NAMESPACE = "agl-slime"  # Ray namespace of the actors that mark sessions whose driver is alive
_SESSION = re.compile(r"agl-[0-9a-f]{32}")
# Parameters of create_rollout_manager: whether the driver reserves the GPUs first.
_SHAPES: dict[tuple[str, ...], bool] = {("args", "pg"): True, ("args", "restore_plan"): False}

filter_output: Callable[..., Any] = find("DynamicFilterOutput") if HAS_SLIME else lambda *, keep, reason: keep
"""slime's ``DynamicFilterOutput``; without slime a plain bool, which slime accepts too."""


def manager_shape() -> tuple[str, str]:
    """The parameters of ``create_rollout_manager``. Raises ``UnknownVersionError`` for an unsupported signature."""
    shape: Any = tuple(inspect.signature(find("create_rollout_manager")).parameters)
    if shape not in _SHAPES:
        supported = " and ".join(f"({', '.join(names)})" for names in _SHAPES)
        signature = f"create_rollout_manager of {version()} takes ({', '.join(shape)})"
        raise UnknownVersionError(f"{signature}; supported are {supported}")
    return shape


def parse_args() -> tuple[Any, Any]:
    """The results of slime's ``parse_args``: the arguments, and the restore plan or ``None``."""
    parse = find("parse_args")
    if "return_restore_plan" in inspect.signature(parse).parameters:
        return parse(return_restore_plan=True)
    return parse(), None


def normalizes_by_group() -> bool:
    """Whether slime normalises rewards by ``group_index``, one per rollout: tried on two interleaved groups, whose
    means by position differ. Raises ``UnknownVersionError`` when that cannot be tried."""
    builder = find_optional("BatchBuilder")
    if builder is None:
        return False
    functions = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path", "reward_key")
    args = Namespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False)
    vars(args).update(dict.fromkeys(functions), n_samples_per_prompt=2, rollout_batch_size=2)
    samples = [sample_from_fields(reward=float(i), group_index=i % 2, index=i, rollout_id=i) for i in range(4)]
    try:
        return [*builder(args)._post_process_rewards(samples)[1]] == [-1.0, -1.0, 1.0, 1.0]
    except (AttributeError, TypeError) as error:
        raise UnknownVersionError(f"BatchBuilder of {version()} cannot normalise a test batch: {error}") from error


def router_of(args: Any) -> tuple[str | None, int | None]:
    return getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)


class RolloutSide:
    """slime's placement groups and rollout manager: started by slime's functions, ended by ``close``.

    ``args`` comes from ``parse_args``; ``start`` replaces it by the manager's copy on main, which adds the router's
    address, ``num_rollout`` and the first weight version.
    """

    def __init__(self, args: Any, restore_plan: Any = None) -> None:
        self.args, self.restore_plan = args, restore_plan
        self.manager: Any = None
        self.placements: dict[str, Any] = {}
        self.per_epoch: int | None = None
        self._startup: Any = None
        self._marker: Any = None  # an actor that Ray ends together with this driver

    def place(self) -> None:
        """Reserve the GPUs on a release; on main, where slime reserves them, name the session."""
        if _SHAPES[manager_shape()]:
            self.placements = find("create_placement_groups")(self.args)
        elif getattr(self.args, "rollout_session_id", None) is None:
            import ray

            # slime refuses to reuse a named session when a setting differs, and the store's port and token always do
            self.args.rollout_session_id = session = f"agl-{uuid.uuid4().hex}"
            self._end_abandoned_sessions()
            self._marker = ray.remote(LivingSession).options(name=session, namespace=_NAMESPACE, num_cpus=0).remote()

    def start(self) -> None:
        """Start the manager, and the engines if slime launches them. Raises ``UnknownVersionError`` when slime returns
        an unsupported object."""
        create = find("create_rollout_manager")
        if _SHAPES[manager_shape()]:
            self.manager, self.per_epoch = create(self.args, self.placements["rollout"])
            return
        startup = create(self.args, restore_plan=self.restore_plan)
        if not (hasattr(startup, "manager") and hasattr(startup, "close")):
            shape = f"a {type(startup).__name__} without manager or close"
            raise UnknownVersionError(f"create_rollout_manager of {version()} returned {shape}")
        self._startup, self.args = startup, startup.args
        self.manager, self.placements = startup.manager, startup.placements
        self.per_epoch, self.restore_plan = startup.num_rollout_per_epoch, startup.restore_plan

    def call_manager(self, name: str, *values: Any) -> Any:
        """The result of a method of the manager; ``None`` in versions without it."""
        import ray

        method = getattr(self.manager, name, None)
        return None if method is None else ray.get(method.remote(*values))

    def router(self) -> tuple[str | None, int | None]:
        """Host and port of the router, as the manager's process has them."""
        import ray

        call = getattr(self.manager, "__ray_call__", None)
        return (None, None) if call is None else ray.get(call.remote(lambda manager: router_of(manager.args)))

    def close(self) -> None:
        """End manager, engines and placement groups, killing whatever does not end in time. Safe to call in any
        state."""
        from ray.util.placement_group import remove_placement_group

        startup, self._startup = self._startup, None
        closed = startup is not None and _attempt("slime's rollouts", startup.close, failed=False)
        for name in ("manager", "serving"):
            if (actor := getattr(startup or self, name, None)) is not None:
                _attempt(f"slime's {name}", _end, actor, dispose=not closed)
        self.manager = None
        for actor in self._session_actors():
            _attempt("an actor of slime's session", _end, actor, dispose=True)
        for group in {placed[0] for placed in self.placements.values() if placed and placed[0] is not None}:
            _attempt("a placement group", remove_placement_group, group)
        self.placements, self._marker = {}, None

    def _session_actors(self) -> list[Any]:
        """The remaining detached actors of this session, for example after a failed start."""
        name_of = find_optional("training_session_name")
        if name_of is None or getattr(self.args, "rollout_session_id", None) is None:
            return []
        name = name_of(self.args)
        names = _actor_names(find_optional("RECOVERY_NAMESPACE"))
        return [_actor(actor) for actor in names if actor in (name, f"{name}:serving")]

    def _end_abandoned_sessions(self) -> None:
        """End detached actors of our sessions whose driver was killed: Ray keeps them, and their GPUs."""
        alive = {*_actor_names(_NAMESPACE)}
        for name in _actor_names(find_optional("RECOVERY_NAMESPACE")):
            if (session := _SESSION.search(name)) is not None and session[0] not in alive:
                logger.warning("%s was left by a killed run; ending it.", name)
                _attempt(name, lambda name=name: _end(_actor(name), dispose=True))


def _actor_names(namespace: str | None) -> list[str]:
    """The names of the actors in a Ray namespace, sorted: the manager before the engines that it uses."""
    import ray

    entries: Any = ray.util.list_named_actors(all_namespaces=True)
    return sorted(entry["name"] for entry in entries if entry["namespace"] == namespace)


def _actor(name: str) -> Any:
    """A detached actor of slime, by name."""
    import ray

    return ray.get_actor(name, namespace=find("RECOVERY_NAMESPACE"))


class LivingSession:
    """An actor that is not detached, and so lives exactly as long as its driver."""


def _end(actor: Any, *, dispose: bool) -> None:
    import ray

    try:
        if dispose:
            ray.get(actor.dispose.remote(), timeout=_DISPOSE_TIMEOUT_S)
    finally:
        ray.kill(actor)


def _attempt(label: str, end: Callable[..., Any], *values: Any, **named: Any) -> bool:
    try:
        end(*values, **named)
    except Exception as error:  # the run is over, perhaps for the same reason
        logger.warning("%s did not end cleanly: %s", label, error)
        return False
    return True
