"""Images of turns as span attributes, and in Samples. A file is written once per rollout, with the turn that shows it
first."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl_slime.errors import TraceError
from agl_slime.tokens.codec import shared_length
from agl_slime.tokens.images import Image, held
from agl_slime.trace import attributes as names

Images = tuple[Image, ...]


def image_attributes(images: Images, base: Images, written: set[str]) -> dict[str, Any]:
    """Of a turn that goes on from one with the images ``base``; ``written`` are those that are there already, and
    gets the others. None for a turn without."""
    if not images:
        return {}
    kept = shared_length(images, base)
    new = {image.sha: image for image in images if image.sha not in written}
    written.update(new)
    attributes = {names.IMAGES: json.dumps([kept, *(image.sha for image in images[kept:])])}
    if new:
        files = [[one.format, *one.size, base64.b64encode(one.data).decode("ascii")] for one in new.values()]
        attributes[names.IMAGE_DATA] = json.dumps(files)
    return attributes


def decode_images(attributes: Mapping[str, Any], base: Images, known: dict[str, Image]) -> Images:
    """What ``image_attributes`` wrote; ``known`` are the images of earlier turns, and gets this one's. Raises
    ``TraceError`` when they are damaged."""
    if names.IMAGES not in attributes:
        return ()
    try:
        for kind, width, height, data in json.loads(attributes.get(names.IMAGE_DATA, "[]")):
            raw = base64.b64decode(data, validate=True)
            known[hashlib.sha256(raw).hexdigest()] = held(raw, str(kind), (int(width), int(height)))
        kept, *new = json.loads(attributes[names.IMAGES])
        if not 0 <= kept <= len(base):
            raise ValueError(f"{kept} images are kept of a turn with {len(base)}")
        return (*base[:kept], *(known[sha] for sha in new))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{names.IMAGES} cannot be read: {error}") from error


def multimodal_inputs(images: Sequence[Image]) -> dict[str, Any] | None:
    """As slime's Samples have them; ``None`` without images."""
    return {"images": [image.open() for image in images], "videos": None} if images else None
