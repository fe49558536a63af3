"""The control routes of a ``ScriptedEngine``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from tests.harness.engine_faults import Running


class ControlRoutes:
    """What SGLang answers beside ``/generate``; or, with ``workers``, a router."""

    weight_version: str
    model_path: str
    dtype = "auto"
    workers: Sequence[str] | None
    running: Any  # requests between arrival and answer
    _requests: dict[str, Running]
    _waiting: set[str]
    _ended: deque[tuple[int, ...]]
    _paused: bool
    _pause_mode: str
    _unpaused: asyncio.Condition

    async def _control(self, path: str, payload: dict[str, Any]) -> web.StreamResponse:
        handlers: dict[str, Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]]
        handlers = {"/get_model_info": self._model_info}
        if self.workers is not None:
            handlers["/workers"] = self._workers
        else:
            handlers |= {
                "/health": self._health,
                "/model_info": self._model_info,
                "/server_info": self._server_info,
                "/flush_cache": self._flush,
                "/pause_generation": self._pause,
                "/continue_generation": self._continue,
                "/abort_request": self._abort,
                "/update_weights_from_disk": self._update,
            }
        handler = handlers.get(path)
        return web.json_response({"detail": "Not Found"}, status=404) if handler is None else await handler(payload)

    async def _model_info(self, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(
            {"model_path": self.model_path, "is_generation": True, "weight_version": self.weight_version}
        )

    async def _health(self, _: dict[str, Any]) -> web.StreamResponse:
        return web.Response()

    async def _server_info(self, _: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"version": "0.5.15", "dtype": self.dtype, "model_path": self.model_path})

    async def _workers(self, _: dict[str, Any]) -> web.StreamResponse:
        listed = [
            {"id": str(i), "url": url, "worker_type": "regular", "is_healthy": True}
            for i, url in enumerate(self.workers or [])
        ]
        return web.json_response({"workers": listed, "total": len(listed)})

    async def _flush(self, _: dict[str, Any]) -> web.StreamResponse:
        if self.running and not (self._paused and self._pause_mode == "retract"):
            return web.Response(text=f"Flush cache failed: {self.running} running requests.\n", status=400)
        self._ended.clear()
        return web.Response(text="Cache flushed.\n")

    async def _pause(self, payload: dict[str, Any]) -> web.StreamResponse:
        self._paused, self._pause_mode = True, payload.get("mode", "abort")
        if self._pause_mode == "abort":
            for rid, request in self._requests.items():
                if rid not in self._waiting:
                    request.aborted.set()
        return web.json_response({"status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> web.StreamResponse:
        async with self._unpaused:
            self._paused = False
            self._unpaused.notify_all()
        return web.json_response({"status": "ok"})

    async def _abort(self, payload: dict[str, Any]) -> web.StreamResponse:
        for rid, request in self._requests.items():
            if payload.get("abort_all") or rid.startswith(payload["rid"]):
                request.aborted.set()
        return web.Response()

    async def _update(self, payload: dict[str, Any]) -> web.StreamResponse:
        self.model_path = payload["model_path"]
        if payload.get("flush_cache", True) and self.running:
            message = (
                "Weights were updated, but the cache was not flushed because requests are still running or queued."
            )
            return web.json_response({"success": False, "message": message}, status=400)
        self.weight_version = payload.get("weight_version") or self.weight_version
        return web.json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )
