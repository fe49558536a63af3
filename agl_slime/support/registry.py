"""Registries of users' plug-ins by name: schedulers, tool parsers, loss masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from agl_slime.errors import ConfigError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(dict[str, Callable[..., T]], Generic[T]):
    """Factories of one ``kind`` of plug-in by name. Raises ``ConfigError`` for an unknown or duplicate name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def register(self, *names: str) -> Callable[[F], F]:
        """A decorator that registers a class or a function under ``names``."""

        def add(maker: F) -> F:
            for name in names:
                if name in self:
                    raise ConfigError(f"a {self._kind} named {name!r} is registered already; choose another name")
                self[name] = maker
            return maker

        return add

    def __missing__(self, name: str) -> Callable[..., T]:
        raise ConfigError(f"there is no {self._kind} {name!r}; there are {', '.join(sorted(self)) or 'none'}")
