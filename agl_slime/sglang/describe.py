"""What stands at a URL, asked once at start-up, so that a wrong one is one sentence and not a run that fails minutes
later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from agl_slime.sglang.payloads import parse_workers
from agl_slime.sglang.retry import HttpStatusError
from agl_slime.sglang.transport import HttpTransport, Response

T = TypeVar("T")

# An engine that serves answers these within milliseconds; a person waits.
PROBE_TIMEOUT_S = 10.0

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


async def describe(http: HttpTransport, *, timeout_s: float = PROBE_TIMEOUT_S) -> EngineDescription:
    """Look at the server. A failure is one sentence for the person who gave the URL.

    Raises:
        EngineUnreachableError: Nothing listens there, or it does not answer within ``timeout_s``.
        EngineProtocolError: Something answers that is not SGLang.
        EngineServerError: It answers 5xx, as one that is starting may do.
        EngineRequestError: It wants another API key.
    """
    url = http.base_url
    try:
        return await asyncio.wait_for(_describe(http, timeout_s), timeout_s)
    except (EngineUnreachableError, EngineTimeoutError, asyncio.TimeoutError, TimeoutError) as error:
        why = str(error) or f"no answer within {timeout_s:g} s"
        raise EngineUnreachableError(
            f"no SGLang at {url}: {why}; check the URL, that the server is up and that no firewall stands between"
        ) from error
    except EngineRequestError as error:
        if status_of(error) in (401, 403):
            raise
        raise EngineProtocolError(f"{url} answers but is not SGLang: {error}; check the port") from error
    except EngineProtocolError as error:
        raise EngineProtocolError(f"{url} answers but not as SGLang does: {error}; check the port") from error
    except EngineServerError as error:
        raise EngineServerError(
            f"{url} answers but does not serve: {error}; check the port, or wait until the server has started"
        ) from error


async def model_info(
    http: HttpTransport, *, timeout_s: float | None = None, max_attempts: int | None = None
) -> dict[str, Any]:
    """``/model_info``, or ``/get_model_info``: sglang-router passes only the older path on, to one of its workers."""
    return await _either(http, "/model_info", "/get_model_info", timeout_s=timeout_s, max_attempts=max_attempts)


async def server_info(
    http: HttpTransport, *, timeout_s: float | None = None, max_attempts: int | None = None
) -> dict[str, Any]:
    """``/server_info``, or the older ``/get_server_info``."""
    return await _either(http, "/server_info", "/get_server_info", timeout_s=timeout_s, max_attempts=max_attempts)


def weight_version(info: Mapping[str, Any], base_url: str) -> str:
    """The weight version in a ``/model_info`` answer."""
    version = info.get("weight_version")
    if version is None:
        raise EngineProtocolError(f"{base_url}/model_info names no weight_version; update SGLang")
    return str(version)


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind a typed error."""
    return error.__cause__.status if isinstance(error.__cause__, HttpStatusError) else None


async def _describe(http: HttpTransport, timeout_s: float) -> EngineDescription:
    info = await model_info(http, timeout_s=timeout_s, max_attempts=_ATTEMPTS)
    model_path = info.get("model_path")
    if not isinstance(model_path, str):
        raise EngineProtocolError("its /model_info names no model_path")
    workers = await _optional(
        http, "/workers", lambda answer: parse_workers(answer.json(), where=answer.where), timeout_s
    ) or (http.base_url,)
    is_router = any(not _same_server(worker, http.base_url) for worker in workers)
    vocab_size, context_length = await (
        _sizes_of_worker(http, workers[0], timeout_s) if is_router else _sizes(http, info, timeout_s)
    )
    return EngineDescription(
        base_url=http.base_url,
        model_path=model_path,
        weight_version=weight_version(info, http.base_url),
        vocab_size=vocab_size,
        context_length=context_length,
        is_router=is_router,
        workers=workers,
    )


async def _sizes(http: HttpTransport, info: Mapping[str, Any], timeout_s: float) -> tuple[int | None, int | None]:
    """Vocabulary and context length, as far as told: SGLang tells the latter in ``/v1/models``, and in ``/server_info``
    only when it was set at the start."""
    server = await _optional(http, "/server_info", Response.json_object, timeout_s) or {}
    models = await _optional(http, "/v1/models", Response.json_object, timeout_s) or {}
    cards = models.get("data")
    lengths = (
        [card.get("max_model_len") for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []
    )
    return _first(info.get("vocab_size"), server.get("vocab_size")), _first(server.get("context_length"), *lengths)


async def _sizes_of_worker(router: HttpTransport, url: str, timeout_s: float) -> tuple[int | None, int | None]:
    """A router does not tell sizes; its workers do, where we can reach them."""
    worker = HttpTransport(base_url=url, settings=router.settings)
    try:
        return await _sizes(worker, await model_info(worker, timeout_s=timeout_s / 2, max_attempts=1), timeout_s)
    except EngineError:
        return None, None
    finally:
        await worker.aclose()


async def _either(
    http: HttpTransport, path: str, older: str, *, timeout_s: float | None, max_attempts: int | None
) -> dict[str, Any]:
    try:
        return await http.call("GET", path, timeout_s=timeout_s, max_attempts=max_attempts, read=Response.json_object)
    except EngineRequestError as error:
        if status_of(error) not in (404, 405):
            raise
        return await http.call("GET", older, timeout_s=timeout_s, max_attempts=max_attempts, read=Response.json_object)


async def _optional(http: HttpTransport, path: str, read: Callable[[Response], T], timeout_s: float) -> T | None:
    """None when the server does not have the endpoint."""
    try:
        return await http.call("GET", path, timeout_s=timeout_s, max_attempts=_ATTEMPTS, read=read)
    except EngineRequestError:
        return None


def _first(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _same_server(one: str, other: str) -> bool:
    """Whether two URLs mean one server; the names of the loopback address are the same name."""
    places = []
    for url in (one, other):
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname in ("localhost", "::1", "0.0.0.0") else parts.hostname
        places.append((parts.scheme, host, parts.port, parts.path.rstrip("/")))
    return places[0] == places[1]
