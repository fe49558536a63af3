"""Descriptions of a server, of its workers, and of a checkpoint on this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_slime.engine.client.generation import version_of
from agl_slime.errors import EngineProtocolError

_DP_RANK = re.compile(r"@\d+/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """A server's model and weight version, as its ``/model_info`` gives them."""

    base_url: str
    model_path: str
    weight_version: str


def engine_version(info: Mapping[str, Any], base_url: str) -> str:
    """The weight version in a server's ``/model_info``."""
    version = version_of(info, f"{base_url}/model_info")
    if version is None:
        raise EngineProtocolError(f"{base_url}/model_info names no weight_version; update SGLang")
    return version


def parse_workers(body: Any, *, endpoint: str = "/workers") -> tuple[str, ...]:
    """A ``/workers`` answer as the workers' URLs, each once, in the answer's order.

    sglang-router 0.3 answers ``{"workers": [{"url": ..., "is_healthy": ...}, ...]}``; unhealthy ones are listed as
    well, since they come back with the weights they had. With data-parallel awareness the URL of each rank ends
    in ``@rank`` and means the same server. Raises ``EngineProtocolError`` for any other form.
    """
    listed = body.get("workers") if isinstance(body, Mapping) else None
    urls = [item.get("url") if isinstance(item, Mapping) else None for item in listed or ()] if listed != [] else []
    if not isinstance(listed, list) or not all(isinstance(url, str) and url.startswith("http") for url in urls):
        raise EngineProtocolError(f"{endpoint} answered {str(body)[:200]}; expected an object with a list of workers")
    return tuple(dict.fromkeys(_DP_RANK.sub("", str(url)).rstrip("/") for url in urls))


def end_token_ids(model: str, tokenizer: Any = None) -> frozenset[int]:
    """The ids that end an answer of ``model``, collected as SGLang does: from its ``config.json`` and
    ``generation_config.json`` (where ``model`` is a directory of this machine), from the tokenizer, and Llama's
    ``<|eom_id|>`` where the vocabulary has it."""
    config = _model_file(model, "config.json")
    end_ids: set[int] = set()
    for source in (config, config.get("text_config") or {}, _model_file(model, "generation_config.json")):
        ids = source.get("eos_token_id")
        end_ids.update(ids if isinstance(ids, list) else () if ids is None else (ids,))
    added = getattr(tokenizer, "get_added_vocab", dict)()
    end_ids |= {i for i in (getattr(tokenizer, "eos_token_id", None), added.get("<|eom_id|>")) if i is not None}
    return frozenset(end_ids)


def vocab_size_of(model: str, tokenizer: Any = None) -> int | None:
    """The vocabulary size of the checkpoint at ``model``, if that is a directory of this machine, else one above the
    tokenizer's largest id. SGLang does not report its own, and its error for an id beyond it names no cause."""
    config = _model_file(model, "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if isinstance(size, int) and size > 0:
        return size
    added = getattr(tokenizer, "get_added_vocab", dict)()
    return max(len(tokenizer), *(token + 1 for token in added.values()), 1) if hasattr(tokenizer, "__len__") else None


def experts_shape_of(model: str) -> tuple[int, int] | None:
    """(layers, experts per token) of the mixture of experts at ``model``; ``None`` if it is dense, or elsewhere."""
    config = _model_file(model, "config.json")
    text_config = {**config, **(config.get("text_config") or {})}
    layers, top_k = text_config.get("num_hidden_layers"), text_config.get("num_experts_per_tok")
    return (layers, top_k) if isinstance(layers, int) and isinstance(top_k, int) else None


def dtype_of(info: Mapping[str, Any]) -> str:
    """The dtype of a server by its ``/server_info``: its ``--dtype``, or with "auto" the dtype in the ``config.json``
    of its model where that is a directory of this machine; empty where it is unknown."""
    if (dtype := str(info.get("dtype") or "")) != "auto":
        return dtype
    config = _model_file(str(info.get("model_path")), "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _model_file(model: str, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint at ``model``; empty where that is no directory of this machine."""
    try:
        content = json.loads((Path(model) / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
