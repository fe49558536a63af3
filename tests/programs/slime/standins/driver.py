"""The driver's side of slime in its two shapes, written from descriptions: no line of slime is here. Each signature
names where it was read (docs/slime-versions.md). Over ``ray`` as it is imported: a real one, or
``tests.train.slime.fake_ray``.

``args.calls`` is a file that gets a line per call; ``args.crash`` names the call that fails.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import types
from argparse import Namespace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

SHAPES = ("624b824", "main")
NAMESPACE = "slime-training-recovery"  # slime/ray/training_recovery.py at 0b0c277d


def note(args: Any, call: str) -> None:
    with open(args.calls, "a") as lines:
        lines.write(call + "\n")
    if args.crash == call:
        raise RuntimeError(f"crash in {call}")


def _notes(call: str) -> Any:
    """A method that only notes its call."""
    return lambda self, *_, **__: note(self.args, call)


class Box:
    """slime/utils/misc.py: what ``generate`` gives per rank; ``inner`` is a reference to the rank's batch."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class BatchRef:
    """slime/data/transport.py at 13b347f8, ``TrainBatchRef``: a batch on disk, which has to be loaded."""

    def load(self) -> dict[str, Any]:
        return {"loss_masks": [[1, 1, 0], [1]]}


class Manager:
    """slime/ray/rollout.py: RolloutManager, at 624b824."""

    def __init__(self, args: Any, pg: Any, **_: Any) -> None:
        self.args = args
        # stands for processes of a manager: routers, agents
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(f"{args.calls}.pids", "a") as pids:
            pids.write(f"{self.child.pid}\n")
        note(args, "manager")

    def generate(self, rollout_id: int) -> list[Box]:
        import ray

        note(self.args, "generate")
        straw = self.args.rollout_data_transport == "straw"
        return [Box(ray.put(BatchRef() if straw else BatchRef().load()))]

    save, offload, onload_weights, onload_kv = map(_notes, ("save", "offload", "onload_weights", "onload_kv"))

    def dispose(self, timeout: float | None = None) -> None:  # the timeout: 5dcf67cd
        self.child.kill()
        self.child.wait()
        note(self.args, "dispose")


class ServedManager(Manager):
    """RolloutManager of main (13b347f8, 5dcf67cd): its engines belong to a ServingCluster, admission can be paused, and
    it is notified of each step."""

    training_ready, training_completed = map(_notes, ("training_ready", "training_completed"))

    def pause_rollout_admission(self) -> bool:
        note(self.args, "pause")
        return False

    def resume_rollout_admission(self, was_paused: bool) -> None:
        assert was_paused is False
        note(self.args, "resume")


