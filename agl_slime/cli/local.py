"""Training with the local trainer: engine, policy, store, data source, trainer and reports of a ``TrainConfig``."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rich.console import Console

from agl_slime import events
from agl_slime.agent.access import check_replay, replay_of
from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.agent.partial import PartialRollouts
from agl_slime.cli.model_dir import RunModels
from agl_slime.cli.models import check_tokenizer
from agl_slime.cli.settings import TrainConfig
from agl_slime.cli.start import check_tools, find_start, load_inputs, run_directory, set_aside, uses_raw_prompts
from agl_slime.cli.weights import WeightPublisher, weights_directory
from agl_slime.cli.wiring import RunInputs, make_loop, model_for_agents, reporting, sampling_parameters, teacher_warning
from agl_slime.data.ledger import Ledger, ledger_checkpoints
from agl_slime.data.policy import zero_variance
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.data.teacher import Teachers
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.describe import EngineDescription, experts_shape_of
from agl_slime.engine.client.transport import checked_url
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.engine.scoring import ScoringClient
from agl_slime.engine.sglang_process import SGLANG_PYTHON, SGLangProcess
from agl_slime.errors import ConfigError, LoopError, MissingDependencyError
from agl_slime.loop.checkpoint import Checkpoint, CheckpointWriter, load_newest, read_checkpoints
from agl_slime.loop.settings import LoopState, RunResult
from agl_slime.metric_names import TOKENS_TRAINED
from agl_slime.report import StandardReporters
from agl_slime.report.files import IterationFile, PendingRun, RunDir
from agl_slime.report.rollouts import describe_batch
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.files import scratch_directory
from agl_slime.support.terminal import PlainConsole, print_line, step
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.tokenizer import has_chat_template, set_template_kwargs
from agl_slime.train.local.settings import LARGE_MODEL, LocalTrainerSettings, default_lr
from agl_slime.types import Sample, flat_samples

if TYPE_CHECKING:
    from agl_slime.train.local.trainer import LocalTrainer

logger = logging.getLogger(__name__)

_LARGE_MODELS_LR = 1e-4
_AUTOPSY = "agl_slime.tools.forensics.observer"  # imported when --autopsy asks for it

TorchThreads = int | Literal["auto"] | None

# Settings that may differ when a run is resumed.
MAY_CHANGE = frozenset({"num_iterations", "save_interval", "view", "sglang_url", "eval_sglang_url", "engine"})
MAY_CHANGE |= {"keep_rollouts", "track", "teacher_url", "autopsy"}


async def run_training(
    config: TrainConfig,
    *,
    slime_flags: Sequence[str] = (),
    program_inputs: RunInputs | None = None,
    console: Console | None = None,
    torch_threads: TorchThreads = None,
    began: float | None = None,
) -> RunResult:
    """Run a whole training; leaves no process and no thread behind. ``slime_flags`` are slime's own, for
    ``--trainer slime``; ``program_inputs`` has a program's store and tasks, which replace the ones of the settings;
    ``torch_threads`` is for the local trainer, which by default leaves the program's setting alone; ``began``
    (``time.monotonic()``) is the start of the wall time, by default now."""
    console = console or PlainConsole()
    began = time.monotonic() if began is None else began
    await run_in_thread(config.check_files)
    if config.trainer == "slime":
        from agl_slime.cli.slime import run_slime_training

        return await run_slime_training(config, slime_flags, program_inputs=program_inputs, console=console)
    if slime_flags:
        why = f"flags after -- are slime's, and the trainer is {config.trainer}; add --trainer slime"
        raise ConfigError(f"{slime_flags[0]!r}: {why}")
    inputs = program_inputs or await load_inputs(config)
    described = await _probe_servers(config)
    async with AsyncExitStack() as stack:
        pending = stack.enter_context(run_directory(config))
        run = pending.run
        if program_inputs is None:
            stack.push(partial(_print_next_command, console, pending))
        checkpoints = _checkpoints(config, run) if config.resume else []
        page_stack = await stack.enter_async_context(AsyncExitStack())  # closed after everything that is entered below
        origin = await find_start(config, inputs, run, described, console)
        tokenizer, warnings = await _load_tokenizer(config, inputs, origin.model)
        teachers = await stack.enter_async_context(Teachers(config.teachers)) if config.teachers else None
        if teachers is not None:
            await teachers.check(tokenizer)
            warnings |= teacher_warning(config)
        url, check_engine, trainer = await _start_engine(stack, config, origin.model, run, console, torch_threads)
        n_parameters = trainer.model.num_parameters()
        warnings |= learning_rate_warning(config.local, n_parameters)
        if config.loop.deterministic and (config.sglang_url or config.engine == "sglang"):
            effect = "equal runs need an SGLang with --enable-deterministic-inference on a GPU"
            warnings["deterministic"] = f"--deterministic: {effect}"
        if sizes := size_dependent_settings(config, n_parameters, lr=trainer.lr):
            print_line(sizes, to=console)
        checkpoint = await run_in_thread(load_newest, checkpoints, trainer) if checkpoints else None
        start = checkpoint.loop if checkpoint is not None else LoopState()
        directory = stack.enter_context(weights_directory(config, origin.model, run))
        weights = WeightPublisher(trainer=trainer, base_url=url, directory=directory, pause=config.weight_pause)
        await _push_start(config, weights, start, warnings)
        sampling = {**sampling_parameters(config), **await _replayed_experts(trainer, url, origin.model)}
        await check_replay(url, sampling)
        if config.resume and checkpoint is None:
            set_aside(run)
        pending.begin(origin.record)  # no check is left that could fail: from here on files are written
        reports = await page_stack.enter_async_context(
            reporting(config, run, console, tokenizer=tokenizer, warnings=warnings, began=began)
        )
        source = _open_source(stack, config, inputs, run, tokenizer, sampling, teachers)
        unfinished = await _resume(config, inputs, run, source, checkpoint, start)
        models = RunModels(run, base=origin.model, weights=directory.resolve() if config.keep_best else None)
        steps = LocalSteps(
            trainer=trainer,
            source=source,
            batch_size=config.loop.rollout_batch_size,
            trained=stack.enter_context(closing(IterationFile(run.trained))),
            checkpoints=CheckpointWriter(
                directory=run.checkpoints,
                trainer=trainer,
                source=source,
                save_partial=lambda path: unfinished.save(path, base_url=url),
            ),
            models=models,
            reports=reports,
            observer=await _step_observer(stack, config, run, url, trainer, tokenizer, weights, reports),
        )
        enter_llm = partial(model_for_agents, config, inputs, model_path=origin.model)
        loop = make_loop(
            config,
            inputs,
            **_validation_llm(stack, config, weights, partial(enter_llm, url=url)),
            llm=stack.enter_context(enter_llm(url=url, sampling=sampling)),
            data_source=source,
            controller_log=run.controller_log,
            slime_train_fn=steps.train,
            weight_sync_fn=weights.push_next,
            save_fn=steps.save,
            start=start,
            observer=_Observers(reports, unfinished, models),
            check_alive=check_engine,
        )
        return await loop.run_async()


def _print_next_command(console: Console, pending: PendingRun, kind: type[BaseException] | None, *_: Any) -> None:
    """After an interrupt, show how to resume the run: its settings are in its directory."""
    if pending.begun and kind is not None and issubclass(kind, asyncio.CancelledError):
        command = f"agl-slime train --resume --output-dir {shlex.quote(str(pending.run.path))}"
        print_line(f"to go on: {command}", to=console)


def learning_rate_warning(settings: LocalTrainerSettings, n: int) -> dict[str, str]:
    """A warning, by its key, of a learning rate that is far too high for a model of ``n`` parameters."""
    if settings.lr is None or settings.lora_rank or n < LARGE_MODEL or settings.lr <= _LARGE_MODELS_LR:
        return {}
    text = f"--local.lr {settings.lr:g} suits the tiny policy; this model has {n / 1e6:,.0f} million parameters"
    return {"learning_rate": f"{text}, for which the default is {default_lr(n, lora=False):g}; leave the flag out"}


def size_dependent_settings(config: TrainConfig, n: int, *, lr: float) -> str:
    """The settings that depend on a model's ``n`` parameters, in a sentence; empty for one like the tiny policy."""
    if n < LARGE_MODEL:
        return ""
    text = f"{n / 1e6:,.0f} million parameters are trained at learning rate {lr:g} (--local.lr)"
    return f"{text}; an answer ends at {config.sampling.max_new_tokens} tokens (--max-new-tokens)"


