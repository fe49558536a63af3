"""The agent rollout's state between steps in the trainer's process: the buffer, groups fetched ahead, and the numbering
of samples."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

import aiohttp

from agl_slime.buffer.client import ask_buffer
from agl_slime.buffer.masks import MultiTurnLossMaskGenerator, get_loss_mask_generator
from agl_slime.buffer.samples import SampleMaker, make_uniform
from agl_slime.buffer.stages import Item
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.support.backoff import Backoff
from agl_slime.support.http import is_transient
from agl_slime.support.net import shown_url
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.types import Sample

logger = logging.getLogger(__name__)

_REQUIRED_KEYS = frozenset({"uid", "instance_id", "messages", "reward", "extra_info"})

# Between polls of an empty buffer, growing: a fast generator is polled often.
_SHORTEST_PAUSE_S = 0.05

_LONGEST_PAUSE_S = 2.0

# Seconds without items after which to check whether the generator still runs.
CHECK_RUN_S = 5.0

START_PATIENCE_S = 600.0

# Unusable groups in one step that end the run.
_MOST_UNUSABLE = 32

Payload = Callable[[], Mapping[str, Any]]

Group = list[Item]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRolloutSettings:
    """The agent rollout's settings; see ``agl_slime.buffer.agent_rollout``."""

    buffer_url: str
    token: str | None
    task_type: str
    eval_task_type: str | None
    retry_times: int
    loss_mask_type: str
    hf_checkpoint: str | None
    normalized: bool
    batch_size: int
    group_size: int


class NothingMoreError(DataSourceError):
    """The generator has ended, and all its groups were fetched."""


@dataclass(slots=True)
class Step:
    """The result of one step: groups of samples, the fetched groups ``used`` for them, unusable groups, and the meta
    information of each fetch."""

    groups: list[list[Sample]] = field(default_factory=list)
    used: list[Group] = field(default_factory=list)
    unusable: list[Group] = field(default_factory=list)
    meta_infos: list[Mapping[str, Any]] = field(default_factory=list)
    waited_s: float = 0.0


@dataclass(slots=True)
class AgentRolloutSession:
    """A trainer's session with one buffer and task type. ``fetched`` are groups that no step has used. ``payload()``
    returns the payload for a start of the generator."""

    settings: AgentRolloutSettings
    started: bool = False
    fetched: list[Group] = field(default_factory=list)
    maker: SampleMaker | None = None
    _ungrouped: list[Item] = field(default_factory=list)

    async def start(self, payload: Payload) -> None:
        await start_generator(self.settings.buffer_url, payload(), token=self.settings.token)
        self.started = True

    async def take_step(self, payload: Payload) -> Step:
        """The groups of one step; after an error the fetched groups stay for the next call."""
        step, settings = Step(), self.settings
        maker = await self._get_maker()
        while (done := len(step.groups)) < settings.batch_size:
            position = done + len(step.unusable)
            if position == len(self.fetched):
                began = time.monotonic()
                step.meta_infos.append(await self._fetch((settings.batch_size - done) * settings.group_size, payload))
                step.waited_s += time.monotonic() - began
                continue
            group = self.fetched[position]
            try:
                step.groups.append(await run_in_thread(maker.group, group))
                step.used.append(group)
            except ValueError as error:
                step.unusable.append(group)
                logger.warning("A group of %s cannot be used: %s", group[0]["instance_id"], error)
                if len(step.unusable) >= _MOST_UNUSABLE:
                    self.fetched = [*step.used, *self.fetched[position + 1 :]]
                    message = f"{len(step.unusable)} groups in one step cannot be used; the last: {error}"
                    raise DataSourceError(message) from error
        del self.fetched[: done + len(step.unusable)]
        lost = make_uniform(step.groups)
        if lost:
            logger.warning("%d samples of this batch have log-probs and others none; dropping all log-probs.", lost)
        return step

    async def fetch_all(self, payload: Payload) -> list[list[Sample]]:
        """The samples of all groups until the generator ends, for evaluations."""
        maker = await self._get_maker()
        with suppress(NothingMoreError):
            while True:
                await self._fetch(None, payload)
        return await run_in_thread(lambda: [maker.group(group) for group in self.fetched])

    async def _fetch(self, most_items: int | None, payload: Payload) -> dict[str, Any]:
        """Wait until the buffer delivers items, and add them to ``fetched``. Returns their meta information."""
        settings, url = self.settings, self.settings.buffer_url
        options = {"task_type": settings.task_type, "token": settings.token, "request_id": uuid.uuid4().hex}
        tries = None if settings.retry_times < 0 else settings.retry_times + 1
        buffer = f"the rollout buffer at {shown_url(url)}"
        failures = Backoff(f"{buffer} failed", DataSourceError, cap_s=_LONGEST_PAUSE_S, tries=tries)
        pause, last_check = _SHORTEST_PAUSE_S, time.monotonic()
        while True:
            try:
                items, meta_info = await get_rollout_data(url, most_items, **options)
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                if not is_transient(error):
                    raise DataSourceError(f"{buffer} cannot be read: {error}") from error
                logger.warning("The rollout buffer could not be read (%r); trying again.", error)
                await failures.pause(error)
                continue
            self._add_items(items)
            if items:
                return meta_info
            if time.monotonic() - last_check > CHECK_RUN_S:
                await self._check_run(payload)
                last_check = time.monotonic()
            await asyncio.sleep(pause * random.uniform(0.8, 1.0))
            pause = min(_LONGEST_PAUSE_S, 1.5 * pause)

    def _add_items(self, items: Sequence[Item]) -> None:
        """Split items into groups, whose items are consecutive; an incomplete rest waits for more items."""
        size = self.settings.group_size
        self._ungrouped.extend(items)
        while len(self._ungrouped) >= size:
            group, self._ungrouped = self._ungrouped[:size], self._ungrouped[size:]
            instances = {json.dumps(item["instance_id"]) for item in group}
            if len(instances) > 1:
                names = ", ".join(sorted(instances))
                message = f"n_samples_per_prompt {size} is not the generator's group size: a group has {names}"
                raise DataSourceError(message)
            self.fetched.append(group)

    async def _check_run(self, payload: Payload) -> None:
        """Raise ``NothingMoreError`` when the generator has ended and no group is left; restart it when the buffer has
        forgotten the run. Does nothing with other servers than ours, which have no such ``/stats``."""
        settings = self.settings
        try:
            stats = await ask_buffer(settings.buffer_url, "/stats", token=settings.token)
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return
        if not isinstance(stats, dict) or not isinstance(stats.get("task_types"), dict):
            return
        task = stats["task_types"].get(settings.task_type) or {}
        run = task.get("run")
        if run is None:
            forgotten = "The buffer at %s was restarted without --run-dir and forgot its run of %r; restarting the run."
            logger.warning(forgotten, shown_url(settings.buffer_url), settings.task_type)
            await self.start(payload)
        elif run.get("state") != "running" and not task.get("groups_undecided"):
            why = f": {run['error']}" if run.get("error") else ""
            ended = f"the generator of {settings.task_type!r} has ended ({run.get('state')})"
            raise NothingMoreError(f"{ended} and no group is left{why}")

    async def _get_maker(self) -> SampleMaker:
        if self.maker is None:
            masks = await run_in_thread(_mask_generator, self.settings)
            self.maker = SampleMaker(masks=masks, normalized=self.settings.normalized)
        return self.maker


