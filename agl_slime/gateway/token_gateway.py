"""``TokenGateway``: a gateway that others than its runner use, and the spans of its answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from aiohttp import web

from agl_slime.agent.access import EngineAccess
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.server import Address, Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.store.recording import SpanBuilder
from agl_slime.support.agl_types import Span, SpanCoreFields, TraceStatus
from agl_slime.support.net import require_token, same_secret

TOKEN_VARIABLE = "AGL_SLIME_GATEWAY_TOKEN"


class TokenGateway(Gateway):
    """A gateway that others than its runner use: one ``token`` opens all addresses, in ``/k/TOKEN`` or as API key. It
    is optional on a loopback address. Raises ``ConfigError`` without one elsewhere."""

    def __init__(
        self, *, token: str | None, settings: GatewaySettings | None = None, access: EngineAccess | None = None
    ) -> None:
        super().__init__(settings, access=access)
        require_token(self.settings.host, token, setting=TOKEN_VARIABLE)
        self._token = token

    def _is_authorized(self, request: web.Request, address: Address) -> bool:
        return not self._token or any(same_secret(key, self._token) for key in self._keys(request, address))

    def _check_token(self, request: web.Request, address: Address) -> None:
        if not self._is_authorized(request, address):
            message = f"the key is missing or wrong: send the gateway's token ({TOKEN_VARIABLE})"
            raise GatewayRequestError(message, status=401, code="invalid_api_key")


def span_builder(name: str, attributes: dict[str, Any], at: float) -> SpanBuilder:
    """A zero-duration span for a ``Recording``."""
    status = TraceStatus(status_code="OK")
    core = SpanCoreFields(name=name, attributes=attributes, status=status, start_time=at, end_time=at)
    return partial(Span.from_core_fields, core)
