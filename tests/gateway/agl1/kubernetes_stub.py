"""A stand-in for the part of the Kubernetes API that a controller of Agent Lightning 1.0 uses: Jobs are created, listed
and watched, and what a Job's container would do is done by a function of the test. It is no Kubernetes: it schedules,
limits and isolates nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from agl_slime.support.http import listening
from agl_slime.support.threads import run_in_thread

Container = Callable[[dict[str, str]], str]
"""Takes the container's environment and returns ``Complete``, ``Failed``, or ``gone`` for a Job that disappears."""
_JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"


class KubernetesStub:
    def __init__(self, container: Container) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self._container = container
        self._watchers: set[asyncio.Queue[dict[str, Any]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._version = 0

    async def serve(self, kubeconfig: Path, stop: asyncio.Event, ready: Callable[[], Any]) -> None:
        app = web.Application()
        told = {
            "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "groups": [_GROUP]},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
            "/apis/batch/v1": _RESOURCES,
        }
        routes = [("GET", path, self._said(value)) for path, value in told.items()]
        routes += [("GET", _JOBS, self._list), ("POST", _JOBS, self._create), ("GET", _JOBS + "/{name}", self._get)]
        for method, path, handler in routes:
            for end in ("", "/"):
                app.router.add_route(method, path + end, handler)
        async with listening(app, host="127.0.0.1", port=0, backlog=64, shutdown_timeout=0.1) as url:
            kubeconfig.write_text(json.dumps(_kubeconfig(url)))
            ready()
            await stop.wait()
            for task in self._tasks:
                task.cancel()

    def _said(self, value: Any) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(value)

        return handler

    async def _create(self, request: web.Request) -> web.Response:
        job = await request.json()
        name = job["metadata"]["name"]
        if name in self.jobs:
            return web.json_response({"kind": "Status", "reason": "AlreadyExists", "code": 409}, status=409)
        job["metadata"]["uid"] = f"uid-{len(self.created)}"
        self.jobs[name] = job
        self.created.append(json.loads(json.dumps(job)))
        self._tell("ADDED", job)
        task = asyncio.ensure_future(self._run(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return web.json_response(job, status=201)

    async def _run(self, name: str) -> None:
        (container,) = self.jobs[name]["spec"]["template"]["spec"]["containers"]
        outcome = await run_in_thread(self._container, {one["name"]: one["value"] for one in container["env"]})
        if outcome == "gone":
            self._tell("DELETED", self.jobs.pop(name))
            return
        self.jobs[name]["status"] = {
            "conditions": [{"type": outcome, "status": "True", "reason": "BackoffLimitExceeded"}]
        }
        self._tell("MODIFIED", self.jobs[name])

    def _tell(self, kind: str, job: dict[str, Any]) -> None:
        self._version += 1
        job["metadata"]["resourceVersion"] = str(self._version)
        for watcher in self._watchers:
            watcher.put_nowait({"type": kind, "object": json.loads(json.dumps(job))})

    async def _get(self, request: web.Request) -> web.Response:
        job = self.jobs.get(request.match_info["name"])
        return web.json_response(job or {"kind": "Status", "code": 404}, status=200 if job else 404)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") not in ("true", "1"):
            version = {"resourceVersion": str(self._version)}
            jobs = [*self.jobs.values()]
            return web.json_response({"kind": "JobList", "apiVersion": "batch/v1", "metadata": version, "items": jobs})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for job in self.jobs.values():
            events.put_nowait({"type": "ADDED", "object": job})
        self._watchers.add(events)
        try:
            while True:
                await response.write(json.dumps(await events.get()).encode() + b"\n")
        finally:
            self._watchers.discard(events)


_VERSION = {"groupVersion": "batch/v1", "version": "v1"}
_GROUP = {"name": "batch", "versions": [_VERSION], "preferredVersion": _VERSION}
_JOB = {"name": "jobs", "singularName": "job", "namespaced": True, "kind": "Job", "shortNames": []}
_JOB["verbs"] = ["create", "delete", "get", "list", "patch", "watch"]
_RESOURCES = {"kind": "APIResourceList", "groupVersion": "batch/v1", "resources": [_JOB]}


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "stub",
        "clusters": [{"name": "stub", "cluster": {"server": url}}],
        "users": [{"name": "stub", "user": {"token": "stub"}}],
        "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub", "namespace": "default"}}],
    }
