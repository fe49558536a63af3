"""A tokenizer that expands the marks of ``tokens.images`` to the tokens of images, with the model's own processor.

The chat template writes a few tokens for an image, the processor one for each patch. Prompts and Samples have the
processor's tokens. The engine gets the template's few and expands them itself; each answer is checked for the same
count.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from agl_slime.engine.client.generation import ImageInput
from agl_slime.errors import ConfigError, PromptError
from agl_slime.tokens.codec import find_ids, token_array
from agl_slime.tokens.images import MARK, Image, images_in_use
from agl_slime.tokens.tokenizer import render_chat

logger = logging.getLogger(__name__)

_CONFIGS = ("preprocessor_config.json", "processor_config.json")
_BEFORE, _AFTER = "SENTINELbefore", "SENTINELafter"
# slime's arguments of processors: ids as lists, the rest as tensors
_PROCESSOR_OPTIONS: dict[str, Any] = {
    "text_kwargs": {"return_tensors": None, "add_special_tokens": False},
    "images_kwargs": {"return_tensors": "pt"},
    "return_mm_token_type_ids": False,
}
_NOT_FOR_TRAINING = frozenset(("input_ids", "attention_mask"))
_MAX_EXPANSIONS = 4096  # a few hundred bytes to some kB each
_MAX_TRAIN_INPUTS = 4  # tens of MB each; the Samples of a group have the same images


def has_image_processor(path: str | Path) -> bool:
    """Whether the model at ``path`` has an image processor."""
    return any((Path(path) / name).is_file() for name in _CONFIGS)


class VisionTokenizer:
    """``tokenizer``, whose ``encode`` replaces image marks by the text of ``processor``. Thread-safe."""

    def __init__(self, tokenizer: Any, processor: Any = None, *, path: str | Path = "") -> None:
        self._tokenizer, self._given_processor, self._path = tokenizer, processor, str(path)
        self._texts: dict[str, str] = {}  # by the image's hash, the latest last
        self._train_inputs: dict[tuple[str, ...], dict[str, Any] | None] = {}
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __reduce__(self) -> Any:
        return functools.partial(VisionTokenizer, path=self._path), (self._tokenizer, self._given_processor)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        if "\ufdd0" in text:
            text = MARK.sub(lambda mark: self._text(mark[1]) or mark[0], text)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def prepare(self, images: Iterable[Image]) -> None:
        """Compute the tokens of these images, as slow as decoding each picture. Raises ``PromptError`` if the model's
        template or processor accepts no images."""
        for image in images:
            self._text_of(image)

    def engine_input(self, prompt_ids: Sequence[int], images: Sequence[Image]) -> tuple[ImageInput, list[int]]:
        """The engine's input for a prompt with ``images``, and the place of each in ``prompt_ids``. Raises
        ``PromptError`` if the prompt has other images, as when a template omits or moves one."""
        prompt = token_array(prompt_ids, name="prompt_ids").tobytes()
        written = self.encode(self._written)
        sent: list[int] = []
        places: list[int] = []
        end, outside = 0, []
        for image in images:
            ids = token_array(self.encode(self._text_of(image)), name="an image's ids")
            start = find_ids(prompt, ids.tobytes(), end)
            if start < 0:
                raise PromptError("the chat template omits an image, or moves it: it cannot be trained on")
            sent += [*prompt_ids[end:start], *written]
            outside += prompt_ids[end:start]
            places.append(start)
            end = start + len(ids)
        outside += prompt_ids[end:]
        if (mark := getattr(self._processor, "image_token_id", None)) is not None and mark in outside:
            token = self._tokenizer.convert_ids_to_tokens(mark)
            raise PromptError(f"the conversation has the image token {token} as text: remove it")
        return ImageInput(tuple(image.uri for image in images), (*sent, *prompt_ids[end:])), places

    def train_inputs(self, pictures: Sequence[Any], key: tuple[str, ...]) -> dict[str, Any] | None:
        """``multimodal_train_inputs`` of a Sample with these PIL images: the processor's tensors, in their order,
        shared by the Samples of the same ``key``, the images' hashes."""
        with self._lock:
            if key not in self._train_inputs:
                inputs = self._process(self._written * len(pictures), pictures)
                self._train_inputs[key] = {k: v for k, v in inputs.items() if k not in _NOT_FOR_TRAINING} or None
            self._train_inputs[key] = self._train_inputs.pop(key)
            while len(self._train_inputs) > _MAX_TRAIN_INPUTS:
                del self._train_inputs[next(iter(self._train_inputs))]
            return self._train_inputs[key]

    # -- inside -------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _processor(self) -> Any:
        return self._given_processor if self._given_processor is not None else _load_processor(self._path)

    @functools.cached_property
    def _written(self) -> str:
        """The chat template's text for an image."""
        content_parts = [{"type": "text", "text": _BEFORE}, {"type": "image"}, {"type": "text", "text": _AFTER}]
        both = ({"role": "user", "content": content} for content in (content_parts, _BEFORE + _AFTER))
        rendered, plain = (render_chat(self._tokenizer, [message]) for message in both)
        written = rendered.partition(_BEFORE)[2].rpartition(_AFTER)[0]
        if not written or rendered.replace(written, "", 1) != plain:
            reason = "writes nothing for an image" if not written else "writes messages with images differently"
            raise PromptError(f"the model's chat template {reason}: images cannot be sent to it")
        return written

    def _text(self, sha: str) -> str | None:
        if (text := self._texts.get(sha)) is None and (image := images_in_use.get(sha)) is not None:
            text = self._text_of(image)
        return text

    def _text_of(self, image: Image) -> str:
        """The processor's text for ``image``."""
        if (text := self._texts.get(image.sha)) is not None:
            return text
        with self._lock:
            ids = list(self._process(self._written, [image.open()])["input_ids"][0])
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            if self.encode(text) != ids:
                raise PromptError("the processor's tokens of an image do not survive decoding: it cannot be sent")
            self._texts[image.sha] = text
            while len(self._texts) > _MAX_EXPANSIONS:
                del self._texts[next(iter(self._texts))]
        return text

    def _process(self, text: str, pictures: Sequence[Any]) -> Any:
        try:
            return self._processor(text=[text], images=list(pictures), **_PROCESSOR_OPTIONS)
        except (ImportError, TypeError, ValueError, OSError) as error:
            raise PromptError(f"the model's processor cannot read an image: {str(error)[:300]}") from error


def _load_processor(path: str) -> Any:
    from transformers import AutoProcessor

    try:
        try:
            processor = AutoProcessor.from_pretrained(path)
        except ImportError:  # the video processor, which is not used, needs torchvision
            processor = _without_videos(path)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"no image processor can be loaded from {path!r}: {reason}") from error
    if not hasattr(processor, "image_processor"):
        raise ConfigError(f"the processor of {path!r} is a {type(processor).__name__}, which reads no images")
    return processor


def _without_videos(path: str) -> Any:
    """The processor of a model without its video processor, whose dependencies are not installed."""
    import transformers

    pictures = transformers.AutoImageProcessor.from_pretrained(path)
    files = (Path(path) / name for name in _CONFIGS)
    configs = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file()]
    name = next((config["processor_class"] for config in configs if "processor_class" in config), "")
    base: Any = getattr(transformers, name)

    class ImagesOnly(base):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return None if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    return ImagesOnly(image_processor=pictures, tokenizer=transformers.AutoTokenizer.from_pretrained(path))
