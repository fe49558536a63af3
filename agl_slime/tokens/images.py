"""Images in conversations.

In the content of a message an image is a mark with its hash, a few characters of text: messages stay small and compare
like text, and each image is stored once for all turns. ``tokens.vision`` expands a mark to its tokens.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from agl_slime.errors import PromptError, TraceError, missing_as_error
from agl_slime.support.ranges import check_ranges
from agl_slime.tokens import attributes as names
from agl_slime.tokens.codec import shared_length

FORMATS = ("PNG", "JPEG", "WEBP")
_MIME = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
# noncharacters of Unicode, which no text has
MARK = re.compile("\ufdd0image ([0-9a-f]{64})\ufdd1")
_ORIENTATION = 0x0112  # Exif tag of a picture's rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Limits of images, which are PNG, JPEG or WEBP."""

    max_image_mb: float = 5.0
    """Largest file, in MB."""
    max_megapixels: float = 16.0
    """Largest picture, in million pixels."""
    max_images: int = 32
    """Most images of a conversation."""
    image_hosts: tuple[str, ...] = ()
    """The only hosts from which images are fetched, by http or https; by default images come as data."""

    def __post_init__(self) -> None:
        check_ranges(self, ("max_image_mb max_megapixels max_images", lambda value: value > 0, "above 0"))


@dataclass(frozen=True, eq=False)
class Image:
    """An image file ``data`` in one of ``FORMATS``, in which engines and trainers read the same RGB pixels. ``sha`` is
    its SHA-256, ``size`` its width and height in pixels."""

    sha: str
    data: bytes
    format: str
    size: tuple[int, int]

    @property
    def mark(self) -> str:
        return f"\ufdd0image {self.sha}\ufdd1"

    @property
    def uri(self) -> str:
        """The image as a ``data:`` URI, for engines."""
        return f"data:{_MIME[self.format]};base64,{base64.b64encode(self.data).decode('ascii')}"

    def open(self) -> Any:
        """The image as a PIL image, which reads its pixels lazily."""
        return _pil().open(io.BytesIO(self.data))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Image) and self.sha == other.sha

    def __hash__(self) -> int:
        return hash(self.sha)


images_in_use: WeakValueDictionary[str, Image] = WeakValueDictionary()
"""Each once, by its hash, however many rollouts of a group share it."""
_images_by_source: WeakValueDictionary[bytes, Image] = WeakValueDictionary()  # by the hash of the original file


def images_in(messages: Iterable[Mapping[str, Any]], images: Mapping[str, Image]) -> tuple[Image, ...]:
    texts = (content for message in messages if isinstance(content := message.get("content"), str))
    shas = (sha for text in texts if "\ufdd0" in text for sha in MARK.findall(text))
    return tuple(images[sha] for sha in shas if sha in images)


def read_image(data: bytes, settings: ImageSettings = ImageSettings()) -> Image:
    """An image from the bytes of a file. An image that is not plain RGB is rewritten as PNG: rotated as its Exif data
    says, without transparency, its first frame. Raises ``PromptError`` for an image beyond the limits."""
    key = hashlib.sha256(data).digest()
    if (image := _images_by_source.get(key)) is not None and _fits(image, settings):
        return image
    if len(data) > settings.max_image_mb * 1e6:
        raise _too_large(len(data), settings)
    pil = _pil()
    try:
        picture = pil.open(io.BytesIO(data), formats=FORMATS)
        if not _is_within(picture.size, settings):
            width, height = picture.size
            pixels = f"{width} x {height} pixels, max_megapixels is {settings.max_megapixels:g}"
            raise PromptError(f"an image has {pixels}: send a smaller one")
        picture.load()
        plain = picture.mode == "RGB" and getattr(picture, "n_frames", 1) == 1
        if plain and picture.getexif().get(_ORIENTATION, 1) == 1:
            image = intern_image(data, str(picture.format), picture.size)
        else:
            from PIL import ImageOps

            image = from_pil(ImageOps.exif_transpose(picture) or picture)
    except PromptError:
        raise
    except (OSError, SyntaxError, ValueError, pil.DecompressionBombError) as error:
        raise PromptError(f"an image cannot be read as {', '.join(FORMATS)}: {str(error)[:200]}") from error
    _images_by_source[key] = image
    return image


def intern_image(data: bytes, kind: str, size: tuple[int, int]) -> Image:
    """The one ``Image`` of a file in the format of ``read_image``."""
    sha = hashlib.sha256(data).hexdigest()
    return images_in_use.setdefault(sha, Image(sha, data, kind, size))


def read_uri(uri: str, settings: ImageSettings = ImageSettings()) -> Image:
    head, _, text = uri.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise PromptError(f"an image must be a URI data:image/…;base64,…, got {uri:.60}")
    if len(text) > settings.max_image_mb * 1.4e6:
        raise _too_large(len(text) * 0.75, settings)
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PromptError(f"the data of an image is not base64: {error}") from error
    return read_image(data, settings)


def from_pil(picture: Any) -> Image:
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG", compress_level=1)
    return intern_image(file.getvalue(), "PNG", picture.size)


def _too_large(size: float, settings: ImageSettings) -> PromptError:
    limit = f"max_image_mb is {settings.max_image_mb:g}"
    return PromptError(f"an image has {size / 1e6:.1f} MB, {limit}: send a smaller one")


def _is_within(size: tuple[int, int], settings: ImageSettings) -> bool:
    return size[0] * size[1] <= settings.max_megapixels * 1e6


def _fits(image: Image, settings: ImageSettings) -> bool:
    return _is_within(image.size, settings) and len(image.data) <= settings.max_image_mb * 1e6


def _pil() -> Any:
    with missing_as_error("images need Pillow: pip install agl-slime[images]"):
        from PIL import Image as pil
    return pil


Images = tuple[Image, ...]


def image_attributes(images: Images, base: Images, written: set[str]) -> dict[str, Any]:
    """The attributes of ``images`` in a turn whose base turn has the images ``base``; empty without images. ``written``
    has the stored images, and new ones are added to it."""
    if not images:
        return {}
    shared = shared_length(images, base)
    new = {image.sha: image for image in images if image.sha not in written}
    written.update(new)
    attributes = {names.IMAGES: json.dumps([shared, *(image.sha for image in images[shared:])])}
    if new:
        files = [[image.format, *image.size, base64.b64encode(image.data).decode("ascii")] for image in new.values()]
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
        shared, *new = json.loads(attributes[names.IMAGES])
        if not 0 <= shared <= len(base):
            raise ValueError(f"{shared} images are kept of a turn with {len(base)}")
        return (*base[:shared], *(earlier[sha] for sha in new))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{names.IMAGES} cannot be read: {error}") from error


def multimodal_inputs(images: Sequence[Image]) -> dict[str, Any] | None:
    """The images in the form of slime's Samples; ``None`` without images."""
    return {"images": [image.open() for image in images], "videos": None} if images else None
