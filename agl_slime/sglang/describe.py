"""What stands at a URL, asked once at start-up, so that a wrong one is one sentence and not a run that fails minutes
later; and what a checkpoint on this machine says of itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_slime.errors import (
    EngineProtocolError,
    EngineRequestError,
    EngineServerError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from agl_slime.sglang.retry import status_of

if TYPE_CHECKING:
    from agl_slime.sglang.client import SGLangClient

_DP_RANK = re.compile(r"@\d+/?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What a server says of itself."""

    base_url: str
    model_path: str
    weight_version: str


async def describe(client: SGLangClient, *, timeout_s: float) -> EngineDescription:
    """Look at the server; see ``SGLangClient.probe``."""
    url = client.base_url
    try:
        # one hiccup is forgiven; an address where nobody listens is told at once
        info = await asyncio.wait_for(client.model_info(timeout_s=timeout_s, max_attempts=2), timeout_s)
        if not isinstance(model_path := info.get("model_path"), str):
            raise EngineProtocolError("its /model_info names no model_path")
        return EngineDescription(base_url=url, model_path=model_path, weight_version=version_of(info, url))
    except (EngineUnreachableError, EngineTimeoutError, asyncio.TimeoutError, TimeoutError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise EngineUnreachableError(
            f"no SGLang at {url}: {why}; check the URL, that the server is up and that no firewall stands between"
        ) from error
    except (EngineRequestError, EngineProtocolError) as error:
        if status_of(error) in (401, 403):
            raise
        raise EngineProtocolError(f"{url} answers but is not SGLang: {error}; check the port") from error
    except EngineServerError as error:
        raise EngineServerError(
            f"{url} answers but does not serve: {error}; check the port, or wait until the server has started"
        ) from error


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


def _model_file(model: str, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint at ``model``; empty where that is no directory of this machine."""
    try:
        found = json.loads((Path(model) / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