async def _probe_servers(config: TrainConfig) -> EngineDescription | None:
    """Check that the servers of the settings answer; describes the one at ``--sglang-url``."""
    described = None
    if config.sglang_url is not None:
        async with SGLangClient(base_url=config.sglang_url) as client:
            described = await client.probe()
    if config.eval_sglang_url is not None:
        async with SGLangClient(base_url=config.eval_sglang_url) as client:
            await client.probe()
    return described


async def _load_tokenizer(config: TrainConfig, inputs: RunInputs, model_path: Path) -> tuple[Any, dict[str, str]]:
    """The model's tokenizer, and warnings by their keys. Raises ``ConfigError`` when the agent cannot use it."""
    warnings = {}
    tokenizer = await run_in_thread(load_tokenizer, model_path)
    check_tokenizer(model_path, tokenizer)
    set_template_kwargs(tokenizer, config.template.get("chat_template_kwargs", {}))
    if not has_chat_template(tokenizer):
        raw = await uses_raw_prompts(inputs, model_path, seed=config.loop.seed)
        effect = "prompts are sampled as they are" if raw else "only text prompts can be sampled"
        warnings["chat_template"] = f"--model-path {model_path}: without a chat template {effect}"
    if unread := await check_tools(inputs, model_path, tokenizer, seed=config.loop.seed):
        warnings["tool_format"] = unread
    return tokenizer, warnings


