"""slime's agent rollout: training data from a Rollout Buffer.

    --rollout-function-path agl_slime.buffer.agent_rollout.generate_rollout

slime knows none of the flags below; put them into a YAML file and name it with ``--custom-config-path``. Where ``args``
says nothing, the environment counts.

======================================  ======================================
========================================================== attribute of ``args``                   environment
meaning (default) ======================================  ======================================
========================================================== ``agent_rollout_buffer_url``
``AGL_SLIME_BUFFER_URL``                the buffer (``http://127.0.0.1:8889``) ``agent_rollout_buffer_token``
``AGL_SLIME_BUFFER_TOKEN``              its token, where it has one ``rollout_task_type``
``AGL_SLIME_BUFFER_TASK_TYPE``          which generator (``math``) ``agent_rollout_eval_task_type``
``AGL_SLIME_BUFFER_EVAL_TASK_TYPE``     generator of evaluations; without it there are none
``fetch_trajectory_retry_times``                                                failed requests before giving up (-1:
never) ``loss_mask_type``                                                              loss mask of items without token
ids (``auto``); or
                                                                                ``module:Class``
``num_epoch``, ``rollout_num_process``                                          passed to the generator (3, 100)
======================================  ======================================
==========================================================

Rewards: with ``--disable-rewards-normalization`` samples carry what the buffer made of their rewards, else the raw
ones, which slime then normalises.

What was fetched beyond a batch waits for the next call. Which groups were trained on is kept in the data buffer's
metadata, which slime saves with its checkpoints: a resumed run names them to the buffer, and groups that were handed
out and not trained on come again.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import random
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from agl_slime.buffer.samples import SampleMaker, agree
from agl_slime.buffer.stages import Item
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.support.threads import run_blocking, run_in_thread
from agl_slime.tokens.masks import LossMaskGenerator, get_loss_mask_generator
from agl_slime.tokens.tokenizer import load_tokenizer
from agl_slime.types import RolloutFnEvalOutput, RolloutFnTrainOutput, Sample

logger = logging.getLogger(__name__)

_REQUIRED_KEYS = frozenset({"uid", "instance_id", "messages", "reward", "extra_info"})

# Between two questions to a buffer that has nothing: short at first, so that a fast generator is not waited for.
_SHORTEST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
# How long nothing may come before the buffer is asked whether its generator still runs.
_ASK_ABOUT_RUN_S = 5.0
_START_PATIENCE_S = 600.0
# A generator that writes nothing but what cannot be trained on is not waited for.
_MOST_UNUSABLE = 32

# Keys of the data buffer's metadata that are ours: the names of the groups that a step was made of. The others hold
# instance ids, as slime's do.
_GROUPS_PREFIX = "buffer_groups:"
# Older names are of groups that the buffer has long forgotten.
_MOST_GROUP_NAMES = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRolloutSettings:
    """What ``args`` and the environment say; see the module's docstring."""

    buffer_url: str = "http://127.0.0.1:8889"
    token: str | None = None
    task_type: str = "math"
    eval_task_type: str | None = None
    retry_times: int = -1
    loss_mask_type: str = "auto"
    hf_checkpoint: str | None = None
    normalized: bool = False
    batch_size: int = 1
    group_size: int = 1

    @classmethod
    def from_args(cls, args: Any, data_source: Any = None) -> AgentRolloutSettings:
        group_size = (
            getattr(args, "n_samples_per_prompt", None) or getattr(data_source, "n_samples_per_prompt", None) or 1
        )
        disabled = getattr(args, "disable_rewards_normalization", None)
        url = (
            getattr(args, "agent_rollout_buffer_url", None)
            or getattr(args, "rollout_buffer_url", None)
            or os.environ.get("AGL_SLIME_BUFFER_URL")
        )
        return cls(
            buffer_url=(url or "http://127.0.0.1:8889").rstrip("/"),
            token=_said(args, "agent_rollout_buffer_token", "AGL_SLIME_BUFFER_TOKEN"),
            task_type=_said(args, "rollout_task_type", "AGL_SLIME_BUFFER_TASK_TYPE") or "math",
            eval_task_type=_said(args, "agent_rollout_eval_task_type", "AGL_SLIME_BUFFER_EVAL_TASK_TYPE"),
            retry_times=int(getattr(args, "fetch_trajectory_retry_times", -1)),
            loss_mask_type=getattr(args, "loss_mask_type", None) or "auto",
            hf_checkpoint=getattr(args, "hf_checkpoint", None),
            # slime stores its flag the other way round
            normalized=bool(disabled) if disabled is not None else not getattr(args, "rewards_normalization", True),
            batch_size=getattr(args, "rollout_batch_size", None) or 1,
            group_size=int(group_size),
        )


