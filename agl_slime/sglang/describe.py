"""What a server says of itself and of its workers, and what a checkpoint on this machine says of itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_slime.errors import EngineProtocolError, EngineRequestError
from agl_slime.sglang.transport import HttpTransport

_DP_RANK = re.compile(r"@\d+/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What a server says of itself."""

    base_url: str
    model_path: str
    weight_version: str


async def ask_server(http: HttpTransport, name: str, **limits: Any) -> dict[str, Any]:
    """A server's ``/model_info`` or ``/server_info``."""
    try:
        return await http.call("GET", f"/{name}", **limits)
    except EngineRequestError as error:
        if error.status not in (404, 405):
            raise
        # sglang-router passes only the older path on, to one of its workers
        return await http.call("GET", f"/get_{name}", **limits)


def version_of(info: Mapping[str, Any], base_url: str) -> str:
    """The weight version in a ``/model_info`` answer."""
    version = info.get("weight_version")
    if version is None:
        raise EngineProtocolError(f"{base_url}/model_info names no weight_version; update SGLang")
    return str(version)


def parse_workers(body: Any, *, where: str = "/workers") -> tuple[str, ...]:
    """A ``/workers`` answer as the workers' URLs, each once, in the answer's order.

    sglang-router 0.3 answers ``{"workers": [{"url": ..., "is_healthy": ...}, ...]}``; unhealthy ones are listed as
    well, since they come back with whatever weights they hold. With data-parallel awareness the URL of each rank ends
    in ``@rank`` and means the same server. Raises ``EngineProtocolError`` for any other form.
    """
    listed = body.get("workers") if isinstance(body, Mapping) else None
    urls = [item.get("url") if isinstance(item, Mapping) else None for item in listed or ()] if listed != [] else []
    if not isinstance(listed, list) or not all(isinstance(url, str) and url.startswith("http") for url in urls):
        raise EngineProtocolError(f"{where} answered {str(body)[:200]}; expected an object with a list of workers")
    return tuple(dict.fromkeys(_DP_RANK.sub("", str(url)).rstrip("/") for url in urls))


def end_token_ids(model: str, tokenizer: Any = None) -> frozenset[int]:
    """The ids that end an answer of ``model``, as SGLang collects them: those of its ``config.json`` and
    ``generation_config.json`` (where ``model`` is a directory of this machine), the tokenizer's own, and Llama's
    ``<|eom_id|>`` where its vocabulary has one."""
    config = _model_file(model, "config.json")
    found: set[int] = set()
    for told in (config, config.get("text_config") or {}, _model_file(model, "generation_config.json")):
        ids = told.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else () if ids is None else (ids,))
    added = getattr(tokenizer, "get_added_vocab", dict)()
    found |= {i for i in (getattr(tokenizer, "eos_token_id", None), added.get("<|eom_id|>")) if i is not None}
    return frozenset(found)


def vocab_size_of(model: str) -> int | None:
    """The vocabulary of the checkpoint at ``model``, where that is a directory of this machine. SGLang does not tell
    its own, and answers an id beyond it with an error that names no cause."""
    config = _model_file(model, "config.json")
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def experts_shape_of(model: str) -> tuple[int, int] | None:
    """(layers, experts per token) of the mixture of experts at ``model``; ``None`` where it is none, or not here."""
    config = _model_file(model, "config.json")
    told = {**config, **(config.get("text_config") or {})}
    layers, top_k = told.get("num_hidden_layers"), told.get("num_experts_per_tok")
    return (layers, top_k) if isinstance(layers, int) and isinstance(top_k, int) else None


def dtype_of(info: Mapping[str, Any]) -> str:
    """What a server computes in, by its ``/server_info``: its ``--dtype``, or with "auto" what the ``config.json`` of
    its model names where that is a directory of this machine; empty where it is not known."""
    if (told := str(info.get("dtype") or "")) != "auto":
        return told
    config = _model_file(str(info.get("model_path")), "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or "")


def _model_file(model: str, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint at ``model``; empty where that is no directory of this machine."""
    try:
        found = json.loads((Path(model) / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
