"""Images that agents and their clients show: read from the parts of messages, which get their marks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from operator import methodcaller
from typing import Any

import aiohttp
from yarl import URL

from agl_slime.errors import PromptError
from agl_slime.sglang.generation import ImageInput
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.images import Image, ImageSettings, from_pil, images_in, read_image, read_uri

_KINDS = frozenset(("image_url", "input_image", "image"))
_FETCH_TIMEOUT_S = 20.0
_SHOWS = frozenset(("user", "tool"))
_CONTENT = methodcaller("get", "content")
Images = MutableMapping[str, Image]


def is_image(part: Any) -> bool:
    """Whether a part of a content is an image, in OpenAI's forms, Anthropic's or that of Hugging Face's templates."""
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def parts_with_images(value: Any) -> list[Any] | None:
    """What a tool returned as the parts of a message, where it shows pictures (PIL's, or parts); else ``None``."""
    listed = value if isinstance(value, list) else [value]
    if not any(is_image(item) or _is_picture(item) for item in listed):
        return None
    return [_as_part(item) for item in listed]


def _is_picture(value: Any) -> bool:
    return hasattr(value, "convert") and hasattr(value, "getexif")


def _as_part(item: Any) -> Any:
    if _is_picture(item):
        return {"type": "image", "image": item}
    return {"type": "text", "text": item} if isinstance(item, str) else item


async def marked(message: Mapping[str, Any], images: Images, settings: ImageSettings) -> dict[str, Any]:
    """``message`` with marks in the place of the images in its content, which is one text then, as its parts follow one
    another; they go into ``images``. Raises ``PromptError`` for one that is not allowed."""
    if message.get("role") not in _SHOWS:
        raise PromptError(
            f"a message of role {message.get('role')!r:.40} shows an image: users' and tools' messages may"
        )
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
    """The image of a part."""
    given: Any = part.get("image_url", part.get("image", part.get("source")))
    if isinstance(given, Mapping):
        anthropics = f"data:{given.get('media_type')};base64,{given.get('data')}"
        given = anthropics if given.get("type") == "base64" else given.get("url")
    if isinstance(given, str) and given.startswith(("http://", "https://")):
        return await run_in_thread(read_image, await _fetched(given, settings), settings)
    if isinstance(given, str):
        return await run_in_thread(read_uri, given, settings)
    if isinstance(given, bytes):
        return await run_in_thread(read_image, given, settings)
    if _is_picture(given):
        return await run_in_thread(from_pil, given)
    raise PromptError(f"an image must be a URI data:image/…;base64,…, got {type(given).__name__}")


async def _fetched(address: str, settings: ImageSettings) -> bytes:
    """What is at an address of a host that is allowed; other hosts are not asked, nor where it redirects to."""
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
    most, data = int(settings.max_image_mb * 1e6), b""
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_FETCH_TIMEOUT_S)) as session,
            session.get(address, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise PromptError(f"an image at {host:.80} cannot be fetched: status {answer.status}")
            async for piece in answer.content.iter_chunked(2**16):
                data += piece
                if len(data) > most:
                    told = f"an image at {host:.80} has more than max_image_mb, {settings.max_image_mb:g} MB"
                    raise PromptError(f"{told}: name a smaller one")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise PromptError(f"an image at {host:.80} cannot be fetched: {error or type(error).__name__}") from error
    return data


async def take_images(messages: list[dict[str, Any]], images: Images, settings: ImageSettings) -> tuple[Image, ...]:
    """The images that ``messages`` show, in their order; those in parts get their marks."""
    contents = [*map(_CONTENT, messages)]
    for at, content in enumerate(contents) if {*map(type, contents)} != {str} else ():
        if isinstance(content, list) and any(map(is_image, content)):
            messages[at] = await marked(messages[at], images, settings)
    shown = images_in(messages, images) if images else ()
    if len(shown) > settings.max_images:
        raise PromptError(f"the conversation shows {len(shown)} images, max_images is {settings.max_images}")
    return shown


async def prepare(tokenizer: Any, images: Sequence[Image]) -> None:
    """Have the tokens of these images ready. Raises ``PromptError`` where the model reads none."""
    if not images:
        return
    if not hasattr(tokenizer, "engine_input"):
        raise PromptError("the model's directory has no processor (preprocessor_config.json): it reads no images")
    await run_in_thread(tokenizer.prepare, images)


async def engine_input(
    tokenizer: Any, prompt_ids: Sequence[int], images: Sequence[Image]
) -> tuple[ImageInput, list[int]]:
    """What the engine gets for a prompt that shows ``images``, and where each begins."""
    return await run_in_thread(tokenizer.engine_input, prompt_ids, images)


def kept_before(kept: int, places: Sequence[int], now: Sequence[Image], before: Sequence[Image]) -> int:
    """How many of ``kept`` tokens of an earlier turn stand: two images of one size have the same tokens, so those from
    the first image on that differs do not. ``before`` are that turn's images, ``now`` begin at ``places``."""
    return min((at for at, new, old in zip(places, now, before) if new != old), default=kept)  # noqa: B905
