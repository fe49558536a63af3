"""``--trainer slime``: the loop, the store service and the runner in this process, slime's manager and actors in Ray's."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console

from agl_slime.datasource.source import AGLDataSource, DataSourceSettings
from agl_slime.errors import ConfigError
from agl_slime.groups.policy import CompleteGroup
from agl_slime.loop.online import OnlineRLLoop, RunResult
from agl_slime.report import StandardReporters, open_run_dir
from agl_slime.report.metrics import TOKENS_TRAINED
from agl_slime.run.settings import TrainConfig
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.sglang.client import SGLangClient
from agl_slime.slime.trainer import SlimeRunSettings, SlimeTrainer, parse_slime_args, require_slime
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.feed import StoreService
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from agl_slime.run.local import GivenParts

logger = logging.getLogger(__name__)

# Longest wait of the manager for groups that the loop has already seen settle.
_MANAGER_TIMEOUT_S = 300.0


async def run_slime_training(
    config: TrainConfig, slime_flags: Sequence[str], *, console: Console, given: GivenParts | None = None
) -> RunResult:
    """A whole run with slime as the trainer. Raises ``AglSlimeError`` with one sentence when it cannot start or go on.
    ``given`` as in ``run_training``; its store must be a ``BridgeStore`` of this process, which is then served to
    slime's manager.

    The store is served on ``AGL_SLIME_STORE_HOST`` (127.0.0.1 by default); Ray on several hosts needs an address that
    the manager's host reaches, and then a token is made for the run, or taken from ``AGL_SLIME_STORE_TOKEN``.
    """
    require_slime()
    from agl_slime.run.local import _agent_and_tasks, _loop_settings, _sampling, _Transcripts

    if config.model_path is None:
        raise ConfigError(
            "--trainer slime needs --model-path: the Hugging Face checkpoint that actors and engines start from"
        )
    if given is not None and not isinstance(given.store, BridgeStore):
        raise ConfigError(
            f"slime's manager needs a store that can be served to it, got {type(given.store).__name__}: use agl_slime.BridgeStore()"
        )
    agent, tasks, val_tasks = await _agent_and_tasks(config, given)
    model_path = config.model_path.resolve()
    engines, router, agents_url = await _engines(config)
    settings = SlimeRunSettings(
        model=str(model_path),
        num_rollout=config.num_iterations,
        rollout_batch_size=config.rollout_batch_size,
        n_samples_per_prompt=config.n_samples_per_prompt,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        actor_num_nodes=config.actor_num_nodes,
        actor_num_gpus_per_node=config.actor_num_gpus_per_node,
        rollout_num_gpus=config.rollout_num_gpus,
        engine_urls=engines,
        router=router,
    )
    args = await run_in_thread(parse_slime_args, [*settings.flags(), *slime_flags])
    if getattr(args, "release_train", False):
        raise ConfigError(
            "--release-train works in slime's own loop only: start slime's train.py as examples/slime does"
        )
    run = open_run_dir(config.output_dir, agent=config.agent, settings=asdict(config), overwrite=config.overwrite)
    reporters = StandardReporters(run, console=console, view=config.view, title=config.agent)
    host = os.environ.get("AGL_SLIME_STORE_HOST", "127.0.0.1")
    token = os.environ.get("AGL_SLIME_STORE_TOKEN") or (
        None if host in ("127.0.0.1", "localhost", "::1") else secrets.token_hex(16)
    )
    with ExitStack() as stack:
        stack.callback(reporters.close)
        store = given.store if given is not None and isinstance(given.store, BridgeStore) else BridgeStore()
        service = StoreService(store=store, host=host, token=token)
        await run_in_thread(service.start)
        stack.callback(service.stop)
        tokenizer = await run_in_thread(load_tokenizer, model_path)
        # as in the manager's process: slime wants exactly n_samples_per_prompt rollouts in every group
        source = stack.enter_context(
            AGLDataSource(
                store=store, tokenizer=tokenizer, settings=DataSourceSettings(policy=CompleteGroup(), release=False)
            )
        )
        # the loop enqueues, so the manager's data source must not
        args.agl_store_url, args.agl_store_token, args.agl_tasks, args.prompt_data = service.url, token, None, None
        args.agl_get_timeout_s = _MANAGER_TIMEOUT_S
        trainer = SlimeTrainer(args=args)
        stack.callback(trainer.stop)
        with console.status("Starting slime …"):
            await run_in_thread(trainer.start)
        steps = SlimeSteps(trainer=trainer, source=source, batch_size=config.rollout_batch_size)
        loop = OnlineRLLoop(
            store=store,
            agent=agent,
            tasks=tasks,
            val_tasks=val_tasks,
            llm=LLM(endpoint=agents_url, model=str(model_path), sampling_parameters=_sampling(config)),
            data_source=source,
            slime_train_fn=steps.train,
            weight_sync_fn=steps.sync,
            settings=_loop_settings(config),
            resources=given.resources if given is not None else None,
            runner_settings=RunnerSettings(max_concurrent=config.max_concurrent),
            reporter=reporters,
            run_settings=asdict(config),
            output_dir=run.path,
            on_groups=_Transcripts(reporters, tokenizer, seed=config.seed).take,
        )
        return await loop.run_async()


class SlimeSteps:
    """The loop's two functions over a ``SlimeTrainer``.

    slime trains on full batches only; groups that were dropped leave a batch short, and then the step waits for the
    next iteration's groups.
    """

    def __init__(self, *, trainer: SlimeTrainer, source: AGLDataSource, batch_size: int) -> None:
        self._trainer = trainer
        self._source = source
        self._batch_size = batch_size
        self._next = trainer.first_rollout_id
        self._trained = False

    def train(self, iteration: int) -> dict[str, float]:
        self._trained = len(self._source) >= self._batch_size
        if not self._trained:
            ready = len(self._source)
            logger.warning(
                "Iteration %d: %d of %d groups are ready; they wait for the next iteration.",
                iteration,
                ready,
                self._batch_size,
            )
            return {"train/waiting_groups": float(ready)}
        # the manager's process has the same groups; taken here, they are counted as trained
        self._source.get_samples(self._batch_size)
        tokens = self._trainer.train(self._next)
        self._next += 1
        return {"train/slime_rollout_id": float(self._next - 1), TOKENS_TRAINED: float(tokens)}

    def sync(self, iteration: int) -> str:
        return self._trainer.update_weights() if self._trained else str(self._trainer.updates)


async def _engines(config: TrainConfig) -> tuple[tuple[str, ...], tuple[str | None, int] | None, str]:
    """Engines that run already, the router that slime should use, and the URL that agents use."""
    if config.sglang_url is None:
        if config.rollout_num_gpus == 0:
            raise ConfigError(
                "--trainer slime needs engines: give --sglang-url, or --rollout-num-gpus for engines that slime launches"
            )
        from slime.utils.http_utils import find_available_port, get_host_info  # pyright: ignore[reportMissingImports]

        # slime tells nobody where the router is that it launches, so its port is chosen here; its host is found as
        # slime does
        port = find_available_port(3000)
        return (), (None, port), f"http://{get_host_info()[1]}:{port}"
    async with SGLangClient(base_url=config.sglang_url) as client:
        url = client.base_url
        workers = await client.workers()
    parts = urlsplit(url)
    is_router = workers != (url,)
    router = (parts.hostname, parts.port) if is_router and parts.hostname and parts.port else None
    return (workers if config.rollout_num_gpus == 0 else ()), router, url
