"""Images in messages: read from content parts, which are replaced by image marks in the text."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from operator import methodcaller
from typing import Any

import aiohttp
from yarl import URL

from agl_slime.errors import PromptError
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.images import Image, ImageSettings, from_pil, images_in, read_image, read_uri

_KINDS = ("image_url", "input_image", "image")  # no sets: clients send lists and objects, too
_FETCH_TIMEOUT_S = 20.0
_SHOWS = ("user", "tool")
_CONTENT = methodcaller("get", "content")  # no line of Python for each message of a long history
Images = MutableMapping[str, Image]


def is_image(part: Any) -> bool:
    """Whether a content part is an image, in a form of OpenAI, Anthropic or Hugging Face chat templates."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def parts_with_images(value: Any) -> list[Any] | None:
    """A tool's return value as content parts, if it has PIL images or image parts; else ``None``."""
    listed = value if isinstance(value, list) else [value]
    if not any(is_image(item) or _is_picture(item) for item in listed):
        return None
    listed = [{"type": "text", "text": item} if isinstance(item, str) else item for item in listed]
    return [{"type": "image", "image": item} if _is_picture(item) else item for item in listed]


def _is_picture(value: Any) -> bool:
    return hasattr(value, "convert") and hasattr(value, "getexif")


async def mark_images(message: Mapping[str, Any], images: Images, settings: ImageSettings) -> dict[str, Any]:
    """``message`` with its content parts joined to one text, in which marks stand for the images; the images are added
    to ``images``. Raises ``PromptError`` for an image that is not allowed."""
    if (role := message.get("role")) not in _SHOWS:
        raise PromptError(f"a message of role {role!r:.40} shows an image: users' and tools' messages may")
    texts = []
    for part in message["content"]:
        if is_image(part):
            image = await read_part(part, settings)
            images[image.sha] = image
            texts.append(image.mark)
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise PromptError(f"a content with images holds a part of type {kind!r:.40}: texts and images are read")
    return {**message, "content": "".join(texts)}


async def read_part(part: Mapping[str, Any], settings: ImageSettings) -> Image:
    """The image of a content part. Raises ``PromptError``."""
    source: Any = part.get("image_url", part.get("image", part.get("source")))
    if isinstance(source, Mapping):
        anthropic_uri = f"data:{source.get('media_type')};base64,{source.get('data')}"
        source = anthropic_uri if source.get("type") == "base64" else source.get("url")
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return await run_in_thread(read_image, await _fetched(source, settings), settings)
    if isinstance(source, str):
        return await run_in_thread(read_uri, source, settings)
    if isinstance(source, bytes):
        return await run_in_thread(read_image, source, settings)
    if _is_picture(source):
        return await run_in_thread(from_pil, source)
    raise PromptError(f"an image must be a URI data:image/…;base64,…, got {type(source).__name__}")


async def _fetched(address: str, settings: ImageSettings) -> bytes:
    """Download an image from an allowed host. Redirects are not followed: they could lead to another host."""
    try:
        host = URL(address).host or ""
    except ValueError:
        host = ""
    if host not in settings.image_hosts:
        allowed = ", ".join(settings.image_hosts) or "none"
        raise PromptError(
            f"an image is at {host:.80}, and images are fetched from the hosts in image_hosts alone ({allowed}): "
            "send it as a URI data:image/…;base64,…"
        )
    max_bytes, data = int(settings.max_image_mb * 1e6), b""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_FETCH_TIMEOUT_S)) as session,
            session.get(address, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise PromptError(f"an image at {host:.80} cannot be fetched: status {answer.status}")
            async for piece in answer.content.iter_chunked(2**16):
                data += piece
                if len(data) > max_bytes:
                    limit = f"max_image_mb, {settings.max_image_mb:g} MB"
                    raise PromptError(f"an image at {host:.80} has more than {limit}: name a smaller one")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise PromptError(f"an image at {host:.80} cannot be fetched: {error or type(error).__name__}") from error
    return data


async def take_images(messages: list[dict[str, Any]], images: Images, settings: ImageSettings) -> tuple[Image, ...]:
    """The images of ``messages``, in order. Messages with content parts are replaced by ``mark_images``."""
    contents = [*map(_CONTENT, messages)]
    for index, content in enumerate(contents) if {*map(type, contents)} != {str} else ():
        if isinstance(content, list) and any(map(is_image, content)):
            messages[index] = await mark_images(messages[index], images, settings)
    prompt_images = images_in(messages, images) if images else ()
    if len(prompt_images) > settings.max_images:
        raise PromptError(f"the conversation shows {len(prompt_images)} images, max_images is {settings.max_images}")
    return prompt_images


async def prepare(tokenizer: Any, images: Sequence[Image]) -> None:
    """Prepare the tokens of these images. Raises ``PromptError`` for a model without image input."""
    if not images:
        return
    if not hasattr(tokenizer, "engine_input"):
        raise PromptError("the model takes no images: its directory has no processor (preprocessor_config.json)")
    await run_in_thread(tokenizer.prepare, images)


def trim_at_changed_image(shared: int, starts: Sequence[int], images: Sequence[Image], earlier: Sequence[Image]) -> int:
    """How many of the first ``shared`` tokens an earlier turn with images ``earlier`` really shares: images of one size
    have equal tokens, so the shared prefix ends at the first image that differs. ``images`` begin at ``starts``."""
    return min((place for place, new, old in zip(starts, images, earlier) if new != old), default=shared)  # noqa: B905
