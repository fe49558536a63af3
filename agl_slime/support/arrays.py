"""Arrays and images in JSON, as base64."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_KINDS = frozenset({"|u1", "<u2", "<i4"})


def array_to_json(values: Any) -> dict[str, Any]:
    """An array (or tensor) of uint8, uint16 or int32 as a dict that ``array_from_json`` reads."""
    array = np.ascontiguousarray(values)
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    if array.dtype.str not in _KINDS:
        raise ValueError(f"arrays of {array.dtype} cannot be written, only uint8, uint16 and int32")
    data = base64.b64encode(array.data).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "base64": data}


def array_from_json(packed: Mapping[str, Any]) -> NDArray[Any]:
    """The array that ``array_to_json`` wrote. Raises ``ValueError`` or ``KeyError`` for other values."""
    if packed["dtype"] not in _KINDS:
        raise ValueError(f"arrays of {packed['dtype']!r} cannot be read")
    raw = base64.b64decode(packed["base64"], validate=True)
    return np.frombuffer(raw, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])


def images_to_json(inputs: Mapping[str, Any]) -> dict[str, list[str] | None]:
    """Replace PIL images in a dict of lists by PNG files in base64, which ``images_from_json`` reads."""

    def png(picture: Any) -> str:
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=1)
        return base64.b64encode(file.getvalue()).decode("ascii")

    return {name: pictures and [*map(png, pictures)] for name, pictures in inputs.items()}


def images_from_json(packed: Mapping[str, Any]) -> dict[str, Any]:
    from PIL import Image

    def picture(text: str) -> Any:
        return Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=("PNG",))

    return {name: files and [*map(picture, files)] for name, files in packed.items()}