async def _start_engine(
    stack: AsyncExitStack,
    config: TrainConfig,
    model_path: Path,
    run: RunDir,
    console: Console,
    torch_threads: TorchThreads,
) -> tuple[str, Callable[[], None] | None, LocalTrainer]:
    """Start the engine while the trainer loads; returns the engine's URL, its health check, and the trainer."""
    _require_torch()
    torch_threads = 1 if config.loop.deterministic else torch_threads
    loading = asyncio.ensure_future(run_in_thread(_make_trainer, config, model_path, torch_threads))
    loading.add_done_callback(lambda task: task.cancelled() or task.exception())  # dropped when the engine fails first
    url, check_engine = await stack.enter_async_context(running_engine(config, model_path, run, console))
    return url, check_engine, await loading


async def _replayed_experts(trainer: LocalTrainer, url: str, model_path: Path) -> dict[str, Any]:
    """The sampling parameter that requests the routed experts of a mixture of experts, which the trainer replays; empty
    where model, engine or trainer has none."""
    from agl_slime.engine.experts import routers_of

    if (shape := experts_shape_of(str(model_path))) is None or not routers_of(trainer.model):
        return {}
    async with SGLangClient(base_url=url) as client:
        returns = (await client.server_info()).get("enable_return_routed_experts")
    return {"routed_experts": list(shape)} if returns else {}


async def _push_start(
    config: TrainConfig, weights: WeightPublisher, start: LoopState, warnings: dict[str, str]
) -> None:
    """Push the weights of ``start`` in the dtype of all engines, which may have loaded others."""
    if refused := await weights.sync.check_pause():
        warnings["weight_pause"] = refused
    validation_engines = [DiskWeightSync(base_url=config.eval_sglang_url)] if config.eval_sglang_url else []
    computes = [await sync.dtype() for sync in (weights.sync, *validation_engines)]
    weights.dtype = "bfloat16" if set(computes) == {"bfloat16"} else "float32"
    await weights.push(start.version)


