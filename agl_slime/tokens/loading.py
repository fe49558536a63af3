"""Loading tokenizers, once per path and process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, format_exception
from agl_slime.tokens.vision import VisionTokenizer, has_image_processor

_loaded: dict[str, Any] = {}
_lock = threading.Lock()


def load_tokenizer(path: str | Path) -> Any:
    """The tokenizer at ``path``, a directory or a name that transformers resolves. Raises ``ConfigError``."""
    key = str(path)
    with _lock:
        if key not in _loaded:
            from transformers import AutoTokenizer  # a second or more of imports

            try:
                loaded = AutoTokenizer.from_pretrained(key)
            except Exception as error:  # a damaged file is a KeyError, a TypeError, or an Exception of tokenizers
                text = str(error) if isinstance(error, OSError | ValueError) else format_exception(error)
                raise ConfigError(f"no tokenizer can be loaded from {key!r}: {' '.join(text.split())[:300]}") from error
            _loaded[key] = VisionTokenizer(loaded, path=key) if has_image_processor(key) else loaded
        return _loaded[key]
