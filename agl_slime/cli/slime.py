"""Training with slime: loop, store service and runner are in this process, slime's manager and actors in Ray's."""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from agl_slime.agent.access import check_replay, replay_of
from agl_slime.cli.models import find_model
from agl_slime.cli.options import flag
from agl_slime.cli.settings import TrainConfig
from agl_slime.cli.start import check_tools, load_inputs, run_directory
from agl_slime.cli.wiring import RunInputs, make_loop, model_for_agents, reporting, teacher_warning
from agl_slime.data.policy import CompleteGroup
from agl_slime.data.results import rollout_of
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.engine.client.client import SGLangClient
from agl_slime.errors import ConfigError
from agl_slime.events import BatchTrained, Observer
from agl_slime.loop.settings import LoopState, RunResult
from agl_slime.loop.tasks import ordered_tasks
from agl_slime.metric_names import TOKENS_TRAINED
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.support.files import scratch_directory, write_file
from agl_slime.support.net import http_url, is_loopback
from agl_slime.support.slime import find
from agl_slime.support.terminal import say
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.tokenizer import set_template_kwargs
from agl_slime.train.slime.args import PluginSettings, prompt_data
from agl_slime.train.slime.hooks import ADVANTAGE_HOOK, NORMALIZE_HOOK, credits_tokens
from agl_slime.train.slime.prompt_data import PromptData
from agl_slime.train.slime.trainer import SlimeTrainer, parse_slime_args, require_slime
from agl_slime.train.slime.versions import normalizes_by_group
from agl_slime.types import flat_samples

logger = logging.getLogger(__name__)

_MANAGER_TIMEOUT_S = 300.0  # longest wait of slime's manager for groups that the loop has already seen complete
_HOOKS = "agl_slime.slime_hooks"
# slime takes its rollouts from these; flags on the command line come later and take precedence.
HOOK_FLAGS = (
    *("--data-source-path", "agl_slime.AGLDataSource"),
    *("--rollout-function-path", f"{_HOOKS}.generate_rollout"),
    *("--eval-function-path", f"{_HOOKS}.generate_rollout"),  # explicit: the default differs with in-place pauses
    *("--custom-rollout-log-function-path", f"{_HOOKS}.log_rollout"),
    *("--custom-eval-rollout-log-function-path", f"{_HOOKS}.log_eval_rollout"),
)
# slime derives the schedule's length from --num-rollout, and Megatron refuses a checkpoint with another length.
RESUMED_SCHEDULE = "--override-opt_param-scheduler"
# For versions of slime that find groups by their position in the batch.
NORMALIZE_FLAGS = ("--custom-reward-post-process-path", NORMALIZE_HOOK)
# Rewards of turns in one Sample; a slime that does not know the flag ignores it, and gets a Sample per reward.
CREDIT_FLAGS = ("--custom-advantage-function-path", ADVANTAGE_HOOK)
# slime's name of each setting of our loop; another value after -- is refused.
_LOOP_SETTINGS = {
    "num_rollout": "num_iterations",
    "rollout_batch_size": "rollout_batch_size",
    "n_samples_per_prompt": "n_samples_per_prompt",
}
# Flags that only slime's own loop, or its own evaluation, reads.
_SLIME_LOOP_FLAGS = """release_train dynamic_sampling_filter_path eval_interval eval_config eval_prompt_data
    eval_temperature eval_top_p eval_top_k eval_max_response_len eval_min_new_tokens"""
_SHARED_GPUS = ("colocate", "offload_rollout")