def _open_source(
    stack: AsyncExitStack,
    config: TrainConfig,
    inputs: RunInputs,
    run: RunDir,
    tokenizer: Any,
    sampling: dict[str, Any],
    teachers: Teachers | None,
) -> GroupSource:
    """The data source with the run's ledger. Adds the directory of replay files to ``sampling``."""
    ledger = Ledger(path=run.ledger)
    stack.callback(ledger.close)
    group_filter = zero_variance if config.drop_zero_variance else None
    replay_files = None
    if replay_of(sampling) and isinstance(inputs.store, BridgeStore):
        replay_files = stack.enter_context(scratch_directory(run.path.resolve(), "replay"))
        sampling["replay_files"] = str(replay_files)
    source = GroupSource(
        store=inputs.store,
        tokenizer=tokenizer,
        settings=DataSourceSettings(policy=config.group, group_filter=group_filter),
        ledger=ledger,
        reward_key=config.local.reward_key,
        reward_spans=True,
        replay_files=replay_files,
        annotate=teachers,
    )
    return stack.enter_context(source)


async def _resume(
    config: TrainConfig,
    inputs: RunInputs,
    run: RunDir,
    source: GroupSource,
    checkpoint: Checkpoint | None,
    start: LoopState,
) -> PartialRollouts:
    """Restore files, data source and partial rollouts from ``checkpoint``, if there is one."""
    unfinished = PartialRollouts()
    if checkpoint is not None:
        reported = await run_in_thread(run.rewind, start.iteration)
        checkpoint.rewind(source.ledger, reported=reported)
        source.restore(checkpoint.data_source)
        unfinished.load(checkpoint.partial, admitted=start.admitted, version=start.version)
    source.set_version(start.version, named=True)
    if isinstance(inputs.agent, SGLangLitAgent):  # other agents, and agents in other processes, start over
        inputs.agent.partial = unfinished if config.runners == "inproc" else None
    return unfinished


async def _step_observer(
    stack: AsyncExitStack,
    config: TrainConfig,
    run: RunDir,
    url: str,
    trainer: LocalTrainer,
    tokenizer: Any,
    weights: WeightPublisher,
    reports: StandardReporters,
) -> StepObserver | None:
    """The run's autopsy, which is loaded by its name."""
    if not config.autopsy:
        return None
    return import_module(_AUTOPSY).RunAutopsy(
        run=run,
        pushed=weights.directory,
        client=await stack.enter_async_context(ScoringClient(base_url=url)),
        trainer_scores=trainer.score,
        sampling=config.sampling,
        turns=config.autopsy,
        seed=config.loop.seed,
        tokenizer=tokenizer,
        dtype="bfloat16" if "bfloat16" in (weights.dtype, trainer.computes_in) else "float32",
        warn=reports.warn,
    )


def _validation_llm(
    stack: AsyncExitStack,
    config: TrainConfig,
    weights: WeightPublisher,
    enter_llm: Callable[..., AbstractContextManager[LLM]],
) -> dict[str, Any]:
    """The loop's arguments for validations with sampling parameters of their own, or at ``--eval-sglang-url``, to which
    versions are pushed."""
    sampling: dict[str, Any] = {**sampling_parameters(config), **config.validation_sampling}
    if config.eval_sglang_url is not None:
        url = checked_url(config.eval_sglang_url)
        llm = stack.enter_context(enter_llm(url=url, sampling=sampling))
        return {"val_llm": llm, "val_sync_fn": partial(weights.push_again, base_url=url)}
    return {"val_llm": stack.enter_context(enter_llm(sampling=sampling))} if config.eval_sampling else {}


class StepObserver(Protocol):
    """Looks at a training step from before it, on the batch, until after it; ``finish`` takes the result of ``begin``
    and returns metrics."""

    def begin(self, groups: Sequence[Sequence[Sample]], *, iteration: int) -> Any: ...
    def finish(self, observed: Any) -> dict[str, float]: ...


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """The train and save functions of the loop over a ``LocalTrainer``."""

    trainer: LocalTrainer
    source: GroupSource
    batch_size: int
    trained: IterationFile
    checkpoints: CheckpointWriter
    models: RunModels
    reports: StandardReporters
    observer: StepObserver | None = None

    def train(self, iteration: int) -> dict[str, float]:
        self.models.save_best()
        groups = self.source.get_samples(self.batch_size)
        observed = None if self.observer is None else self.observer.begin(groups, iteration=iteration)
        self.trainer.on_progress = lambda share: self.reports.handle(
            events.TrainingProgressed(iteration=iteration, share=share)
        )
        metrics = self.trainer.train(groups, iteration=iteration)
        self.trainer.on_progress = None
        self.trained.append(iteration, describe_batch(groups, self.trainer.scores))
        scores, samples = self.trainer.scores, list(flat_samples(groups))
        assert scores is not None  # of the step that has just ended
        figures = {"log_probs": scores.log_probs, "advantages": scores.advantages}
        self.reports.handle(events.BatchTrained(iteration=iteration, samples=samples, **figures))
        metrics[TOKENS_TRAINED] = metrics.pop("train/tokens")
        return metrics if self.observer is None else metrics | self.observer.finish(observed)

    def save(self, state: LoopState) -> None:
        self.reports.flush()  # after a kill the reports have every iteration of the checkpoint
        self.models.save_newest(self.checkpoints.save(state), iteration=state.iteration)
        self.models.save_best()


