"""``--trainer slime``: the loop, the store service and the runner in this process, slime's manager and actors in Ray's."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rich.console import Console

from agl_slime.datasource.source import AGLDataSource, DataSourceSettings
from agl_slime.errors import ConfigError
from agl_slime.groups.policy import CompleteGroup
from agl_slime.loop.online import LoopState, OnlineRLLoop, RunResult
from agl_slime.report import StandardReporters, open_run_dir
from agl_slime.report.metrics import TOKENS_TRAINED
from agl_slime.run.settings import TrainConfig
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.sglang.client import SGLangClient
from agl_slime.sglang.discovery import find_workers
from agl_slime.slime.args import PluginSettings
from agl_slime.slime.trainer import SlimeTrainer, parse_slime_args, require_slime
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.feed import StoreService
from agl_slime.support.agl import LLM
from agl_slime.support.files import write_file
from agl_slime.support.net import is_loopback
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from agl_slime.run.local import GivenParts

logger = logging.getLogger(__name__)

# Longest wait of the manager for groups that the loop has already seen complete.
_MANAGER_TIMEOUT_S = 300.0
_HOOKS = "agl_slime.slime_hooks"
# What makes slime take its rollouts from here; flags of the person who starts the run come after these and win.
HOOK_FLAGS = (
    *("--data-source-path", "agl_slime.AGLDataSource"),
    *("--rollout-function-path", f"{_HOOKS}.generate_rollout"),
    *("--custom-reward-post-process-path", f"{_HOOKS}.normalize_rewards"),
    *("--custom-rollout-log-function-path", f"{_HOOKS}.log_rollout"),
    *("--custom-eval-rollout-log-function-path", f"{_HOOKS}.log_eval_rollout"),
)
# What the loop decides, by slime's name and by ours; after -- they may say the same only.
_THE_LOOPS = {
    "num_rollout": "num_iterations",
    "rollout_batch_size": "rollout_batch_size",
    "n_samples_per_prompt": "n_samples_per_prompt",
}
# What only slime's own loop, or its own evaluation, would look at.
_SLIMES_OWN = (
    "release_train",
    "dynamic_sampling_filter_path",
    *("eval_interval", "eval_config", "eval_prompt_data", "eval_temperature", "eval_top_p", "eval_top_k"),
    *("eval_max_response_len", "eval_min_new_tokens"),
)


async def run_slime_training(
    config: TrainConfig, slime_flags: Sequence[str], *, console: Console, given: GivenParts | None = None
) -> RunResult:
    """A whole run with slime as the trainer. Raises ``AglSlimeError`` with one sentence when it cannot start or go on.
    ``given`` as in ``run_training``; its store must be a ``BridgeStore`` of this process, which is then served to
    slime's manager.

    The store is served on ``--store-host``, else ``AGL_SLIME_STORE_HOST``, else 127.0.0.1; Ray on several hosts needs
    an address that the manager's host reaches, and then a token is made for the run, or taken from
    ``AGL_SLIME_STORE_TOKEN``. With slime's ``--load`` the run goes on where that checkpoint was written.
    """
    require_slime()
    from agl_slime.run.local import _agent_and_tasks, _loop_settings, _Transcripts

    if config.model_path is None:
        raise ConfigError("--trainer slime needs --model-path: the checkpoint that actors and engines start from")
    store = given.store if given is not None else BridgeStore()
    if not isinstance(store, BridgeStore):
        raise ConfigError(f"the store is a {type(store).__name__}, which cannot be served to slime: use BridgeStore()")
    agent, tasks, val_tasks = await _agent_and_tasks(config, given)
    model_path = config.model_path.resolve()
    engines, router, agents_url = await _engines(config)
    flags = [*loop_flags(config, engines=engines, router=router), *slime_flags]
    args = await run_in_thread(parse_slime_args, flags)
    check_slime_args(args, config)
    run = open_run_dir(config.output_dir, agent=config.agent, settings=asdict(config), overwrite=config.overwrite)
    reporters = StandardReporters(run, console=console, view=config.view, title=config.agent)
    host = config.store_host
    if host == TrainConfig.store_host:
        host = os.environ.get("AGL_SLIME_STORE_HOST", host)
    token = os.environ.get("AGL_SLIME_STORE_TOKEN") or (None if is_loopback(host) else secrets.token_hex(16))
    with ExitStack() as stack:
        stack.callback(reporters.close)
        service = StoreService(store=store, host=host, token=token)
        await run_in_thread(service.start)
        stack.callback(service.stop)
        tokenizer = await run_in_thread(load_tokenizer, model_path)
        # as in the manager's process: slime wants exactly n_samples_per_prompt rollouts in every group
        settings = DataSourceSettings(policy=CompleteGroup(), release=False)
        source = stack.enter_context(AGLDataSource(store=store, tokenizer=tokenizer, settings=settings))
        sampling = dict(PluginSettings.from_args(args, {}).sampling or {})
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
            llm=LLM(endpoint=agents_url, model=str(model_path), sampling_parameters=sampling),
            data_source=source,
            slime_train_fn=steps.train,
            weight_sync_fn=steps.sync,
            save_fn=steps.save,
            start=steps.start(config),
            settings=replace(_loop_settings(config), save_interval=1),  # slime decides when; see SlimeSteps.save
            resources=given.resources if given is not None else None,
            runner_settings=RunnerSettings(max_concurrent=config.max_concurrent),
            runners=config.runners,
            store_host=host,
            reporter=reporters,
            run_settings=asdict(config),
            output_dir=run.path,
            on_groups=_Transcripts(reporters, tokenizer, seed=config.seed).take,
        )
        return await loop.run_async()


def loop_flags(
    config: TrainConfig, *, engines: Sequence[str] = (), router: tuple[str | None, int] | None = None
) -> list[str]:
    """slime's flags for what the loop decides.

    Args:
        engines: URLs of engines that run already; without them slime launches its own.
        router: host and port of the router that agents use; slime registers its engines there. Without a host slime
            launches it at that port.
    """
    values = {
        "--hf-checkpoint": config.model_path.resolve() if config.model_path is not None else "",
        "--num-rollout": config.num_iterations,
        "--rollout-batch-size": config.rollout_batch_size,
        "--n-samples-per-prompt": config.n_samples_per_prompt,
        "--global-batch-size": config.rollout_batch_size * config.n_samples_per_prompt,
        "--rollout-temperature": config.temperature,
        "--rollout-max-response-len": config.max_new_tokens,
        "--actor-num-nodes": config.actor_num_nodes,
        "--actor-num-gpus-per-node": config.actor_num_gpus_per_node,
        "--advantage-estimator": "grpo",
    }
    flags = [part for flag, value in values.items() for part in (flag, str(value))]
    if engines:
        flags += ["--rollout-external-engine-addrs", *(url.removeprefix("http://") for url in engines)]
    else:
        flags += ["--rollout-num-gpus", str(config.rollout_num_gpus)]
    if router is not None:
        host, port = router
        flags += [*(("--sglang-router-ip", host) if host else ()), "--sglang-router-port", str(port)]
    return [*flags, *HOOK_FLAGS]


def check_slime_args(args: Any, config: TrainConfig) -> None:
    """Raise ``ConfigError`` for what slime was told after ``--`` and the loop would not follow."""
    for theirs, ours in _THE_LOOPS.items():
        if (value := getattr(args, theirs, None)) != (own := getattr(config, ours)):
            raise ConfigError(f"{_flag(theirs)} {value} after -- is not {_flag(ours)} {own}: give the latter only")
    for name in _SLIMES_OWN:
        if value := getattr(args, name, None) not in (None, False):
            raise ConfigError(f"{_flag(name)} after -- is for slime's own loop, and --trainer slime runs ours: leave it out")
