"""What differs between slime's versions, by feature: the one place that adapts to them. Where names are is in
``agl_slime.support.slime``, the fields of ``Sample`` in ``agl_slime.types``.

| what                             | v0.3.1 to 624b824 | ec3003b5         | 13b347f8               | main           |
|----------------------------------|-------------------|------------------|------------------------|----------------|
| ``create_rollout_manager`` takes | args, pg          | and restore_plan | args, restore_plan     | as before      |
| what it gives                    | a tuple           | a tuple          | RolloutStartup         | with ``close`` |
| ``training_completed``, pauses   | no                | yes              | and ``training_ready`` | as before      |
| a checkpoint is written by       | the driver        | the driver       | ``save_checkpoint``    | as before      |
| rewards are normalised           | by position       | by position      | by position            | by group_index |
| ``args.rollout_global_dataset``  | yes               | no               | no                     | no             |

v0.3.2 is taken to be 624b824; what is said of main's driver is read from commit 8c1c944b of a fork that follows it.
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
from agl_slime.types import HAS_SLIME, Sample, sample_from_fields

logger = logging.getLogger(__name__)

_END_S = 10.0  # longest wait for an actor to end in good order
_NAMESPACE = "agl-slime"  # Ray's, for the actors that mark a session as one whose driver lives
_SESSION = re.compile(r"agl-[0-9a-f]{32}")
# By what the parameters of create_rollout_manager are called: whether GPUs are placed by the driver before it.
_SHAPES = {("args", "pg"): True, ("args", "pg", "restore_plan"): True, ("args", "restore_plan"): False}

filter_output: Callable[..., Any] = find("DynamicFilterOutput") if HAS_SLIME else lambda *, keep, reason: keep
"""slime's ``DynamicFilterOutput``; the plain bool, which slime takes as well, where it is not installed."""


def manager_shape() -> tuple[str, ...]:
    """The parameters of ``create_rollout_manager``. Raises ``UnknownVersionError`` for others than the known ones."""
    shape = tuple(inspect.signature(find("create_rollout_manager")).parameters)
    if shape not in _SHAPES:
        known = " and ".join(f"({', '.join(names)})" for names in _SHAPES)
        raise UnknownVersionError(
            f"create_rollout_manager of {version()} takes ({', '.join(shape)}), and only {known} are known"
        )
    return shape


def parse_args() -> tuple[Any, Any]:
    """slime's own ``parse_args`` and, where it makes one, its restore plan."""
    parse = find("parse_args")
    if "return_restore_plan" in inspect.signature(parse).parameters:
        return parse(return_restore_plan=True)
    return parse(), None


def normalizes_by_group() -> bool:
    """Whether slime's own normalisation goes by ``group_index``, one reward per rollout. Asked by two groups that lie
    interleaved: by position their means are others. Raises ``UnknownVersionError`` when it cannot be asked."""
    builder = find_optional("BatchBuilder")
    if builder is None:
        return False
    args = Namespace(
        custom_reward_post_process_path=None,
        custom_convert_samples_to_train_data_path=None,
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=False,
        reward_key=None,
        n_samples_per_prompt=2,
        rollout_batch_size=2,
    )
    samples: list[Sample] = [
        sample_from_fields(reward=float(i), group_index=i % 2, index=i, rollout_id=i) for i in range(4)
    ]
    try:
        return [*builder(args)._post_process_rewards(samples)[1]] == [-1.0, -1.0, 1.0, 1.0]
    except (AttributeError, TypeError) as error:
        raise UnknownVersionError(f"BatchBuilder of {version()} does not say how it normalises: {error}") from error