async def start_generator(url: str, payload: Mapping[str, Any], *, token: str | None) -> dict[str, Any]:
    """The answer to ``POST /start_rollout``. Retries an unreachable buffer for ten minutes, then raises
    ``DataSourceError``; a refusal raises ``ConfigError``."""
    failure = f"the rollout buffer at {shown_url(url)} could not be started"
    backoff = Backoff(failure, DataSourceError, cap_s=10.0, patience_s=START_PATIENCE_S)
    try:
        return await backoff.run(lambda: ask_buffer(url, "/start_rollout", payload, token=token), is_transient)
    except aiohttp.ClientResponseError as error:
        raise ConfigError(f"{failure}: {error.message}") from error


async def get_rollout_data(
    api_base_url: str,
    num: int | None = None,
    timeout: float = 100.0,
    *,
    task_type: str | None = None,
    token: str | None = None,
    request_id: str | None = None,
) -> tuple[list[Item], dict[str, Any]]:
    """At most ``num`` items (``None``: all that are ready) by one request, with their meta information; both empty when
    nothing is ready. A repeated ``request_id`` gets the same answer.

    Raises as ``ask_buffer`` does, and ``ValueError`` when the answer does not have the documented form."""
    url, options = api_base_url, {"batch_size": num, "task_type": task_type, "request_id": request_id}
    body = {name: value for name, value in options.items() if value is not None}
    answer = await ask_buffer(url, "/get_rollout_data", body, token=token, timeout_s=timeout)
    if not isinstance(answer, dict) or "success" not in answer:
        raise ValueError(f"{shown_url(url)} answered {str(answer)[:200]!r}; expected an object with success and data")
    if not answer["success"]:
        return [], {}
    content, meta_info = answer.get("data"), {}
    if isinstance(content, dict):
        content, meta_info = content.get("data"), content.get("meta_info") or {}
    if not isinstance(content, list) or not isinstance(meta_info, dict):
        raise ValueError(f"{shown_url(url)} answered without a list of items")
    # slime's buffer wraps items
    items = [item.get("data", item) if isinstance(item, dict) else item for item in content]
    for item in items:
        missing = _REQUIRED_KEYS - item.keys() if isinstance(item, dict) else _REQUIRED_KEYS
        if missing:
            raise ValueError(f"an item of {shown_url(url)} has no {', '.join(sorted(missing))}: {str(item)[:200]}")
    return items, meta_info


def _mask_generator(settings: AgentRolloutSettings) -> MultiTurnLossMaskGenerator | None:
    if settings.hf_checkpoint is None:
        return None
    tokenizer = load_tokenizer(settings.hf_checkpoint)
    if ":" not in settings.loss_mask_type:
        return get_loss_mask_generator(tokenizer, settings.loss_mask_type)
    try:
        return resolve_name(settings.loss_mask_type)(tokenizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"loss_mask_type {settings.loss_mask_type!r} cannot be loaded: {error}") from error
