"""Ray without processes: actors are objects, references are values. It shows the order of calls, and no lifetimes."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class Handle:
    """An actor; like Ray's own it has exactly the methods of its class."""

    def __init__(self, actor: Any, alive: list[Handle]) -> None:
        self._actor = actor
        alive.append(self)

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


class PlacementGroup:
    def ready(self) -> None: ...


class FakeRay:
    def __init__(self) -> None:
        self.alive: list[Handle] = []
        self.placed: list[PlacementGroup] = []

    def remote(self, target: Any = None, **_: Any) -> Any:
        if target is None:  # as ray.remote(num_cpus=0)(function)
            return lambda function: SimpleNamespace(remote=function)
        actor = SimpleNamespace(remote=lambda *args, **named: Handle(target(*args, **named), self.alive))
        return SimpleNamespace(options=lambda **_: actor)

    def modules(self) -> dict[str, ModuleType]:
        """``ray`` and its modules that are imported, for ``sys.modules``."""
        ray, util, groups = modules = [ModuleType(name) for name in ("ray", "ray.util", "ray.util.placement_group")]
        for module in modules:
            module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        vars(ray).update(
            util=util,
            get=lambda value, timeout=None: value,
            put=lambda value: value,
            remote=self.remote,
            kill=lambda actor, no_restart=True: _discard(self.alive, actor),
            is_initialized=lambda: True,
            nodes=lambda: [{"Alive": True}],
        )
        vars(util).update(list_named_actors=lambda all_namespaces=False: [])
        remove = lambda group: _discard(self.placed, group)  # noqa: E731
        vars(groups).update(placement_group=self._place, remove_placement_group=remove)
        return {module.__name__: module for module in modules}

    def _place(self, bundles: Any) -> PlacementGroup:
        self.placed.append(PlacementGroup())
        return self.placed[-1]


def _discard(items: list[Any], item: Any) -> None:
    if item in items:
        items.remove(item)