async def run_slime_training(
    config: TrainConfig, slime_flags: Sequence[str], *, console: Console, program_inputs: RunInputs | None = None
) -> RunResult:
    """Run a whole training with slime. ``program_inputs`` as in ``run_training``; its store must be a ``BridgeStore``.

    The store is served on ``--store-host``, else ``AGL_SLIME_STORE_HOST``, else 127.0.0.1. Other addresses than
    loopback require a token: ``AGL_SLIME_STORE_TOKEN``, or one made for the run.
    """
    require_slime()
    if config.model_path is None:
        raise ConfigError("--trainer slime needs --model-path: the checkpoint that actors and engines start from")
    if program_inputs is not None and not isinstance(program_inputs.store, BridgeStore):
        kind = type(program_inputs.store).__name__
        raise ConfigError(f"the store is a {kind}, which cannot be served to slime: use BridgeStore()")
    model_path = await run_in_thread(find_model, config.model_path, partial(say, console))
    config = replace(config, model_path=model_path)
    engines, router, agents_url = await _engines(config)
    flags = [*loop_flags(config, engines=engines, router=router), *slime_flags]
    if "--advantage-estimator" not in slime_flags:  # grpo
        flags = [*NORMALIZE_FLAGS, *CREDIT_FLAGS, *flags]
    elif not normalizes_by_group():
        flags = [*NORMALIZE_FLAGS, *flags]
    args = await run_in_thread(parse_slime_args, flags)
    check_slime_args(args, config)
    data = prompt_data(args)
    if data is not None and (program_inputs or config.tasks or config.environment.name):
        raise ConfigError(f"--prompt-data {data.path} after --: the run has other tasks; leave one of both out")
    inputs = program_inputs or await load_inputs(config, prompt_tasks=await run_in_thread(_rows, data, model_path))
    store = inputs.store
    assert isinstance(store, BridgeStore)
    sampling = {**(PluginSettings.from_args(args, {}).sampling or {}), **config.template}
    if config.sglang_url is not None:  # slime starts its own engines later; their first answer is checked
        await check_replay(agents_url, sampling)
    host = config.store_host
    if host == TrainConfig.store_host:
        host = os.environ.get("AGL_SLIME_STORE_HOST", host)
    token = os.environ.get("AGL_SLIME_STORE_TOKEN") or (None if is_loopback(host) else secrets.token_hex(16))
    async with AsyncExitStack() as stack:
        pending = stack.enter_context(run_directory(config))
        run = pending.run
        page_stack = await stack.enter_async_context(AsyncExitStack())  # closed after everything that is entered below
        service = StoreService(store=store, host=host, token=token)
        await run_in_thread(service.start)
        stack.callback(service.stop)
        tokenizer = await run_in_thread(load_tokenizer, model_path)
        set_template_kwargs(tokenizer, sampling.get("chat_template_kwargs", {}))
        unread = await check_tools(inputs, Path(model_path), tokenizer, seed=config.loop.seed)
        # in the data's order unless --rollout-shuffle is given; tasks of other sources are shuffled
        if data is not None and not data.shuffle and not config.loop.learnable and isinstance(inputs.tasks, list):
            inputs = replace(inputs, tasks=ordered_tasks(inputs.tasks))
        # as in the manager's process: slime requires exactly n_samples_per_prompt rollouts in every group
        settings = DataSourceSettings(policy=CompleteGroup(), release=False)
        replay_files = None
        if replay_of(sampling) and is_loopback(host):  # on loopback the manager, which reads them too, is on this host
            replay_files = stack.enter_context(scratch_directory(run.path.resolve(), "replay"))
            args.agl_replay_kept = True  # this process removes the files
            args.agl_replay_files = sampling["replay_files"] = str(replay_files)
        source = stack.enter_context(
            GroupSource(
                store=store,
                tokenizer=tokenizer,
                settings=settings,
                reward_key=getattr(args, "reward_key", None),
                reward_spans=credits_tokens(args),
                replay_files=replay_files,
            )
        )
        # the loop enqueues, so the manager's data source must not
        args.agl_teacher_url = config.teacher_url or None
        args.agl_store_url, args.agl_store_token, args.agl_tasks, args.prompt_data = service.url, token, None, None
        args.agl_get_timeout_s, args.agl_planned = _MANAGER_TIMEOUT_S, config.loop.max_staleness > 0
        trainer = SlimeTrainer(args=args)
        stack.callback(trainer.stop)
        with console.status("Starting slime …"):
            await run_in_thread(trainer.start)
        plan = service.plan if config.loop.max_staleness else None
        steps = SlimeSteps(trainer=trainer, source=source, batch_size=config.loop.rollout_batch_size, plan=plan)
        start, finished = steps.start(config.loop.num_iterations)
        pending.begin()  # no check is left that could fail: from here on files are written
        warnings = teacher_warning(config) | ({"tool_format": unread} if unread else {})
        steps.observer = reports = await page_stack.enter_async_context(
            reporting(config, run, console, tokenizer=tokenizer, warnings=warnings)
        )
        url = (trainer.router_url if config.sglang_url is None else None) or agents_url
        config = replace(config, store_host=host)
        enter_llm = partial(model_for_agents, config, inputs, url=url, model_path=model_path)
        val_sampling = {**sampling, **config.validation_sampling}
        loop = make_loop(
            config,
            inputs,
            save_interval=1,  # slime decides when it saves
            llm=stack.enter_context(enter_llm(sampling=sampling)),
            val_llm=stack.enter_context(enter_llm(sampling=val_sampling)) if config.eval_sampling else None,
            data_source=source,
            controller_log=run.controller_log,
            slime_train_fn=steps.train,
            weight_sync_fn=steps.sync,
            save_fn=steps.save,
            start=start,
            observer=reports,
        )
        loop.tasks.skip_instances(finished)
        return await loop.run_async()


