"""The parts of a run that both trainers share: agent, tasks, model endpoint, loop and reports."""

from __future__ import annotations

import secrets
import webbrowser
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agl_slime.cli.settings import TrainConfig
from agl_slime.engine.client.describe import experts_shape_of
from agl_slime.engine.client.load import EngineLoads
from agl_slime.environments.environment import Environment, load_environment
from agl_slime.errors import ConfigError
from agl_slime.loop.online import OnlineRLLoop
from agl_slime.loop.settings import LoopSettings
from agl_slime.loop.tasks import Tasks
from agl_slime.report import StandardReporters
from agl_slime.report.console import View
from agl_slime.report.files import RunDir
from agl_slime.runner.auto_limit import AutoLimitSettings
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent, NamedResources, ProxyLLM
from agl_slime.support.threads import run_in_thread


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """Agent, tasks, further resources and store of a run, made from its settings or passed by a program.

    ``agent`` is ``None`` when another process runs it. ``behind_gateway``: the runners start no gateway, so the run
    does. ``held_out``: the number of tasks that validations took. ``environment``: its worker plays the rollouts.
    """

    tasks: Tasks
    val_tasks: Tasks | None = None
    agent: LitAgent[Any] | None = None
    resources: NamedResources = field(default_factory=dict)
    store: LightningStore = field(default_factory=BridgeStore)
    behind_gateway: bool = False
    held_out: int = 0
    environment: Environment | None = None


def environment_of(config: TrainConfig, *, held_out: int | None = None) -> Environment:
    """Load the environment that ``config`` names. Raises ``ConfigError``."""
    assert config.env is not None
    assert config.max_concurrent != "auto"  # refused with --env
    file = ("@", str(config.env_config)) if config.env_config is not None else ()
    return load_environment(
        config.env,
        python=config.env_python,
        seed=config.seed,
        held_out=held_out,
        validate=bool(config.eval_interval),
        arguments=(*file, *config.env_arguments),
        eval_split=config.env_eval_split,
        most_tasks=config.env_tasks,
        models=config.env_model,
        trained=config.trained_models,
        untrained=config.untrained_models,
        workers=config.env_workers,
        max_concurrent=config.max_concurrent,
        keep_traces=config.keep_rollouts == "all",
    )


def sampling_parameters(config: TrainConfig, model_path: Path) -> dict[str, Any]:
    """Sampling parameters of rollouts with the local trainer. Raises ``ConfigError`` for --routed-experts of a model
    without experts."""
    sampling: dict[str, Any] = {"temperature": config.temperature, "max_new_tokens": config.max_new_tokens}
    if config.top_p < 1 or config.top_k != -1:
        sampling |= {"top_p": config.top_p, "top_k": config.top_k, "nucleus": True}
    if config.routed_experts:
        if (shape := experts_shape_of(str(model_path))) is None:
            raise ConfigError(
                f"--routed-experts: {model_path} has no num_experts_per_tok in its config.json; leave it out"
            )
        sampling["routed_experts"] = list(shape)
    return sampling


@contextmanager
def model_for_agents(
    config: TrainConfig, parts: RunParts, *, url: str, model_path: Path, sampling: dict[str, Any] | None = None
) -> Iterator[LLM]:
    """The resource ``main_llm`` of agents: the engine at ``url``, or a gateway before it. ``sampling`` replaces the
    sampling parameters of ``config``."""
    sampling = {**config.template, **(sampling or sampling_parameters(config, model_path))}
    llm = LLM(endpoint=url, model=str(model_path), sampling_parameters=sampling)
    pool_has_gateway = config.env is not None or config.runners == "controller"
    if pool_has_gateway or not parts.behind_gateway:
        yield llm
        return
    from agl_slime.gateway.remote import StoreGateway
    from agl_slime.gateway.server import client_sampling

    token, settings = secrets.token_urlsafe(18), config.gateway
    if config.runners.startswith(("process", "ray")):
        settings = replace(settings, host=config.store_host)
    with StoreGateway(store=parts.store, llm=llm, token=token, settings=settings) as gateway:
        sampling = client_sampling(sampling)
        yield ProxyLLM(endpoint=gateway.endpoint, model=llm.model, api_key=token, sampling_parameters=sampling)


def make_loop(
    config: TrainConfig,
    parts: RunParts,
    *,
    llm: LLM,
    engine_url: str,
    save_interval: int | None = None,
    controller_log: Path | None = None,
    **functions: Any,
) -> OnlineRLLoop:
    """The loop of a run. Agents use ``llm``, which the engine at ``engine_url`` serves; ``save_interval`` replaces the
    one of ``config``, ``functions`` are further arguments of ``OnlineRLLoop``."""
    auto = config.max_concurrent == "auto"
    most = AutoLimitSettings.most if config.max_concurrent == "auto" else config.max_concurrent
    settings = RunnerSettings(max_concurrent=most, gateway=config.gateway)
    if parts.environment is not None:
        where: dict[str, Any] = {"host": config.controller_host, "port": config.controller_port}
        plan = parts.environment.plan(settings=settings, log=controller_log, **where)
    else:
        plan = RunnerPlan.parse(config.runners)
        plan = replace(plan, controller=config.controller(log=controller_log), settings=settings)
    return OnlineRLLoop(
        store=parts.store,
        agent=parts.agent,
        tasks=parts.tasks,
        val_tasks=parts.val_tasks,
        resources=parts.resources,
        llm=llm,
        engine_loads=EngineLoads(engine_url) if auto else None,
        settings=LoopSettings(
            num_iterations=config.num_iterations,
            rollout_batch_size=config.rollout_batch_size,
            n_samples_per_prompt=config.n_samples_per_prompt,
            rollout_timeout_s=config.rollout_timeout,
            max_attempts=config.max_attempts,
            eval_interval=config.eval_interval,
            eval_tasks=config.eval_rollouts,
            save_interval=save_interval or config.save_interval,
            max_staleness=config.max_staleness,
            seed=config.seed,
        ),
        runners=replace(plan, store_host=config.store_host),
        **functions,
    )


@asynccontextmanager
async def served_page(run: RunDir, view: View, console: Console) -> AsyncIterator[None]:
    """With ``--view web``: serve the run's page, and open it where there is a terminal."""
    if view != "web":
        yield
        return
    from agl_slime.report.view import serving

    async with serving([run.path], follow=True) as url:
        console.print(f"the run is at {url}", highlight=False, soft_wrap=True)
        if console.is_terminal:
            await run_in_thread(webbrowser.open, url)
        yield


def make_reports(config: TrainConfig, run: RunDir, console: Console, **more: Any) -> StandardReporters:
    """The reporters of ``run``; ``more`` are further arguments of ``StandardReporters``."""
    return StandardReporters(
        run,
        console=console,
        view=config.view,
        seed=config.seed,
        keep=config.keep_rollouts,
        track=config.track,
        **more,
    )


@contextmanager
def step(console: Console, text: str) -> Iterator[None]:
    """Show ``text`` while the block runs: a spinner on a terminal, elsewhere one line."""
    if console.is_terminal:
        with console.status(f"{text} ..."):
            yield
    else:
        say(console, text)
        yield


def say(console: Console, text: str) -> None:
    """Print a status line without Rich markup or wrapping."""
    print(f"{text} ...", file=console.file, flush=True)
