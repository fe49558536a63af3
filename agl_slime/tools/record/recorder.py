"""``RecordGateway``: a gateway that records exact tokens for any trainer, without a store or a run.

POST /rollouts                        a new rollout: {"rollout_id", "task", "metadata"}, all optional
…    /rollouts/NAME/v1/…              the protocols; a new NAME begins a rollout
…    /v1/…                            the same, for clients that send NAME in the header X-Session-ID
POST /rollouts/NAME/reward            {"reward": 1.0}, or numbers by name; the last one counts
POST /rollouts/NAME/finish            ends it, also with {"reward": …}; later requests get 410
GET  /rollouts/NAME?format=json       turns and Samples; other formats: agl_slime.tools.record.formats

The recorder's token, in ``/k/TOKEN`` or as API key, opens all of them; the secret that a new rollout's address has
opens the protocols of that rollout only.
"""

from __future__ import annotations

import math
import re
import secrets
import threading
import time
import uuid
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from aiohttp import web

from agl_slime.agent.access import EngineAccess
from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.attempt import Attempt
from agl_slime.gateway.server import Address, TokenGateway, served_paths
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl_types import LLM
from agl_slime.support.http import json_response, parse_json, read_body
from agl_slime.support.net import same_secret
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.reward import UNNAMED
from agl_slime.tools.record.formats import FORMATS
from agl_slime.tools.record.recorded import (
    ATTEMPT,
    NAME,
    RecordedRollout,
    RolloutFile,
    first_reward_name,
    read_reward_value,
)

_SERVICE = re.compile(r"(?:/k/[^/]+)?/rollouts(?:/(?P<rollout>[^/]+)(?:/(?P<action>reward|finish))?)?/?")


