"""Files in messages: text is read as it is, other media types are refused by name."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from mimetypes import MimeTypes
from typing import Any
from urllib.parse import unquote_to_bytes

from agl_slime.errors import GatewayRequestError

FILE_KINDS = frozenset(("file", "input_file"))

"""Parts with a file, of chat completions and of responses."""

_CHARSETS = frozenset(("charset=utf-8", "charset=us-ascii"))


def file_text(part: Mapping[str, Any], param: str) -> str:
    """The name and the text of a file. Raises ``GatewayRequestError``."""
    file = part.get("file") if part["type"] == "file" else part
    data = file.get("file_data") if isinstance(file, Mapping) else None
    if not isinstance(file, Mapping) or not isinstance(data, str):
        message = f"{param} has a part of type {part['type']!r} without file_data: send data:text/plain;base64,…"
        raise GatewayRequestError(message, param=param)
    name = file["filename"] if isinstance(file.get("filename"), str) else ""
    if not data.startswith("data:"):
        data = f"data:{MimeTypes().guess_type(name)[0] or 'unknown'};base64,{data}"
    return "\n".join(filter(None, (name, text_of_uri(data, param))))


def text_of_uri(uri: str, param: str) -> str:
    """The text of a data URI of a media type text/…, in UTF-8. Raises ``GatewayRequestError``."""
    head, _, content = uri.removeprefix("data:").partition(",")
    media, *parameters = head.lower().replace(" ", "").split(";")
    encoded = parameters[-1:] == ["base64"]
    charsets = {parameter for parameter in parameters if parameter.startswith("charset=")}
    if not media.startswith("text/") or not charsets <= _CHARSETS:
        message = f"{param}: a file of media type {head.removesuffix(';base64')!r:.80} is not read; text in UTF-8 is"
        raise GatewayRequestError(message, param=param)
    try:
        return (base64.b64decode(content, validate=True) if encoded else unquote_to_bytes(content)).decode()
    except ValueError as error:
        raise GatewayRequestError(f"{param}: a file is not text in UTF-8: {error}", param=param) from error
