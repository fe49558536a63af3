"""torch_memory_saver without memory to save: its methods do nothing."""

import contextlib
from types import SimpleNamespace
from typing import Any


def _nothing(*_: Any, **__: Any) -> None: ...


torch_memory_saver = SimpleNamespace(pause=_nothing, resume=_nothing, disable=contextlib.nullcontext, _impl=None)
