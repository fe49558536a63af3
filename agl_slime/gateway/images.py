"""Images in requests of any protocol: image parts become text parts with marks before a body is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agl_slime.agent.images import is_image, read_part
from agl_slime.errors import GatewayRequestError, PromptError
from agl_slime.tokens.images import MARK, Image, ImageSettings

_MESSAGE_LISTS = ("messages", "input")

_PART_LISTS = ("content", "output")

_ROLES_WITH_IMAGES = (None, "user", "tool")


async def marked_body(
    raw: bytes, body: dict[str, Any], settings: ImageSettings
) -> tuple[dict[str, Any], dict[str, Image]]:
    """``body`` with marks for images, and these by hash. Raises ``GatewayRequestError`` naming an exceeded limit."""
    images: dict[str, Image] = {}
    if b"image" not in raw:
        return body, images
    for name in _MESSAGE_LISTS:
        if isinstance(items := body.get(name), list):
            marked = [await _marked(item, f"{name}[{n}]", images, settings) for n, item in enumerate(items)]
            body = {**body, name: marked}
    return body, images


async def _marked(item: Any, param: str, images: dict[str, Image], settings: ImageSettings) -> Any:
    """A message, a part or a tool's result, with marks for images."""
    if not isinstance(item, Mapping):
        return item
    for name in _PART_LISTS:
        content = item.get(name)
        if not isinstance(content, list):
            continue
        if any(map(is_image, content)) and item.get("role") not in _ROLES_WITH_IMAGES:
            message = f"{param}.{name}: a message of role {item.get('role')!r:.40} shows an image"
            raise GatewayRequestError(f"{message}; users' and tools' messages may", code="invalid_image", param=param)
        marked = [await _marked_part(part, f"{param}.{name}[{n}]", images, settings) for n, part in enumerate(content)]
        item = {**item, name: marked}
    return item


async def _marked_part(part: Any, param: str, images: dict[str, Image], settings: ImageSettings) -> Any:
    if not is_image(part):
        return await _marked(part, param, images, settings)  # Anthropic's tool results have parts
    try:
        image = await read_part(part, settings)
    except PromptError as error:
        raise GatewayRequestError(f"{param}: {error}", code="invalid_image", param=param) from error
    images[image.sha] = image
    if len(images) > settings.max_images:
        message = f"{param}: the request shows more than max_images, {settings.max_images}"
        raise GatewayRequestError(f"{message}: leave out some", code="invalid_image", param=param)
    return {"type": "text", "text": image.mark}


def joined(texts: list[str], join: str) -> str:
    """The text parts of a content as one; parts around an image follow without a separator, as in templates."""
    return ("" if any(MARK.fullmatch(text) for text in texts) else join).join(texts)