class _Observers:
    """Forwards each event to several observers."""

    def __init__(self, *observers: events.Observer) -> None:
        self._observers = observers

    def handle(self, event: events.Event) -> None:
        for observer in self._observers:
            observer.handle(event)


def _checkpoints(config: TrainConfig, run: RunDir) -> list[Checkpoint]:
    """The checkpoints of ``run``, newest first. Raises ``ConfigError`` when it is finished or cannot be resumed."""
    checkpoints = read_checkpoints(run.checkpoints)
    if checkpoints and (done := checkpoints[0].loop.iteration) >= config.loop.num_iterations:
        fix = f"give --num-iterations above {done} to continue"
        raise ConfigError(f"the run in {run.path} has finished its {done} iterations; {fix}")
    noted = ledger_checkpoints(run.ledger) if checkpoints else set()
    if unrecorded := [each.loop.iteration for each in checkpoints if each.loop.iteration not in noted]:
        why = f"{run.ledger} is missing or has no record of the checkpoint of iteration {unrecorded[0]}"
        raise ConfigError(f"the run in {run.path} cannot be resumed: {why}; put the ledger of this run back")
    if changed := [name for name in run.changed if name not in MAY_CHANGE]:
        logger.warning("These settings have changed since the run began: %s.", ", ".join(changed))
    return checkpoints


@asynccontextmanager
async def running_engine(
    config: TrainConfig, model_path: Path, run: RunDir, console: Console
) -> AsyncIterator[tuple[str, Callable[[], None] | None]]:
    """The URL of the engine, and a function that raises when an engine that was started here has died."""
    if config.sglang_url is not None:
        yield checked_url(config.sglang_url), None
        return
    if config.engine == "sglang":
        python = os.environ[SGLANG_PYTHON]  # checked by check_files
        flags = ["--enable-deterministic-inference"] * config.loop.deterministic
        engine = SGLangProcess(model_path, python=python, log=run.sglang_log, random_seed=config.loop.seed, flags=flags)
    else:
        engine = EmbeddedEngine(model_path, random_seed=config.loop.seed, deterministic=int(config.loop.deterministic))
    try:
        with step(console, f"starting {engine.name}"):
            await run_in_thread(engine.start)
        print_line(engine.summary, to=console)

        def check() -> None:
            if not engine.alive:
                raise LoopError(f"{engine.name} has died: {engine.ending()}")

        yield engine.url, check
    finally:
        # also after an interrupted start, which may have left a process
        await asyncio.shield(run_in_thread(engine.stop))


def _require_torch() -> None:
    """Raise ``MissingDependencyError`` before an engine is started that the trainer could not use."""
    try:
        installed = all(find_spec(name) for name in ("torch", "safetensors"))
    except ImportError:
        installed = False
    if not installed:
        raise MissingDependencyError('--trainer local needs torch and safetensors: pip install "agl-slime[local]"')


def _make_trainer(config: TrainConfig, model_path: Path, torch_threads: TorchThreads = None) -> LocalTrainer:
    from agl_slime.train.local.trainer import LocalTrainer

    return LocalTrainer(
        model_path=model_path,
        settings=config.local,
        temperature=config.sampling.temperature,
        teacher_coef=config.teacher_coef if config.teacher_url else 0.0,
        teacher_alone=config.teacher_alone,
        seed=config.loop.seed,
        torch_threads=torch_threads,
    )
