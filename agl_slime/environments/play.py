"""``Player``: plays verifiers' episodes, each for one rollout, whose address gets the model calls. Runs in the Python
that has verifiers."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

import httpx
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.configs.agent import agent_config_fields

from agl_slime.environments.runtimes.lending import install, lend_boxes, max_episodes, parse_boxes
from agl_slime.environments.taskset import Finder, build_environment, load_splits

# Variables from which verifiers reads keys here. It hides names with API_KEY from the programs that episodes start,
# which could post rewards with the run's key.
KEY_VARIABLE, OTHERS_KEY_VARIABLE = "AGL_RUN_API_KEY", "AGL_ENV_MODEL_API_KEY"
_RENAMED = {"AGL_KEY": KEY_VARIABLE, "AGL_ENV_MODEL_KEY": OTHERS_KEY_VARIABLE}
_address: ContextVar[str] = ContextVar("address")


class EpisodeFailedError(Exception):
    """The failure of an episode, by the type of its error, by which failures are counted, and its message."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"environment: {kind}: {message}")


class AttemptClient(EvalClient):
    """verifiers' model client for the address of one rollout; all rollouts share the connections."""

    def __init__(self, base_url: str, key: str, http: httpx.AsyncClient) -> None:
        self.base_url, self.api_key, self.headers, self.client = base_url, key, {}, http

    async def close(self) -> None:
        """Does nothing: the connections are shared."""


class _Relays:
    """A wrapper of verifiers' interception whose sessions send model calls to their rollout's address. With a client
    configuration per rollout, verifiers would keep a connection pool for each."""

    def __init__(self, inner: Any, *, shared: EvalClientConfig, key: str, http: httpx.AsyncClient) -> None:
        self._inner, self._shared, self._key, self._http = inner, shared, key, http

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        async with self._inner.acquire(session) as slot:
            if session.ctx.client == self._shared:
                session.client = AttemptClient(_address.get(), self._key, self._http)
            yield slot

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Player:
    """Plays episodes of the environment that ``spec`` describes, for the run at ``url``."""

    def __init__(self, spec: Mapping[str, Any], *, url: str, key: str) -> None:
        self.url, self.key = url, key
        self._spec = spec
        self._boxes = parse_boxes(spec["arguments"])[1]
        on_machine = max_episodes(self._boxes)
        self.max_episodes = None if on_machine is None else max(1, on_machine // spec.get("workers", 1))
        """Most concurrent episodes whose programs have boxes; ``workers`` processes share this machine."""
        self.trained: list[str] = spec["trained"]
        for name, here in _RENAMED.items():
            if (key_here := os.environ.pop(name, None)) is not None:
                os.environ[here] = key_here
        os.environ[KEY_VARIABLE] = key
        client = EvalClientConfig(base_url=url, api_key_var=KEY_VARIABLE)
        self._ctx = ModelContext(client=client, model="auto")
        self._stack = AsyncExitStack()
        self._reading = asyncio.Lock()

    async def __aenter__(self) -> Self:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        calls = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        self.http = await self._stack.enter_async_context(calls)
        # short requests to the run have their own pool: httpx scans all connections of a pool for each request
        few = httpx.Limits(max_connections=16)
        self.api = await self._stack.enter_async_context(httpx.AsyncClient(limits=few, trust_env=False))
        self._env = await asyncio.to_thread(build_environment, self._spec)
        for role, (model, address) in self._spec["others"].items():
            agent = agent_config_fields(self._env.config).get(role)
            if agent is None:
                raise SystemExit(f"--env-model {role}: the environment has no such agent")
            agent.client = EvalClientConfig(base_url=address, api_key_var=OTHERS_KEY_VARIABLE)
            agent.model = model
        for role, config in self._boxes.items():
            try:
                await install(self._env._harnesses[role], config)
            except Exception as error:
                why = f"the program of the agent {role!r} could not be installed into {config.installs}"
                raise SystemExit(f"{why}: {type(error).__name__}: {error}") from error
        lend_boxes(self._env, self._boxes)
        self._finder = Finder((await asyncio.to_thread(load_splits, self._spec, self._env))[0])
        await self._stack.enter_async_context(self._env.serving())
        assert isinstance(self._ctx.client, EvalClientConfig)
        self._env._interception = _Relays(
            self._env._interception, shared=self._ctx.client, key=self.key, http=self.http
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def play(self, reference: Mapping[str, Any], *, address: str, name: str) -> list[dict[str, Any]]:
        """The rewards of an episode of the task that ``reference`` names, as data of reward events. If the spec has a
        directory for traces, the episode's is written there as ``name``. Raises ``EpisodeFailedError``."""
        async with self._reading:
            try:
                task = await asyncio.to_thread(self._finder.find, reference)
            except (LookupError, TypeError) as error:
                raise EpisodeFailedError("TaskChanged", str(error)) from error
        _address.set(address)
        episode = await self._env.run_episode(task, self._ctx)
        if (directory := self._spec.get("traces")) is not None:
            await asyncio.to_thread(_write_trace, episode, Path(directory) / f"{name}.json")
        if not self._env.complete(episode):
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            kind, message = (errors[-1].type, errors[-1].message) if errors else ("NotOk", "no error was recorded")
            raise EpisodeFailedError(kind, message)
        return rewards_of(episode, self.trained)


def _write_trace(episode: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(episode.to_record()))


def rewards_of(episode: Any, trained: list[str]) -> list[dict[str, Any]]:
    """Reward events of an episode. The first has the mean reward of the trained agents as primary, and beside it each
    reward by its name, before weighting, and each metric. With several trained agents an event per agent follows. An
    agent that ran several times counts with the mean of its runs. Empty when no trained agent was scored."""
    several = len(episode.by_agent) > 1
    totals: dict[str, float] = {}
    named: dict[str, list[float]] = {}
    for agent, traces in episode.by_agent.items():
        scored = [trace for trace in traces if any(reward is not None for reward in trace.rewards.values())]
        if scored and agent in trained:
            totals[agent] = sum(trace.reward for trace in scored) / len(scored)
        prefix = f"{agent}/" if several else ""
        rewards = {name for trace in traces for name in trace.rewards}
        for trace in traces:
            for name, reward in trace.rewards.items():
                if reward is not None:
                    named.setdefault(prefix + name, []).append(reward.score)
            for name, value in trace.metrics.items():
                if value is not None and math.isfinite(value):
                    kind = "metric/" if name in rewards else ""  # a reward has this name
                    named.setdefault(f"{kind}{prefix}{name}", []).append(float(value))
    if not totals:
        return []
    if not all(map(math.isfinite, totals.values())):
        raise EpisodeFailedError("BadReward", f"a reward is not a finite number: {totals}")
    means = {name: sum(values) / len(values) for name, values in named.items() if name != "reward"}
    beside = {name: value for name, value in means.items() if math.isfinite(value)}
    events: list[dict[str, Any]] = [{"value": {"reward": sum(totals.values()) / len(totals), **beside}}]
    if len(trained) > 1:
        events += [{"value": {"reward": value}, "role": agent} for agent, value in totals.items()]
    return events
