"""Ray without processes: actors are objects, references are values. It shows the order of calls, and no lifetimes."""

from __future__ import annotations

import types
from importlib.machinery import ModuleSpec
from typing import Any


class Handle:
    """An actor; like Ray's own it has exactly the methods of its class."""

    def __init__(self, actor: Any, alive: list[Handle]) -> None:
        self._actor, self._alive = actor, alive
        alive.append(self)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._actor, name)
        return types.SimpleNamespace(remote=method)


class FakeRay:
    def __init__(self) -> None:
        self.alive: list[Handle] = []
        self.placed: list[Placed] = []

    def remote(self, target: Any = None, **_: Any) -> Any:
        if target is None:  # as ray.remote(num_cpus=0)(function)
            return lambda function: types.SimpleNamespace(remote=function)
        made = types.SimpleNamespace(remote=lambda *args, **named: Handle(target(*args, **named), self.alive))
        return types.SimpleNamespace(options=lambda **_: made)

    def modules(self) -> dict[str, types.ModuleType]:
        """``ray`` and its modules that are imported, for ``sys.modules``."""
        ray, util, groups = (types.ModuleType(name) for name in ("ray", "ray.util", "ray.util.placement_group"))
        for module in (ray, util, groups):
            module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
        vars(ray).update(
            util=util,
            get=lambda value, timeout=None: value,
            put=lambda value: value,
            remote=self.remote,
            kill=lambda actor, no_restart=True: self.alive.remove(actor) if actor in self.alive else None,
            is_initialized=lambda: True,
            nodes=lambda: [{"Alive": True}],
        )
        util.list_named_actors = lambda all_namespaces=False: []  # type: ignore[attr-defined]
        groups.placement_group = self._place  # type: ignore[attr-defined]
        groups.remove_placement_group = (  # type: ignore[attr-defined]
            lambda group: self.placed.remove(group) if group in self.placed else None
        )
        return {"ray": ray, "ray.util": util, "ray.util.placement_group": groups}

    def _place(self, bundles: Any) -> Placed:
        self.placed.append(Placed())
        return self.placed[-1]


class Placed:
    """A placement group."""

    def ready(self) -> None: ...