def _rows(data: PromptData | None, model_path: Path) -> list[Any] | None:
    if data is None:
        return None
    return data.read(load_tokenizer(model_path) if data.max_prompt_len is not None else None)


def loop_flags(
    config: TrainConfig, *, engines: Sequence[str] = (), router: tuple[str | None, int] | None = None
) -> list[str]:
    """slime's flags for the settings of the loop. ``engines`` are the URLs of running engines; without them slime
    launches its own. slime registers engines at the ``router`` that agents use; it launches one when the host is
    ``None``."""
    values = {
        "--hf-checkpoint": config.model_path.resolve() if config.model_path is not None else "",
        **{flag(theirs): getattr(config.loop, ours) for theirs, ours in _LOOP_SETTINGS.items()},
        "--global-batch-size": config.loop.rollout_batch_size * config.loop.n_samples_per_prompt,
        "--rollout-temperature": config.sampling.temperature,
        "--rollout-max-response-len": config.sampling.max_new_tokens,
        "--actor-num-nodes": config.actor_num_nodes,
        "--actor-num-gpus-per-node": config.actor_num_gpus_per_node,
        "--advantage-estimator": "grpo",
    }
    flags = [word for name, value in values.items() for word in (name, str(value))]
    flags.append(RESUMED_SCHEDULE)
    if engines:
        flags += ["--rollout-external-engine-addrs", *(url.removeprefix("http://") for url in engines)]
    else:
        flags += ["--rollout-num-gpus", str(config.rollout_num_gpus)]
    if router is not None:
        host, port = router
        flags += [*(("--sglang-router-ip", host) if host else ()), "--sglang-router-port", str(port)]
    if config.teacher_url:
        flags += ["--use-opd", "--opd-type", "sglang", "--opd-kl-coef", str(config.teacher_coef)]
    return [*flags, *HOOK_FLAGS]


def check_slime_args(args: Any, config: TrainConfig) -> None:
    """Raise ``ConfigError`` for slime's flags that contradict the loop, or that it would ignore."""
    for theirs, ours in _LOOP_SETTINGS.items():
        if (value := getattr(args, theirs, None)) != (setting := getattr(config.loop, ours)):
            raise ConfigError(f"{flag(theirs)} {value} after -- is not {flag(ours)} {setting}: give the latter only")
    for name in _SLIME_LOOP_FLAGS.split():
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise ConfigError(f"{flag(name)} after -- is for slime's own loop, not for --trainer slime: leave it out")
    running, gpus = getattr(args, "rollout_external_engine_addrs", None), config.rollout_num_gpus
    if running and gpus not in (0, args.rollout_num_gpus):
        why = f"the engines at --sglang-url have {args.rollout_num_gpus} GPUs; leave one of both flags out"
        raise ConfigError(f"--rollout-num-gpus {gpus}: {why}")
    if config.loop.max_staleness and (shared := [name for name in _SHARED_GPUS if getattr(args, name, False)]):
        why = "the engines have no GPU while the actors train: give them other GPUs, or leave --max-staleness out"
        raise ConfigError(f"--max-staleness {config.loop.max_staleness} with {flag(shared[0])}: {why}")


