"""Images of turns as span attributes, and in Samples. Each file is stored once per rollout, with the first turn that
shows it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from agl_slime.errors import TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.codec import shared_length
from agl_slime.tokens.images import Image, intern_image

Images = tuple[Image, ...]


def image_attributes(images: Images, base: Images, written: set[str]) -> dict[str, Any]:
    """The attributes of ``images`` in a turn whose base turn has the images ``base``; empty without images. ``written``
    has the stored images, and new ones are added to it."""
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


def decode_images(attributes: Mapping[str, Any], base: Images, earlier: dict[str, Image]) -> Images:
    """The images that ``image_attributes`` wrote; ``earlier`` has the images of earlier turns, and new ones are added.
    Raises ``TraceError`` when they are damaged."""
    if names.IMAGES not in attributes:
        return ()
    try:
        for kind, width, height, data in json.loads(attributes.get(names.IMAGE_DATA, "[]")):
            raw = base64.b64decode(data, validate=True)
            earlier[hashlib.sha256(raw).hexdigest()] = intern_image(raw, str(kind), (int(width), int(height)))
        kept, *new = json.loads(attributes[names.IMAGES])
        if not 0 <= kept <= len(base):
            raise ValueError(f"{kept} images are kept of a turn with {len(base)}")
        return (*base[:kept], *(earlier[sha] for sha in new))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{names.IMAGES} cannot be read: {error}") from error


def multimodal_inputs(images: Sequence[Image]) -> dict[str, Any] | None:
    """The images in the form of slime's Samples; ``None`` without images."""
    return {"images": [image.open() for image in images], "videos": None} if images else None
