"""Import LiteLLM at its first use.

Agent Lightning imports it at module top for ``LLMProxy`` and for attributes of LiteLLM's spans, neither of which this
package uses. With the OpenAI client, which LiteLLM imports, it takes 1.9 of the 2.6 s of CPU and 120 of the 203 MB of
Agent Lightning's import.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_PROXY, _SPANS = "agentlightning.llm_proxy", "agentlightning.instrumentation.litellm"


class _Loads(type):
    """Metaclass of a placeholder for ``LLMProxy``: calling or subclassing it imports the real class."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        return importlib.import_module(_PROXY).LLMProxy(*args, **settings)

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not bases:
            return super().__new__(mcs, name, bases, namespace)
        real = importlib.import_module(_PROXY).LLMProxy
        return type(real)(name, tuple(real if isinstance(base, mcs) else base for base in bases), namespace)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, sys.modules[_PROXY].LLMProxy) if _PROXY in sys.modules else False

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, sys.modules[_PROXY].LLMProxy) if _PROXY in sys.modules else False


@contextmanager
def litellm_later() -> Iterator[None]:
    """While Agent Lightning is imported in the block: defer its modules that import LiteLLM to their first use. No
    effect when Agent Lightning was imported before."""
    if "agentlightning" in sys.modules:
        yield
        return
    stand_in = ModuleType(_PROXY)
    vars(stand_in).update(__all__=["LLMProxy"], LLMProxy=_Loads("LLMProxy", (), {"__module__": _PROXY}))
    modules: dict[str, Any] = sys.modules
    modules.update({_PROXY: stand_in, _SPANS: None})  # None makes its import an ImportError, which is caught there
    try:
        yield
    finally:
        for name in (_PROXY, _SPANS):
            modules.pop(name, None)
    if (log := logging.getLogger("httpx")).level == logging.NOTSET:
        log.setLevel(logging.WARNING)  # as LiteLLM does: httpx logs URLs, and an attempt's URL has its secret
    installed = find_spec("litellm") is not None
    vars(importlib.import_module("agentlightning.instrumentation"))["LITELLM_INSTALLED"] = installed
