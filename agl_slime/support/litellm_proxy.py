"""LiteLLM's proxy server, imported when it is used.

Agent Lightning's ``llm_proxy`` imports it at its top, for ``LLMProxy`` alone, which nothing here uses: 2.5 of the 6.1 s
of CPU and 116 of the 318 MB that importing Agent Lightning takes.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_SERVER, _USER = "litellm.proxy.proxy_server", "agentlightning.llm_proxy"
_NAMES = ("app", "save_worker_config")


@contextmanager
def proxy_server_later() -> Iterator[None]:
    """While Agent Lightning is imported: its ``LLMProxy`` imports the proxy server when the first one is made. Where
    the server or ``llm_proxy`` is there already, nothing changes; and who imports the server himself gets it."""
    if _SERVER in sys.modules or _USER in sys.modules:
        yield
        return
    stand_in = ModuleType(_SERVER)
    vars(stand_in).update(dict.fromkeys(_NAMES))
    sys.modules[_SERVER] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(_SERVER) is stand_in:
            del sys.modules[_SERVER]
    if (user := sys.modules.get(_USER)) is not None:
        _load_with_the_first(user)


def _load_with_the_first(user: ModuleType) -> None:
    make = user.LLMProxy.__init__

    @functools.wraps(make)
    def make_the_first(proxy: Any, *args: Any, **settings: Any) -> None:
        server = importlib.import_module(_SERVER)
        for name in _NAMES:
            setattr(user, name, getattr(server, name))
        user.LLMProxy.__init__ = make
        make(proxy, *args, **settings)

    user.LLMProxy.__init__ = make_the_first