def _said(args: Any, name: str, variable: str) -> str | None:
    return getattr(args, name, None) or os.environ.get(variable) or None


# -- the documented functions ----------------------------------------------------------------------------------------


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """What slime calls, from a plain thread: ``rollout_batch_size`` groups, or the results of an evaluation."""
    if evaluation:
        return run_blocking(_evaluate(args, rollout_id, data_source))
    groups = run_blocking(generate_agent_rollout(args, rollout_id, data_source))
    return RolloutFnTrainOutput(samples=groups, metrics=_session_of(args, data_source).take_metrics())


async def generate_agent_rollout(
    args: Any, rollout_id: int, data_buffer: Any, evaluation: bool = False
) -> list[list[Sample]]:
    """Start the generator if this process has not, and wait for ``rollout_batch_size`` groups of
    ``n_samples_per_prompt`` samples.

    Raises:
        DataSourceError: the buffer failed more often than ``fetch_trajectory_retry_times`` allows, or its generator
            ended and nothing more comes.
        ValueError: an item cannot be made a sample; the text names it.
    """
    if evaluation:
        output = await _evaluate(args, rollout_id, data_buffer)
        return [entry["samples"] for entry in output.data.values()]
    session = _session_of(args, data_buffer)
    if not session.started:
        metadata = _metadata_before(data_buffer, rollout_id)
        settings = session.settings
        payload = start_payload(args, metadata, task_type=settings.task_type, group_size=settings.group_size)
        await run_in_thread(_start, settings.buffer_url, payload, token=settings.token)
        session.started = True
    return await session.batch(args, rollout_id, data_buffer)