class SlimeSteps:
    """The train, sync and save functions of the loop over a ``SlimeTrainer``.

    slime trains on full batches only: when dropped groups leave a batch short, it waits for the next iteration's
    groups. ``plan`` is given in asynchronous training and gets one rollout id of each group of a step before the
    manager trains it; a short batch is then filtered, because it would become too stale. A file beside each checkpoint
    of slime's has the state of the loop, from which ``--load`` resumes.
    """

    def __init__(
        self,
        *,
        trainer: SlimeTrainer,
        source: GroupSource,
        batch_size: int,
        plan: Callable[[int, Sequence[str]], None] | None = None,
    ) -> None:
        self._trainer, self._source, self._batch_size, self._plan = trainer, source, batch_size, plan
        self.observer: Observer | None = None
        self._next = trainer.first_rollout_id
        self._trained = False
        self._written: int | None = None
        self._finished_before: set[int] = set()

    def start(self, num_iterations: int) -> tuple[LoopState, set[int]]:
        """The state from which the loop resumes after slime has loaded its checkpoint, and the numbers of the finished
        tasks. For a checkpoint without a state of the loop each step counts as an iteration. Raises ``ConfigError``
        when all iterations are done."""
        state, finished = LoopState(iteration=self._next), {*range(self._next * self._batch_size)}
        path = _state_path(getattr(self._trainer.args, "load", None) or "", self._next - 1)
        if self._next and path.exists():
            try:
                saved = json.loads(path.read_bytes())
                state = LoopState(**saved["loop"])
                finished = {*range(int(saved["tasks_drawn"])), *map(int, saved["finished_beyond"])}
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"{path} is not a state of this loop ({error}): remove it to count steps") from error
        if state.iteration >= num_iterations:
            done = state.iteration
            raise ConfigError(f"--load: {done} iterations are done; give --num-iterations above {done} to continue")
        self._finished_before = finished
        return replace(state, version=str(self._trainer.updates)), finished

    def train(self, iteration: int) -> dict[str, float]:
        ready = self._source.deliverable
        self._trained = ready >= self._batch_size
        if not self._trained and self._plan is not None:
            self._source.reject(self._source.get_samples(ready) if ready else [], "short_batch")
            logger.warning("Iteration %d: %d groups are no full batch, and are not trained on.", iteration, ready)
            return {"train/short_batch": float(ready)}
        if not self._trained:
            logger.warning("Iteration %d: %d of %d groups wait for the next one.", iteration, ready, self._batch_size)
            return {"train/waiting_groups": float(ready)}
        # the manager trains the same groups; taking them here counts them as trained
        groups = self._source.get_samples(self._batch_size)
        if self._plan is not None:
            self._plan(self._next, [str(rollout_of(samples[0])) for samples in groups])
        if self._trainer.saves(self._next):  # in case of a kill between slime's checkpoint and the iteration's end
            self._write(self._next, LoopState(iteration=iteration))
        tokens = self._trainer.train(self._next)
        self._next += 1
        if self.observer is not None:
            self.observer.handle(BatchTrained(iteration=iteration, samples=list(flat_samples(groups))))
        metrics = {"train/slime_rollout_id": float(self._next - 1)}
        return metrics if tokens is None else {**metrics, TOKENS_TRAINED: float(tokens)}

    def sync(self, iteration: int) -> str:
        return self._trainer.update_weights() if self._trained else str(self._trainer.updates)

    def save(self, state: LoopState) -> None:
        """Write the loop's state beside slime's newest checkpoint, if it is new. Called after every iteration."""
        if self._trainer.saved not in (None, self._written):
            self._written = self._trainer.saved
            self._write(self._written, state)

    def _write(self, rollout_id: int, state: LoopState) -> None:
        """Write state and finished tasks: all up to a number, and some beyond it, because tasks finish out of order.
        Tasks that were drawn and are not among them are drawn again."""
        finished = self._finished_before | {*map(int, self._source.ledger.finished_instances())}
        whole = next(number for number in count() if number not in finished)
        beyond = sorted(number for number in finished if number > whole)
        content = {"loop": asdict(state), "tasks_drawn": whole, "finished_beyond": beyond}
        write_file(_state_path(self._trainer.args.save, rollout_id), json.dumps(content))


def _state_path(directory: str, rollout_id: int | None) -> Path:
    return Path(directory) / "rollout" / f"agl_loop_{rollout_id}.json"


async def _engines(config: TrainConfig) -> tuple[tuple[str, ...], tuple[str | None, int] | None, str]:
    """The running engines, the router that slime uses, and the URL that agents use."""
    if config.sglang_url is None:
        if config.rollout_num_gpus == 0:
            raise ConfigError("--trainer slime needs engines: give --sglang-url, or --rollout-num-gpus for slime's own")
        # older versions of slime do not report their router's address, so its port is chosen here
        port = find("find_available_port")(3000)
        return (), (None, port), http_url(find("get_host_info")()[1], port)
    async with SGLangClient(base_url=config.sglang_url) as client:
        workers, url = await client.workers(least=0 if config.rollout_num_gpus else 1), client.base_url
    address = urlsplit(url)
    router = (address.hostname, address.port) if workers != (url,) and address.hostname and address.port else None
    return workers, router, url
