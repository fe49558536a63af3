"""slime's data sets (``--prompt-data``, ``--eval-prompt-data``) as tasks, read by slime's keys."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

from agl_slime.errors import ConfigError, PromptError
from agl_slime.loop.task_files import read_rows, without_bytes
from agl_slime.tokens.tokenizer import has_chat_template, render_chat

DEFAULT_INPUT_KEY = "input"
_IMAGE_MARK = "<image>"  # slime's, in a prompt's text, for the next image of the row
_JPEG = b"\xff\xd8\xff"


class PromptData(BaseModel):
    """slime's flags for a data set; ``None`` is slime's default of a key that need not be there.

    A row becomes the task ``{**metadata, **row, **metadata_overrides, "prompt": …, "label": …, "tools": […]}``. Images
    replace their marks in the prompt, as content parts, and their column is left out.
    """

    model_config = ConfigDict(frozen=True)

    path: str
    input_key: Annotated[str, BeforeValidator(lambda key: DEFAULT_INPUT_KEY if key is None else key)] = (
        DEFAULT_INPUT_KEY
    )
    label_key: str | None = None
    metadata_key: str | None = "metadata"
    metadata_overrides: Mapping[str, Any] = {}
    tool_key: str | None = "tools"
    multimodal_keys: Mapping[str, str] | None = None
    max_prompt_len: int | None = None
    """Rows whose prompt has more tokens are left out."""
    shuffle: bool = False

    def read(self, tokenizer: Any = None, *, flag: str = "--prompt-data") -> list[dict[str, Any]]:
        """The tasks. ``tokenizer`` counts tokens for ``max_prompt_len``. Raises ``ConfigError``."""
        if unread := sorted({*(self.multimodal_keys or ())} - {"image"}):
            raise ConfigError(f"--multimodal-keys names {unread[0]!r}: agl-slime reads images alone; leave it out")
        rows = [self._task(row, place) for place, row in read_rows(self.path, flag=flag)]
        tasks = [task for task in rows if self._fits(task, tokenizer)]
        if not tasks:
            long = f", as no prompt has at most {self.max_prompt_len} tokens (--rollout-max-prompt-len)" if rows else ""
            raise ConfigError(f"{flag} {self.path}: contains no tasks{long}")
        return tasks

    def _task(self, row: Any, place: str) -> dict[str, Any]:
        if not isinstance(row, dict):
            raise ConfigError(f"{place}: expected an object, got {type(row).__name__}")
        metadata = row.get(self.metadata_key or "")
        task = {**(metadata if isinstance(metadata, dict) else {}), **row, **self.metadata_overrides}
        # the default key is often absent where the agent's own build_prompt reads another one
        if self.input_key in row or self.input_key != DEFAULT_INPUT_KEY:
            task["prompt"] = _value(row, self.input_key, "--input-key", place)
        if self.label_key is not None:
            task["label"] = _value(row, self.label_key, "--label-key", place)
        if self.tool_key is not None and row.get(self.tool_key) is not None:
            task["tools"] = _tools(row[self.tool_key], f"{place}: {self.tool_key}")
        if self.multimodal_keys:
            images = task.pop(self.multimodal_keys["image"], None)
            images = images if isinstance(images, list) else [] if images is None else [images]
            task["prompt"] = _with_images(task.get("prompt"), [_image(image, place) for image in images], place)
        if "messages" in task and "prompt" in task:  # agents take messages first
            del task["messages"]
            task |= {"messages": task["prompt"]} if isinstance(task["prompt"], list) else {}
        return without_bytes(task, place)

    def _fits(self, task: Mapping[str, Any], tokenizer: Any) -> bool:
        """Whether the prompt has at most ``max_prompt_len`` tokens. Prompts with images, and prompts that the chat
        template refuses (which fail as rollouts), are not counted."""
        prompt = task.get("prompt")
        if self.max_prompt_len is None or tokenizer is None:
            return True
        if isinstance(prompt, str) and has_chat_template(tokenizer):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list):
            if not all(isinstance(message, dict) and _text(message) == message.get("content") for message in prompt):
                return True
            try:
                prompt = render_chat(tokenizer, prompt, tools=task.get("tools"), generation_prompt=True)
            except PromptError:
                return True
        ids = tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else ()
        return len(ids) <= self.max_prompt_len


def _value(row: Mapping[str, Any], key: str, flag: str, place: str) -> Any:
    if key not in row:
        raise ConfigError(f"{place}: there is no {key!r}, which {flag} names; it has {', '.join(row) or 'nothing'}")
    return row[key]


def _tools(value: Any, place: str) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON ({error})") from error
    if not isinstance(value, list):
        raise ConfigError(f"{place} is no list of tools, but {type(value).__name__}")
    return value


def _image(value: Any, place: str) -> dict[str, Any]:
    """A content part with an image: a path, a URL, base64 with or without ``data:``, a record of the datasets library
    (``bytes``, ``path``), or a part as it stands."""
    rest: dict[str, Any] = {}
    if isinstance(value, dict):
        rest = {name: inner for name, inner in value.items() if name not in ("bytes", "path", "image")}
        value = value.get("image") or value.get("bytes") or value.get("path")
    if isinstance(value, str) and not value.startswith(("data:", "http://", "https://")):
        value = _bytes_of(value, place)
    if isinstance(value, bytes):
        kind = "jpeg" if value.startswith(_JPEG) else "png"
        value = f"data:image/{kind};base64,{base64.b64encode(value).decode()}"
    if not isinstance(value, str):
        raise ConfigError(f"{place}: an image is {type(value).__name__}, and not a path, a URL, base64 or bytes")
    return {**rest, "type": "image", "image": value}


def _bytes_of(value: str, place: str) -> bytes:
    try:
        if len(value) < 4096 and Path(value).is_file():
            return Path(value).read_bytes()
        return base64.b64decode(value, validate=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{place}: the image {value:.60} is neither a file nor base64") from error


def _with_images(prompt: Any, images: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    """The prompt as messages, in which each mark is the next image."""
    prompt_messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or ()
    messages: list[dict[str, Any]] = [*map(dict, prompt_messages)]
    marks = sum(text.count(_IMAGE_MARK) for text in map(_text, messages))
    if marks != len(images):
        raise ConfigError(f"{place}: the prompt has {marks} times {_IMAGE_MARK}, and the row {len(images)} images")
    following = iter(images)
    for message in messages:
        if _IMAGE_MARK in _text(message):
            pieces = filter(None, re.split(f"({_IMAGE_MARK})", message["content"]))
            message["content"] = [
                next(following) if piece == _IMAGE_MARK else {"type": "text", "text": piece} for piece in pieces
            ]
    return messages


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
