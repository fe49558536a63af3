"""LiteLLM, imported by who uses it.

Agent Lightning imports it at its top for two things that nothing here uses: its ``LLMProxy``, and what its tracers add
to LiteLLM's own spans. With the OpenAI client, which LiteLLM imports, it is 1.9 of the 2.6 s of CPU and 120 of the 203
MB that importing Agent Lightning takes otherwise.
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
    """Of a class that stands for ``LLMProxy``: called, or subclassed, it is the real one."""

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
    """While Agent Lightning is imported: what of it imports LiteLLM is imported when it is first used. Where Agent
    Lightning is there already, nothing changes."""
    if "agentlightning" in sys.modules:
        yield
        return
    stand_in = ModuleType(_PROXY)
    vars(stand_in).update(__all__=["LLMProxy"], LLMProxy=_Loads("LLMProxy", (), {"__module__": _PROXY}))
    modules: dict[str, Any] = sys.modules
    modules.update({_PROXY: stand_in, _SPANS: None})  # None: importing it is an ImportError, which is expected there
    try:
        yield
    finally:
        for name in (_PROXY, _SPANS):
            modules.pop(name, None)
    if (log := logging.getLogger("httpx")).level == logging.NOTSET:
        log.setLevel(logging.WARNING)  # as LiteLLM does; it logs URLs, and those of attempts hold their secrets
    found = find_spec("litellm") is not None
    vars(importlib.import_module("agentlightning.instrumentation"))["LITELLM_INSTALLED"] = found