async def get_rollout_data(
    api_base_url: str,
    num: int | None = None,
    timeout: float = 100.0,
    *,
    task_type: str | None = None,
    token: str | None = None,
    request_id: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Ask the buffer once for at most ``num`` items (all that are ready when it is ``None``); returns the items and
    what is told about them.

    Both are empty when nothing is ready. A request that is repeated under its ``request_id`` gets the same answer
    again.

    Raises:
        aiohttp.ClientError: the buffer cannot be reached or answers with an error.
        ValueError: the answer does not have the documented form.
        asyncio.TimeoutError: no answer within ``timeout`` seconds.
    """
    asked = {"batch_size": num, "task_type": task_type, "request_id": request_id}
    headers = {"Authorization": f"Bearer {token}"} if token else None
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout), headers=headers) as session:
        body = {name: value for name, value in asked.items() if value is not None}
        async with session.post(f"{api_base_url.rstrip('/')}/get_rollout_data", json=body) as response:
            if response.status >= 400:
                text = (await response.text())[:500]
                raise aiohttp.ClientResponseError(
                    response.request_info, response.history, status=response.status, message=text
                )
            try:
                answer = await response.json()
            except ValueError as error:
                raise ValueError(f"{api_base_url} did not answer with JSON: {error}") from error
    if not isinstance(answer, dict) or "success" not in answer:
        raise ValueError(f"{api_base_url} answered {str(answer)[:200]!r}; expected an object with success and data")
    if not answer["success"]:
        return [], {}
    content = answer.get("data")
    meta_info: Any = {}
    if isinstance(content, dict):
        meta_info = content.get("meta_info") or {}
        content = content.get("data")
    if not isinstance(content, list) or not isinstance(meta_info, dict):
        raise ValueError(f"{api_base_url} answered without a list of items")
    items = [
        item["data"] if isinstance(item, dict) and isinstance(item.get("data"), dict) else item for item in content
    ]
    for item in items:
        missing = _REQUIRED_KEYS - item.keys() if isinstance(item, dict) else _REQUIRED_KEYS
        if missing:
            raise ValueError(f"an item of {api_base_url} has no {', '.join(sorted(missing))}: {str(item)[:200]}")
    return items, meta_info


def start_rollout(api_base_url: str, args: Any, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Tell the buffer to start the generator. ``metadata`` holds what was trained on before, for a resumed run. Returns
    the buffer's answer.

    A buffer that cannot be reached yet is waited for, up to ten minutes; one that refuses raises ``ConfigError``.
    """
    settings = AgentRolloutSettings.from_args(args)
    return _start(
        api_base_url,
        start_payload(args, metadata, task_type=settings.task_type, group_size=settings.group_size),
        token=settings.token,
    )


def log_raw_info(args: Any, all_meta_info: Sequence[Mapping[str, Any]], rollout_id: int) -> None:
    """Log what came in for this step before anything was filtered: ``rollout/no_filter/total_samples`` and
    ``…/avg_reward``.

    To the log always; to WandB and TensorBoard when ``args.use_wandb`` and ``args.use_tensorboard`` say so.
    """
    figures = raw_metrics(all_meta_info)
    if not figures:
        return
    logger.info("rollout %d: %s", rollout_id, figures)
    step = rollout_id
    if getattr(args, "wandb_always_use_train_step", False):
        step = rollout_id * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    if getattr(args, "use_wandb", False):
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError("--use-wandb needs wandb: pip install wandb") from error
        wandb.log({**figures, "rollout/step": step})
    if getattr(args, "use_tensorboard", False):
        from slime.observability.tensorboard_utils import _TensorboardAdapter  # pyright: ignore[reportMissingImports]

        _TensorboardAdapter(args).log(data={**figures, "rollout/step": step}, step=step)


def raw_metrics(all_meta_info: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of several answers as those of one: the mean reward is weighted by the number of samples."""
    told = [meta for meta in all_meta_info if isinstance(meta.get("total_samples"), (int, float))]
    total = sum(meta["total_samples"] for meta in told)
    if not total:
        return {}
    rewards = sum(
        meta["avg_reward"] * meta["total_samples"] for meta in told if isinstance(meta.get("avg_reward"), (int, float))
    )
    return {"rollout/no_filter/total_samples": total, "rollout/no_filter/avg_reward": rewards / total}


def start_payload(args: Any, metadata: Mapping[str, Any] | None, *, task_type: str, group_size: int) -> dict[str, Any]:
    """The documented payload of ``/start_rollout``."""
    skip, groups = _trained(metadata or {})
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    limit = getattr(args, "rollout_max_response_len", None)
    sampling = {
        "max_tokens": limit,
        "temperature": getattr(args, "rollout_temperature", None),
        "top_p": getattr(args, "rollout_top_p", None),
    }
    return {
        "num_process": int(getattr(args, "rollout_num_process", None) or 100),
        "num_epoch": int(getattr(args, "num_epoch", None) or 3),
        "remote_engine_url": f"http://{host}:{port}" if host else os.environ.get("AGL_SLIME_ENGINE_URL"),
        "task_type": task_type,
        "input_file": getattr(args, "prompt_data", None),
        "num_repeat_per_sample": str(group_size),
        **({} if limit is None else {"max_tokens": limit}),
        "sampling_params": {name: value for name, value in sampling.items() if value is not None},
        "tokenizer_path": getattr(args, "hf_checkpoint", None),
        "skip_instance_ids": skip,
        **({} if groups is None else {"trained_groups": groups}),
    }


# -- a session with a buffer -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Fetched:
    """A group that was fetched, with what was told beside it."""

    name: str | None
    instance_id: Any
    items: list[Item]


@dataclass(slots=True)
class AgentRolloutSession:
    """What lasts from call to call: whether the generator was started, the groups fetched beyond a batch, the numbers
    given to samples."""

    settings: AgentRolloutSettings
    started: bool = False
    surplus: deque[_Fetched] = field(default_factory=deque)
    maker: SampleMaker | None = None
    _loose: list[Item] = field(default_factory=list)
    _metrics: dict[str, Any] = field(default_factory=dict)

    async def batch(self, args: Any, rollout_id: int, data_buffer: Any) -> list[list[Sample]]:
        """The groups of one step; what was fetched stays here when something fails on the way."""
        told: list[Mapping[str, Any]] = []
        used: list[_Fetched] = []
        unusable: list[_Fetched] = []
        groups: list[list[Sample]] = []
        waited = 0.0
        try:
            maker = await self._get_maker()
            while len(groups) < self.settings.batch_size:
                if not self.surplus:
                    asked = time.monotonic()
                    told.append(await self._fetch((self.settings.batch_size - len(groups)) * self.settings.group_size))
                    waited += time.monotonic() - asked
                    continue
                fetched = self.surplus.popleft()
                try:
                    groups.append(await run_in_thread(maker.group, fetched.items))
                    used.append(fetched)
                except ValueError as error:
                    unusable.append(fetched)
                    logger.warning("A group of %s cannot be used: %s", fetched.instance_id, error)
                    if len(unusable) >= _MOST_UNUSABLE:
                        raise DataSourceError(
                            f"{len(unusable)} groups in one step cannot be used; the last: {error}"
                        ) from error
        except BaseException:
            self.surplus.extendleft(reversed(used))  # handed out to nobody: they are there for the next call
            raise
        lost = agree(groups)
        if lost:
            logger.warning("%d samples of this batch have log-probs and others none; all go without.", lost)
        self._remember(data_buffer, rollout_id, [*used, *unusable], told)
        groups = _through_data_buffer(args, data_buffer, groups, self.settings.batch_size)
        log_raw_info(args, told, rollout_id)
        samples = [sample for group in groups for sample in group]
        self._metrics = {
            **raw_metrics(told),
            "rollout/buffer/wait_s": waited,
            "rollout/buffer/unusable_groups": len(unusable),
            "rollout/buffer/surplus_groups": len(self.surplus),
            "rollout/buffer/retokenized_ratio": sum(s.metadata.get("token_source") == "retokenized" for s in samples)
            / len(samples),
            "rollout/buffer/masked_samples": sum(bool(s.remove_sample) for s in samples),
        }
        return groups

    async def fetch_until_finished(self) -> list[_Fetched]:
        """Everything that the generator makes until it ends: for evaluations."""
        while True:
            try:
                await self._fetch(None)
            except _NothingMoreError:
                everything = list(self.surplus)
                self.surplus.clear()
                return everything

    async def samples_of(self, groups: Sequence[_Fetched]) -> list[list[Sample]]:
        maker = await self._get_maker()
        return await run_in_thread(lambda: [maker.group(group.items) for group in groups])

    def take_metrics(self) -> dict[str, Any]:
        """The figures of the last batch."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    # -- internals ----------------------------------------------------------------------------------------------------

    async def _fetch(self, wanted: int | None) -> dict[str, Any]:
        """Wait until the buffer gives something; it goes to ``surplus``. Returns what was told about it."""
        settings = self.settings
        request_id = uuid.uuid4().hex
        pause, failures = _SHORTEST_PAUSE_S, 0
        looked = time.monotonic()
        while True:
            try:
                items, meta_info = await get_rollout_data(
                    settings.buffer_url,
                    wanted,
                    task_type=settings.task_type,
                    token=settings.token,
                    request_id=request_id,
                )
            except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
                if isinstance(error, aiohttp.ClientResponseError) and error.status < 500 and error.status != 429:
                    raise DataSourceError(
                        f"the rollout buffer at {settings.buffer_url} refused: {error.message}"
                    ) from error
                failures += 1
                if settings.retry_times >= 0 and failures > settings.retry_times:
                    raise DataSourceError(
                        f"the rollout buffer at {settings.buffer_url} failed {failures} times; last: {error!r}"
                    ) from error
                logger.warning("The rollout buffer could not be read (%r); trying again.", error)
            else:
                self._sort_in(items)
                if items:
                    return meta_info
                if time.monotonic() - looked > _ASK_ABOUT_RUN_S:
                    await self._look_at_run()
                    looked = time.monotonic()
            await asyncio.sleep(pause * random.uniform(0.8, 1.0))
            pause = min(_LONGEST_PAUSE_S, 1.5 * pause)

    def _sort_in(self, items: Sequence[Item]) -> None:
        """Cut what came into groups. Items of one group come one after the other; a rest that is no whole group waits
        for more."""
        size = self.settings.group_size
        self._loose.extend(items)
        while len(self._loose) >= size:
            group, self._loose = self._loose[:size], self._loose[size:]
            instances = {json.dumps(item["instance_id"]) for item in group}
            if len(instances) > 1:
                raise DataSourceError(
                    f"the buffer's groups are not of {size} items: {', '.join(sorted(instances))} came as one; "
                    "n_samples_per_prompt must be what the generator was started with"
                )
            self.surplus.append(_Fetched(group[0].get("buffer_group"), group[0]["instance_id"], group))

    async def _look_at_run(self) -> None:
        """Raise when the generator has ended and nothing that it wrote can become a group any more. Other servers than
        ours do not tell."""
        try:
            stats = await run_in_thread(_get_json, f"{self.settings.buffer_url}/stats", self.settings.token)
        except (OSError, ValueError):
            return
        task = stats.get("task_types", {}).get(self.settings.task_type, {}) if isinstance(stats, dict) else {}
        run = task.get("run") or {}
        if run.get("state") in ("finished", "failed", "stalled", "stopped", "interrupted") and not task.get(
            "groups_undecided"
        ):
            why = f": {run['error']}" if run.get("error") else ""
            raise _NothingMoreError(
                f"the generator of {self.settings.task_type!r} has ended ({run['state']}) and no group is left{why}"
            )

    async def _get_maker(self) -> SampleMaker:
        if self.maker is None:
            masks = await run_in_thread(_mask_generator, self.settings)
            self.maker = SampleMaker(masks=masks, normalized=self.settings.normalized)
        return self.maker

    def _remember(
        self, data_buffer: Any, rollout_id: int, used: Sequence[_Fetched], told: Iterable[Mapping[str, Any]]
    ) -> None:
        """Note in the data buffer's metadata, which slime saves, what this step is made of, and which instances gave
        nothing to train on."""
        update = getattr(data_buffer, "update_metadata", None)
        if update is None:
            return
        fetched = [group.instance_id for group in (*used, *self.surplus)]
        refused: list[Any] = []
        for meta_info in told:
            for instance_id in meta_info.get("finished_groups") or ():
                if instance_id in fetched:
                    fetched.remove(instance_id)
                else:
                    refused.append(instance_id)
        update({str(rollout_id): [group.instance_id for group in used] + refused})
        names = [group.name for group in used if group.name is not None]
        if names:
            update({f"{_GROUPS_PREFIX}{rollout_id}": names})


class _NothingMoreError(DataSourceError):
    """The generator has ended and everything it made has been fetched."""


_sessions: dict[tuple[str, str], AgentRolloutSession] = {}
_sessions_lock = threading.Lock()


def _session_of(args: Any, data_source: Any) -> AgentRolloutSession:
    settings = AgentRolloutSettings.from_args(args, data_source)
    key = (settings.buffer_url, settings.task_type)
    with _sessions_lock:
        session = _sessions.get(key)
        if session is None:
            session = _sessions[key] = AgentRolloutSession(settings)
        session.settings = settings
        return session


def forget_sessions() -> None:
    """Begin anew, as in a fresh process: generators are started again and fetched groups forgotten."""
    with _sessions_lock:
        _sessions.clear()


# -- internals -------------------------------------------------------------------------------------------------------


async def _evaluate(args: Any, rollout_id: int, data_source: Any) -> RolloutFnEvalOutput:
    """Run the evaluation generator to its end. Raises ``ConfigError`` when none was named."""
    settings = AgentRolloutSettings.from_args(args, data_source)
    if settings.eval_task_type is None:
        raise ConfigError(
            "the agent rollout has no generator for evaluations; set agent_rollout_eval_task_type, or evaluate checkpoints separately"
        )
    session = AgentRolloutSession(
        AgentRolloutSettings(**{**_fields(settings), "task_type": settings.eval_task_type, "normalized": False})
    )
    payload = start_payload(args, None, task_type=settings.eval_task_type, group_size=settings.group_size)
    payload |= {"num_epoch": 1, "trained_groups": []}
    await run_in_thread(_start, settings.buffer_url, payload, token=settings.token)
    groups = await session.samples_of(await session.fetch_until_finished())
    samples = [
        sample for group in groups for sample in group if not sample.remove_sample or any(sample.loss_mask or ())
    ]
    if not samples:
        raise DataSourceError(f"the evaluation generator {settings.eval_task_type!r} made no usable group")
    entry = {
        "rewards": [sample.reward for sample in samples],
        "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
        "samples": samples,
    }
    return RolloutFnEvalOutput(data={settings.eval_task_type: entry})


def _fields(settings: AgentRolloutSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in AgentRolloutSettings.__dataclass_fields__}


def _through_data_buffer(
    args: Any, data_buffer: Any, groups: list[list[Sample]], batch_size: int
) -> list[list[Sample]]:
    """Let ``--buffer-filter-path`` choose, when there is one and slime's data buffer applies it."""
    if getattr(args, "buffer_filter_path", None) is None or not hasattr(data_buffer, "get_buffer_length"):
        return groups
    data_buffer.add_samples(groups)
    return data_buffer.get_samples(min(batch_size, data_buffer.get_buffer_length()))


def _metadata_before(data_buffer: Any, rollout_id: int) -> dict[str, Any]:
    """What was trained on before this step. Steps that a saved data buffer knows and the resumed trainer has forgotten
    do not count."""
    get = getattr(data_buffer, "get_metadata", None)
    metadata: Mapping[str, Any] = get() if get is not None else {}
    return {key: value for key, value in metadata.items() if _step_of(key) is None or _step_of(key) < rollout_id}  # type: ignore[operator]


def _step_of(key: Any) -> int | None:
    text = str(key).removeprefix(_GROUPS_PREFIX)
    return int(text) if text.isdecimal() else None


def _trained(metadata: Mapping[str, Any]) -> tuple[list[Any], list[str] | None]:
    """The instance ids and the group names in the metadata; no names when they were never kept (the buffer is not
    ours)."""
    skip: list[Any] = []
    groups: list[str] = []
    for key, value in metadata.items():
        if isinstance(value, (list, tuple)):
            (groups if str(key).startswith(_GROUPS_PREFIX) else skip).extend(value)
    return skip, groups[-_MOST_GROUP_NAMES:] if groups or not skip else None


def _start(api_base_url: str, payload: Mapping[str, Any], *, token: str | None) -> dict[str, Any]:
    url = f"{api_base_url.rstrip('/')}/start_rollout"
    deadline, pause = time.monotonic() + _START_PATIENCE_S, 0.2
    while True:
        try:
            return _get_json(url, token, payload)
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            if error.code < 500 and error.code != 429:
                raise ConfigError(f"the rollout buffer at {api_base_url} refused to start: {text}") from error
            trouble: Any = text
        except OSError as error:
            trouble = error
        if time.monotonic() + pause > deadline:
            raise DataSourceError(
                f"the rollout buffer at {api_base_url} could not be reached within {_START_PATIENCE_S:g} s; last: {trouble}"
            )
        logger.warning("The rollout buffer at %s could not be started (%s); trying again.", api_base_url, trouble)
        time.sleep(pause)
        pause = min(10.0, 2 * pause)


def _get_json(url: str, token: str | None, body: Mapping[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=90) as response:
        return json.loads(response.read())


def _mask_generator(settings: AgentRolloutSettings) -> LossMaskGenerator | None:
    if settings.hf_checkpoint is None:
        return None
    tokenizer = load_tokenizer(settings.hf_checkpoint)
    module_name, colon, name = settings.loss_mask_type.partition(":")
    if not colon:
        return get_loss_mask_generator(tokenizer, settings.loss_mask_type)
    try:
        return getattr(importlib.import_module(module_name), name)(tokenizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"loss_mask_type {settings.loss_mask_type!r} cannot be loaded: {error}") from error
