from __future__ import annotations

import math
from typing import Any


def _vocab_size_with_padding(vocab_size: int, args: Any) -> int:
    return math.ceil(vocab_size / 128) * 128