class RecordGateway(TokenGateway):
    """Serves ``llm`` under any rollout's name, and writes a file of each rollout to ``directory``.

    Conversations of running rollouts are in memory; a rollout without a request for ``idle_s`` ends, at the latest when
    it is read or another one begins. After a restart the files can be read, and rollouts that ran get 410: their
    conversations are gone. Without a ``token`` the recorder makes one.
    """

    wrong_key = "the key is missing or wrong: send the recorder's token, or use the address that it printed"
    addresses = re.compile(
        r"(?:/k/(?P<secret>[^/]+))?(?:/rollouts/(?P<rollout>[^/]+))?(?:/role/(?P<role>[^/]+))?(?:/v1)*(?P<path>/.*)?",
        re.DOTALL,
    )

    def __init__(
        self,
        *,
        directory: Path,
        llm: LLM,
        idle_s: float = 3600.0,
        token: str | None = None,
        settings: GatewaySettings | None = None,
        access: EngineAccess | None = None,
    ) -> None:
        super().__init__(token=token, settings=settings, access=access)
        self._token = token or secrets.token_urlsafe(18)
        self._directory, self._llm, self._idle_s = directory, llm, idle_s
        self._last_request: dict[str, float] = {}  # of running rollouts, the longest idle first
        self._naming, self._reward_name = threading.Lock(), None

    @property
    def rollouts_url(self) -> str:
        """The address for the trainer, with the token."""
        return f"{self.url}/k/{self._token}/rollouts"

    # -- the gateway's thread -----------------------------------------------------------------------------------------

    async def _find_attempt(self, request: web.Request, address: Address) -> Attempt:
        # verifiers' clients send the rollout in a header, so that one base URL serves all
        if (rollout_id := address.get("rollout") or request.headers.get("X-Session-ID")) is None:
            self._check_token(request, address)
            message = f"the address names no rollout: use {self.url}/rollouts/NAME/v1, or the header X-Session-ID"
            raise GatewayRequestError(message, status=404, code="unknown_rollout")
        if (attempt := self._attempts.get((rollout_id, ATTEMPT))) is None:
            if self._file(rollout_id).path.exists():  # no key opens it
                raise await self._gone(rollout_id)
            self._check_token(request, address)
            if address.get("path") not in served_paths():
                message = f"{request.method} {request.path:.80} is not served, and there is no rollout {rollout_id:.80}"
                raise GatewayRequestError(message, status=404, code="unknown_url")
            attempt = await self._begin(rollout_id, task=None, metadata={})
        elif not any(same_secret(key, attempt.secret) for key in self._keys(request, address)):
            self._check_token(request, address)
        self._last_request.pop(rollout_id, None)  # to the end of the order
        self._last_request[rollout_id] = time.monotonic()
        return attempt

    async def _gone(self, rollout_id: str) -> GatewayRequestError:
        if f"{rollout_id}/{ATTEMPT}" in self._ended or await run_in_thread(self._file(rollout_id).finished):
            return GatewayRequestError(f"rollout {rollout_id} has ended", status=410, code="rollout_ended")
        message = f"rollout {rollout_id} was begun by a recorder that has ended: begin one with another name"
        return GatewayRequestError(message, status=410, code="attempt_lost")

    async def _begin(self, rollout_id: str, *, task: Any, metadata: dict[str, Any]) -> Attempt:
        """Raises ``FileExistsError`` for a name that was used."""
        file = self._file(rollout_id)
        file.create(task=task, metadata=metadata, time=time.time())
        attempt = self._record(rollout_id, ATTEMPT, llm=self._llm, store=file)
        await self._end_idle()
        self._last_request[rollout_id] = time.monotonic()
        return attempt

    async def _end_idle(self) -> None:
        oldest = time.monotonic() - self._idle_s
        for rollout_id, _ in [*takewhile(lambda entry: entry[1] <= oldest, self._last_request.items())]:
            attempt = self._attempts.get((rollout_id, ATTEMPT))
            if self._last_request.get(rollout_id, math.inf) <= oldest and (attempt is None or not attempt.running):
                await self._end(rollout_id, "idle")

    async def _end(self, rollout_id: str, reason: str) -> None:
        file, attempt = self._file(rollout_id), self._attempts.get((rollout_id, ATTEMPT))
        self._last_request.pop(rollout_id, None)
        if attempt is not None and attempt.flush is not None:
            await self.close(attempt)
            await attempt.flush()  # the last span, which counts requests
        elif await run_in_thread(file.finished):
            return
        await run_in_thread(partial(file.append, {"finished": reason}))

    # -- tasks, rewards, Samples --------------------------------------------------------------------------------------

    async def _service_response(self, request: web.Request, path: str, address: Address) -> web.Response | None:
        match = _SERVICE.fullmatch(request.path)
        if match is None or (request.method, match["action"]) not in (
            ("POST", "reward"),
            ("POST", "finish"),
            ("POST" if match["rollout"] is None else "GET", None),
        ):
            return None
        self._check_token(request, address)
        if match["rollout"] is None:
            return await self._create(request)
        file = self._file(match["rollout"])
        if not file.path.exists():
            raise GatewayRequestError(f"there is no rollout {file.rollout_id}", status=404, code="unknown_rollout")
        if match["action"] is None:
            await self._end_idle()
            return await run_in_thread(partial(self._show, file, request.query.get("format", "json")))
        body = await _read_object(request)
        if "reward" in body or match["action"] == "reward":
            await run_in_thread(partial(self._keep_reward, file, body.get("reward")))
        if match["action"] == "finish":
            await self._end(file.rollout_id, "client")
        return json_response({"rollout_id": file.rollout_id})

    async def _create(self, request: web.Request) -> web.Response:
        body = await _read_object(request)
        rollout_id = str(body.get("rollout_id") or f"ro-{uuid.uuid4().hex[:16]}")
        metadata = body.get("metadata") or {}
        if not isinstance(metadata, dict):
            raise GatewayRequestError("metadata is no object: send names with values", param="metadata")
        try:
            attempt = await self._begin(rollout_id, task=body.get("task"), metadata=metadata)
        except FileExistsError:
            message = f"there is a rollout {rollout_id}: take another name, or none"
            raise GatewayRequestError(message, status=409, code="rollout_exists", param="rollout_id") from None
        endpoint = f"{self.url}/k/{attempt.secret}/rollouts/{rollout_id}/v1"
        content = {"rollout_id": rollout_id, "endpoint": endpoint, "api_key": attempt.secret}
        return json_response(content, status=201)

    def _keep_reward(self, file: RolloutFile, value: Any) -> None:
        """Write a reward, of several names the one that is trained on first: one name for all rollouts of the
        directory, which the first of them decides. Raises ``GatewayRequestError``."""
        with self._naming:
            if self._reward_name is None and isinstance(value, dict):
                self._reward_name = first_reward_name(self._directory)
            reward = read_reward_value(value, run_key=self._reward_name)
            if isinstance(value, dict):
                value = dict(reward.named)
                self._reward_name = next(iter(value)) if [*value] != [UNNAMED] else self._reward_name
            file.append({"reward": value})

    def _show(self, file: RolloutFile, form: str) -> web.Response:
        if form not in FORMATS:
            raise GatewayRequestError(f"format {form!r:.40} is not one of {', '.join(FORMATS)}", param="format")
        running = (file.rollout_id, ATTEMPT) in self._attempts
        return json_response(FORMATS[form](RecordedRollout.read(file, running=running)))

    def _file(self, rollout_id: str) -> RolloutFile:
        if NAME.fullmatch(rollout_id) is None:
            message = f"rollout name {rollout_id!r:.80} is not 1 to 128 of A-Z a-z 0-9 . _ : - after a letter or digit"
            raise GatewayRequestError(message, status=404, code="unknown_rollout", param="rollout_id")
        return RolloutFile(self._directory, rollout_id)


async def _read_object(request: web.Request) -> dict[str, Any]:
    """The body, a JSON object or nothing. Raises ``GatewayRequestError``."""
    try:
        body = await read_body(request, lambda raw: parse_json(raw) if raw.strip() else {})
    except ValueError as error:
        raise GatewayRequestError(str(error)) from error
    if not isinstance(body, dict):
        raise GatewayRequestError("the body is no JSON object")
    return body