class Serving:
    """slime/ray/serving.py at 13b347f8: ServingCluster, which reserves the GPUs itself."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.placed = create_placement_groups(args)

    def placements(self) -> dict[str, Any]:
        return self.placed

    def dispose(self, timeout: float | None = None) -> None:
        from ray.util.placement_group import remove_placement_group

        for group in {placed[0] for placed in self.placed.values() if placed}:
            remove_placement_group(group)


class Trained:
    """slime/ray/actor_group.py: RayTrainGroup, as far as a driver calls it."""

    def __init__(self, args: Any, worker: Any) -> None:
        self.args, self.worker = args, worker

    update_weights, save_model, clear_memory = map(_notes, ("update_weights", "save_model", "clear_memory"))

    def async_train(self, rollout_id: int, data: Any, external_data: Any = None) -> list[Any]:
        return [self.worker.step.remote()]


class Worker:
    """A training actor."""

    def __init__(self, args: Any) -> None:
        self.args = args

    step = _notes("train")


def create_placement_groups(args: Any) -> dict[str, Any]:
    """slime/ray/placement_group.py at 624b824."""
    import ray
    from ray.util.placement_group import placement_group

    note(args, "place")
    group = placement_group([{"GPU": 1, "CPU": 1}])
    ray.get(group.ready())
    return {"actor": (group, [0], [0]), "critic": None, "rollout": (group, [0], [0])}


def create_training_models(args: Any, pgs: dict[str, Any], rollout_manager: Any, actor_cls: Any = None) -> Any:
    """slime/ray/placement_group.py at 624b824; loads the data source at the end, always since 2890b293."""
    import ray

    note(args, "models")
    args.start_rollout_id = 0
    return Trained(args, ray.remote(Worker).options(num_cpus=0.1).remote(args)), None


def create_of_624b824(args: Any, pg: Any) -> tuple[Any, None]:
    """slime/ray/placement_group.py at 624b824."""
    import ray

    return ray.remote(Manager).options(num_cpus=0.1).remote(args, pg), None


class Startup:
    """RolloutStartup of main, as vllm-project/vime 8c1c944b has it."""

    def __init__(self, args: Any, manager: Any, serving: Any, placements: dict[str, Any], plan: Any) -> None:
        self.args, self.restore_plan, self.num_rollout_per_epoch = args, plan, None
        self.manager, self.serving, self.placements = manager, serving, placements

    def close(self, *, failed: bool) -> None:
        import ray

        assert not failed  # which would leave the engines running
        note(self.args, "close")
        for actor in (self.manager, self.serving):
            ray.get(actor.dispose.remote(60), timeout=60)
            ray.kill(actor, no_restart=True)


def _start(args: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Detached named actors, as in slime/ray/placement_group.py at 13b347f8."""
    import ray

    named = {"namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0.1}
    name = training_session_name(args)
    serving = ray.remote(Serving).options(name=f"{name}:serving", **named).remote(args)
    placements = ray.get(serving.placements.remote())
    args.sglang_router_ip, args.sglang_router_port = "10.0.0.1", 3000
    note(args, "attach")
    manager = ray.remote(ServedManager).options(name=name, **named).remote(args, placements["rollout"])
    return manager, serving, placements


def create_of_main(args: Any, *, restore_plan: Any = None) -> Startup:
    """As in vllm-project/vime 8c1c944b: args are copied, and the weights may start at another version."""
    args = copy.deepcopy(args)
    startup = Startup(args, *_start(args), restore_plan)
    args.update_weight_start_version = 7
    return startup


def training_session_name(args: Any) -> str:
    """slime/ray/training_recovery.py at 0b0c277d; here only for sessions with an id."""
    return f"rollout:{args.rollout_session_id}"


def save_checkpoint(
    args: Any,
    rollout_id: int,
    actor_model: Any,
    critic_model: Any,
    rollout_manager: Any,
    *,
    actor_trains: bool,
    restore_plan: Any = None,
) -> None:
    """slime/data/checkpoint.py at 13b347f8."""
    import ray

    actor_model.save_model(rollout_id)
    ray.get(rollout_manager.save.remote(rollout_id))


def driver_args(calls: Path, **changed: Any) -> Namespace:
    """slime's args, as far as the driver and the functions above read them."""
    values: dict[str, Any] = {"calls": str(calls), "crash": None, "offload_rollout": False, "offload_train": False}
    values |= {"use_critic": False, "num_critic_only_steps": 0, "save_interval": 2, "num_rollout": 2, "save": None}
    values |= {"rollout_data_transport": "object-store", "rollout_session_id": None, "start_rollout_id": None}
    values |= {"release_train": False, "eval_interval": None, "check_weight_update_equal": False, "load": None}
    return Namespace(**{**values, "rollout_global_dataset": True, "load_debug_rollout_data": None, **changed})


def modules_of(shape: str) -> dict[str, types.ModuleType]:
    """The modules of slime in that shape, for ``sys.modules``."""
    from agl_slime import types as twins

    main = shape == "main"
    outputs = ("RolloutFnTrainOutput", "RolloutFnEvalOutput")
    places: dict[str, dict[str, Any]] = {
        "slime.utils.types": {"Sample": twins.Sample},
        "slime.data.data_source" if main else "slime.rollout.data_source": {"DataSource": twins.DataSource},
        "slime.rollout.base_types": {name: getattr(twins, name) for name in outputs},
        "slime.rollout.filter_hub.base_types": {"DynamicFilterOutput": Namespace},
        "slime.utils.arguments": {"parse_args": parse_restoring if main else parse_plain},
        "slime.utils.http_utils": {"find_available_port": lambda base: base, "get_host_info": lambda: ("h", "h")},
        "slime.utils.misc": {"should_run_periodic_action": should_run_periodic_action},
        "slime.observability.logging_utils": {
            "configure_logger": lambda prefix="": None,
            "init_tracking": lambda args, primary=True: note(args, "init_tracking"),
            "finish_tracking": lambda args: note(args, "finish_tracking"),
        },
        "slime.ray.placement_group": {
            "create_placement_groups": create_placement_groups,
            "create_rollout_manager": globals()[f"create_of_{shape}"],
            "create_training_models": create_training_models,
        },
    }
    if main:
        places["slime.data.checkpoint"] = {"save_checkpoint": save_checkpoint}
        names = {"RECOVERY_NAMESPACE": NAMESPACE, "training_session_name": training_session_name}
        places["slime.ray.training_recovery"] = names
    modules: dict[str, types.ModuleType] = {}
    for place, names in places.items():
        path = place.split(".")
        for n in range(1, len(path) + 1):
            name = ".".join(path[:n])
            if name not in modules:
                modules[name] = module = types.ModuleType(name)
                module.__spec__ = ModuleSpec(name, None, is_package=n < len(path))
                module.__path__ = []
        vars(modules[place]).update(names)
    return modules


def parse_plain(add_custom_arguments: Any = None) -> Namespace:
    """slime/utils/arguments.py at 624b824."""
    return Namespace(plan=False)


def parse_restoring(add_custom_arguments: Any = None, *, return_restore_plan: bool = False) -> tuple[Namespace, str]:
    """slime/utils/arguments.py at 0b0c277d."""
    assert return_restore_plan
    return Namespace(plan=True), "a plan"


def should_run_periodic_action(
    rollout_id: int, interval: int | None, per_epoch: int | None, num: int | None = None
) -> bool:
    """slime/utils/misc.py at 624b824."""
    return interval is not None and (rollout_id + 1) % interval == 0
