"""The parts of a run that both trainers share: agent, tasks, model endpoint, loop and reports."""

from __future__ import annotations

import secrets
import webbrowser
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agl_slime.cli.options import default_of
from agl_slime.cli.settings import TrainConfig
from agl_slime.environments.environment import Environment, load_environment
from agl_slime.loop.online import OnlineRLLoop
from agl_slime.loop.tasks import Tasks
from agl_slime.report import StandardReporters
from agl_slime.report.files import RunDir
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent, NamedResources, ProxyLLM
from agl_slime.support.terminal import print_line
from agl_slime.support.threads import run_in_thread


@dataclass(frozen=True, kw_only=True)
class RunInputs:
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
    settings = replace(
        config.environment,
        trained=config.gateway.trained_models,
        untrained=config.gateway.untrained_models,
        workers=RunnerPlan.parse(config.runners).count,
        max_concurrent=config.max_concurrent,
        eval_split=None if config.eval_tasks is None else str(config.eval_tasks),
        keep_traces=config.keep_rollouts == "all",
    )
    validate = bool(config.loop.eval_interval)
    return load_environment(settings, seed=config.loop.seed, held_out=held_out, validate=validate)


def sampling_parameters(config: TrainConfig) -> dict[str, Any]:
    """Sampling parameters of rollouts with the local trainer."""
    params, least = config.sampling, ("temperature", "max_new_tokens")
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    sampling = {
        name: value
        for name, value in values.items()
        if name in least or value != default_of(TrainConfig, f"sampling.{name}")
    }
    if params.top_p < 1 or params.top_k != -1:
        sampling |= {"top_p": params.top_p, "top_k": params.top_k, "nucleus": True}
    return {**sampling, **sampling.pop("extra", {})}


def teacher_warning(config: TrainConfig) -> dict[str, str]:
    """A warning, by its key, of a policy that is sampled at another temperature than its teacher is scored at."""
    if not config.teacher_url or config.sampling.temperature == 1:
        return {}
    why = "the teacher's log-probs are at temperature 1, so the KL to it is not 0 even for equal models"
    return {"teacher_temperature": f"--temperature {config.sampling.temperature:g} with a teacher: {why}"}


@contextmanager
def model_for_agents(
    config: TrainConfig, inputs: RunInputs, *, url: str, model_path: Path, sampling: dict[str, Any] | None = None
) -> Iterator[LLM]:
    """The resource ``main_llm`` of agents: the engine at ``url``, or a gateway before it. ``sampling`` replaces the
    sampling parameters of ``config``."""
    sampling = {**config.template, **(sampling or sampling_parameters(config))}
    llm = LLM(endpoint=url, model=str(model_path), sampling_parameters=sampling)
    pool_has_gateway = config.environment.name is not None or config.runners == "controller"
    if pool_has_gateway or not inputs.behind_gateway:
        yield llm
        return
    from agl_slime.gateway.remote import StoreGateway
    from agl_slime.gateway.server import client_sampling

    token, settings = secrets.token_urlsafe(18), config.gateway
    if config.runners.startswith(("process", "ray")):
        settings = replace(settings, host=config.store_host)
    with StoreGateway(store=inputs.store, llm=llm, token=token, settings=settings) as gateway:
        sampling = client_sampling(sampling)
        yield ProxyLLM(endpoint=gateway.endpoint, model=llm.model, api_key=token, sampling_parameters=sampling)


def make_loop(
    config: TrainConfig,
    inputs: RunInputs,
    *,
    llm: LLM,
    controller_log: Path | None = None,
    save_interval: int | None = None,
    **functions: Any,
) -> OnlineRLLoop:
    """The loop of a run, whose agents use ``llm``; ``save_interval`` is by default the run's; ``functions`` are further
    arguments of ``OnlineRLLoop``."""
    settings = RunnerSettings(max_concurrent=config.max_concurrent, gateway=config.gateway)
    if inputs.environment is not None:
        plan = inputs.environment.plan(settings=settings, controller=config.controller, log=controller_log)
    else:
        plan = replace(RunnerPlan.parse(config.runners), settings=settings)
        if plan.kind == "controller":
            plan = replace(plan, controller=config.controller.complete(agent=config.agent, log=controller_log))
    return OnlineRLLoop(
        store=inputs.store,
        agent=inputs.agent,
        tasks=inputs.tasks,
        val_tasks=inputs.val_tasks,
        resources=inputs.resources,
        llm=llm,
        settings=config.loop if save_interval is None else replace(config.loop, save_interval=save_interval),
        runners=replace(plan, store_host=config.store_host),
        **functions,
    )


@asynccontextmanager
async def reporting(
    config: TrainConfig,
    run: RunDir,
    console: Console,
    *,
    tokenizer: Any,
    warnings: Mapping[str, str],
    began: float | None = None,
) -> AsyncIterator[StandardReporters]:
    """The reporters of ``run``, which begin with the ``warnings``, by their keys. With ``--view web`` its page is
    served, and opened where there is a terminal."""
    async with AsyncExitStack() as stack:
        if config.view == "web":
            from agl_slime.report.view import serving

            url = await stack.enter_async_context(serving([run.path], follow=True))
            print_line(f"the run is at {url}", to=console)
            if console.is_terminal:
                await run_in_thread(webbrowser.open, url)
        settings: Any = {"view": config.view, "seed": config.loop.seed, "keep": config.keep_rollouts}
        reports = StandardReporters(run, console=console, track=config.track, began=began, **settings)
        reports.rollouts.tokenizer = tokenizer
        with reports:
            for key, text in warnings.items():
                reports.warn(text, key)
            yield reports
