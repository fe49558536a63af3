"""torch_memory_saver without memory to save: its methods do nothing."""

import contextlib
from types import SimpleNamespace
from typing import Any


def _nothing(*_: Any, **__: Any) -> contextlib.nullcontext[None]:
    return contextlib.nullcontext()


torch_memory_saver = SimpleNamespace(**dict.fromkeys(("pause", "resume", "disable", "region"), _nothing), _impl=None)
