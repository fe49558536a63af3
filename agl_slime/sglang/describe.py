"""What stands at a URL, asked once at start-up, so that a wrong one is one sentence and not a run that fails minutes
later; and what a checkpoint on this machine says of itself."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from agl_slime.errors import (
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EngineServerError,
    EngineTimeoutError,
    EngineUnreachableError,
)
from agl_slime.sglang.retry import status_of
from agl_slime.sglang.transport import HttpTransport, Response

T = TypeVar("T")

_DP_RANK = re.compile(r"@\d+/?$")

# One hiccup is forgiven; an address where nobody listens is told at once.
_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDescription:
    """What a server says of itself. ``vocab_size`` and ``context_length`` are None when it does not tell (SGLang does
    not tell its vocabulary)."""

    base_url: str
    model_path: str
    weight_version: str
    vocab_size: int | None
    context_length: int | None
    is_router: bool
    workers: tuple[str, ...]


async def describe(http: HttpTransport, *, timeout_s: float) -> EngineDescription:
    """Look at the server; see ``SGLangClient.probe``."""
    url = http.base_url
    try:
        return await asyncio.wait_for(_describe(http, timeout_s), timeout_s)
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


async def model_info(http: HttpTransport, **limits: Any) -> dict[str, Any]:
    """``/model_info``, or ``/get_model_info``: sglang-router passes only the older path on, to one of its workers."""
    try:
        return await http.call("GET", "/model_info", read=Response.json_object, **limits)
    except EngineRequestError as error:
        if status_of(error) not in (404, 405):
            raise
        return await http.call("GET", "/get_model_info", read=Response.json_object, **limits)


def version_of(info: Mapping[str, Any], base_url: str) -> str:
    """The weight version in a ``/model_info`` answer."""
    version = info.get("weight_version")
    if version is None:
        raise EngineProtocolError(f"{base_url}/model_info names no weight_version; update SGLang")
    return str(version)


async def find_workers(http: HttpTransport) -> tuple[str, ...]:
    """See ``SGLangClient.workers``."""
    workers = await _optional(http, "/workers", lambda answer: parse_workers(answer.json(), where=answer.where))
    if workers is not None and not workers:
        raise EngineProtocolError(
            f"the router at {http.base_url} has no workers; start some with --worker-urls, or by POST /workers"
        )
    return workers or (http.base_url,)


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
    return _first(config.get("vocab_size"), (config.get("text_config") or {}).get("vocab_size"))


def _model_file(model: str, name: str) -> dict[str, Any]:
    """A JSON file of the checkpoint at ``model``; empty where that is no directory of this machine."""
    try:
        found = json.loads((Path(model) / name).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


async def _describe(http: HttpTransport, timeout_s: float) -> EngineDescription:
    info = await model_info(http, timeout_s=timeout_s, max_attempts=_ATTEMPTS)
    model_path = info.get("model_path")
    if not isinstance(model_path, str):
        raise EngineProtocolError("its /model_info names no model_path")
    workers = await find_workers(http)
    is_router = any(_place(worker) != _place(http.base_url) for worker in workers)
    vocab_size, context_length = await (
        _sizes_of_worker(http, workers[0], timeout_s) if is_router else _sizes(http, info, timeout_s)
    )
    return EngineDescription(
        base_url=http.base_url,
        model_path=model_path,
        weight_version=version_of(info, http.base_url),
        vocab_size=vocab_size,
        context_length=context_length,
        is_router=is_router,
        workers=workers,
    )


async def _sizes(http: HttpTransport, info: Mapping[str, Any], timeout_s: float) -> tuple[int | None, int | None]:
    """Vocabulary and context length, as far as told: SGLang tells the latter in ``/v1/models``, and in ``/server_info``
    only when it was set at the start."""
    limits: dict[str, Any] = {"timeout_s": timeout_s, "max_attempts": _ATTEMPTS}
    server = await _optional(http, "/server_info", Response.json_object, **limits) or {}
    cards = (await _optional(http, "/v1/models", Response.json_object, **limits) or {}).get("data")
    cards = [card for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []
    lengths = (server.get("context_length"), *(card.get("max_model_len") for card in cards))
    return _first(info.get("vocab_size"), server.get("vocab_size")), _first(*lengths)


async def _sizes_of_worker(router: HttpTransport, url: str, timeout_s: float) -> tuple[int | None, int | None]:
    """A router does not tell sizes; its workers do, where we can reach them."""
    worker = HttpTransport(base_url=url, settings=router.settings)
    try:
        return await _sizes(worker, await model_info(worker, timeout_s=timeout_s / 2, max_attempts=1), timeout_s)
    except EngineError:
        return None, None
    finally:
        await worker.aclose()


async def _optional(http: HttpTransport, path: str, read: Callable[[Response], T], **limits: Any) -> T | None:
    """None when the server does not have the endpoint."""
    try:
        return await http.call("GET", path, read=read, **limits)
    except EngineRequestError:
        return None


def _first(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _place(url: str) -> tuple[Any, ...]:
    """The server that a URL means; the names of the loopback address are the same name."""
    parts = urlsplit(url)
    host = "127.0.0.1" if parts.hostname in ("localhost", "::1", "0.0.0.0") else parts.hostname
    return parts.scheme, host, parts.port, parts.path.rstrip("/")
