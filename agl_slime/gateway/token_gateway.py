"""``TokenGateway``: a gateway that others than its runner use."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from agl_slime.agent.access import LLM_RESOURCE, EngineAccess
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.server import Address, Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.store.recording import Recording
from agl_slime.support.agl_types import LLM
from agl_slime.support.net import require_token, same_secret

TOKEN_VARIABLE = "AGL_SLIME_GATEWAY_TOKEN"


class TokenGateway(Gateway):
    """A gateway that others than its runner use: one ``token`` opens all addresses, in ``/k/TOKEN`` or as API key. It
    is optional on a loopback address. Raises ``ConfigError`` without one elsewhere."""

    wrong_key = f"the key is missing or wrong: send the gateway's token ({TOKEN_VARIABLE})"

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
            raise GatewayRequestError(self.wrong_key, status=401, code="invalid_api_key")

    def _record(self, rollout_id: str, attempt_id: str, *, llm: LLM, store: Any, **options: Any) -> Attempt:
        """Begin an attempt whose spans go to ``store``."""
        recording = Recording(rollout_id, attempt_id, store=store, forgets=True)
        attempt = self._attempts[rollout_id, attempt_id] = Attempt(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            roles={LLM_RESOURCE: llm},
            settings=self.settings,
            access=self.access,
            write=recording.add_instant,
            flush=recording.write,
            **options,
        )
        return attempt