class RolloutSide:
    """slime's placement groups and rollout manager, made by its own functions, and their end.

    ``args`` is what came out of ``parse_args`` until ``start``, and from then on what the manager was started with:
    newer versions copy it and add the router's address, ``num_rollout`` and the version that weights start at.
    """

    def __init__(self, args: Any, restore_plan: Any = None) -> None:
        self.args, self.restore_plan = args, restore_plan
        self.manager: Any = None
        self.placements: dict[str, Any] = {}
        self.per_epoch: int | None = None
        self._startup: Any = None
        self._mark: Any = None  # an actor that Ray ends with this driver, however that ends

    def place(self) -> None:
        """Reserve the GPUs, where that is the driver's business."""
        if _SHAPES[manager_shape()]:
            self.placements = find("create_placement_groups")(self.args)
        elif getattr(self.args, "rollout_session_id", None) is None:
            # a session that is found again by its name is refused as soon as one setting differs, and the store's port
            # and token do in each run
            self.args.rollout_session_id = session = f"agl-{uuid.uuid4().hex}"
            self._end_abandoned()
            self._mark = _mark(session)

    def start(self) -> None:
        """Start the manager, with engines where slime launches them. Raises ``UnknownVersionError`` for an answer that
        is of no known form."""
        shape, create = manager_shape(), find("create_rollout_manager")
        plan = {"restore_plan": self.restore_plan} if "restore_plan" in shape else {}
        if _SHAPES[shape]:
            self.manager, self.per_epoch = create(self.args, self.placements["rollout"], **plan)
            return
        self._startup = startup = create(self.args, **plan)
        if not hasattr(startup, "manager"):
            raise UnknownVersionError(f"create_rollout_manager of {version()} gave a {type(startup).__name__}")
        self.args = getattr(startup, "args", self.args)
        self.manager, self.placements, self.per_epoch = (
            startup.manager,
            startup.placements,
            startup.num_rollout_per_epoch,
        )
        self.restore_plan = startup.restore_plan

    def tell(self, name: str, *values: Any) -> Any:
        """Call a method of the manager that only some versions have; ``None`` where this one does not."""
        import ray

        method = getattr(self.manager, name, None)
        return None if method is None else ray.get(method.remote(*values))

    def close(self) -> None:
        """End all of it, however far it came: manager, engines, placement groups. What does not end in good order is
        killed. Safe to call in any state."""
        from ray.util.placement_group import remove_placement_group

        startup, self._startup = self._startup, None
        closed = hasattr(startup, "close") and _attempt("slime's rollouts", startup.close, failed=False)
        for name in ("manager", "serving"):
            if (actor := getattr(startup or self, name, None)) is not None:
                _attempt(f"slime's {name}", _end, actor, in_order=not closed)
        self.manager = None
        for actor in self._left():
            _attempt("what slime's session left", _end, actor, in_order=True)
        for group in {placed[0] for placed in self.placements.values() if placed and placed[0] is not None}:
            _attempt("a placement group", remove_placement_group, group)
        self.placements, self._mark = {}, None

    def _left(self) -> list[Any]:
        """The detached actors of this session that are still there: of a start that was broken off, above all."""
        name_of = find_optional("training_session_name")
        if name_of is None or getattr(self.args, "rollout_session_id", None) is None:
            return []
        name = name_of(self.args)
        return [_actor(one) for one in _named(find_optional("RECOVERY_NAMESPACE")) if one in (name, f"{name}:serving")]

    def _end_abandoned(self) -> None:
        """End what sessions of ours left whose driver was killed (-9): Ray keeps what is detached, with its GPUs."""
        living = {*_named(_NAMESPACE)}
        for name in _named(find_optional("RECOVERY_NAMESPACE")):
            if (session := _SESSION.search(name)) is not None and session[0] not in living:
                logger.warning("%s was left by a run that was killed; it is ended.", name)
                _attempt(name, lambda name=name: _end(_actor(name), in_order=True))


def _named(namespace: str | None) -> list[str]:
    """The named actors there; the manager before the engines that it uses."""
    import ray

    entries: Any = ray.util.list_named_actors(all_namespaces=True)
    return sorted(entry["name"] for entry in entries if entry["namespace"] == namespace)


def _actor(name: str) -> Any:
    """A detached actor of slime's."""
    import ray

    return ray.get_actor(name, namespace=find("RECOVERY_NAMESPACE"))


class LivingSession:
    """An actor that is not detached, so it is there as long as its driver is."""


def _mark(session: str) -> Any:
    import ray

    return ray.remote(LivingSession).options(name=session, namespace=_NAMESPACE, num_cpus=0).remote()


def _end(actor: Any, *, in_order: bool) -> None:
    import ray

    try:
        if in_order:
            ray.get(actor.dispose.remote(), timeout=_END_S)
    finally:
        ray.kill(actor)


def _attempt(what: str, end: Callable[..., Any], *values: Any, **named: Any) -> bool:
    try:
        end(*values, **named)
    except Exception as error:
        # the run is over, and this may be what ended it
        logger.warning("%s did not end in good order: %s", what, error)
        return False
    return True
