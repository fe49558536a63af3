"""The policy as a Hugging Face causal LM: loading it, its logits where they are needed, and checkpoints that SGLang
reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from agl_slime.errors import ConfigError

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?")


def load_model(directory: Path, *, device: torch.device) -> PreTrainedModel:
    """The checkpoint's causal LM in float32 and evaluation mode (dropout would make the trainer's log-probs differ from
    the engine's). Raises ``ConfigError`` when ``directory`` holds no readable and complete one."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model_path {directory} holds no config.json; give the directory of a checkpoint.")
    try:
        with _no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the checkpoint in {directory} cannot be loaded: {error}") from error
    model, info = loaded
    if info["missing_keys"]:  # transformers would fill them with random numbers
        missing = sorted(info["missing_keys"])
        raise ConfigError(f"the checkpoint in {directory} lacks {len(missing)} weights of its model, as {missing[0]}.")
    return model.to(device).eval()


def logits_at(model: PreTrainedModel, input_ids: Tensor, *, rows: Tensor, columns: Tensor) -> Tensor:
    """The logits at ``N`` positions ``(rows, columns)`` of ``input_ids`` ``[B, T]``: ``[N, vocabulary]``.

    The hidden states are picked right before the output layer, so no other logits are ever computed, and what a model
    does to its logits afterwards (scaling, soft-capping) still happens.
    """

    def pick(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0][rows, columns].unsqueeze(0), *args[1:])

    output_layer: Any = model.get_output_embeddings()
    hook = output_layer.register_forward_pre_hook(pick)
    try:
        return model(input_ids=input_ids, use_cache=False).logits.squeeze(0)
    finally:
        hook.remove()


def save_model(model: PreTrainedModel, directory: Path, *, source: Path) -> None:
    """Write the weights as safetensors, and every other file of the checkpoint in ``source`` (config, tokenizer, chat
    template) as it is there, but for ``agl_slime_...``, which say how the weights in ``source`` were made."""
    with _no_progress_bars():
        model.save_pretrained(directory)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith((".", "agl_slime_")) and not _WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, directory / path.name)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
