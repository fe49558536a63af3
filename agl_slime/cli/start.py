"""The start of a run, new or resumed: its directory, its model, and the tasks that it holds out."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rich.console import Console

from agl_slime.agent.agent import SGLangLitAgent
from agl_slime.agent.loading import configure_agent, load_agent
from agl_slime.cli.config_file import config_values
from agl_slime.cli.demo import LOOKUP_POLICY, LookupDemonstrations
from agl_slime.cli.models import find_model
from agl_slime.cli.options import flag
from agl_slime.cli.settings import TrainConfig
from agl_slime.cli.wiring import RunInputs, environment_of
from agl_slime.engine.client.describe import EngineDescription
from agl_slime.errors import ConfigError
from agl_slime.loop.task_files import digest
from agl_slime.loop.tasks import Task, read_tasks, shuffled
from agl_slime.report.files import PendingRun, RunDir, check_run_dir, make_directories, new_run_dir, read_object
from agl_slime.support.files import LOCK, remove, sole_owner
from agl_slime.support.model_files import model_digests
from agl_slime.support.terminal import print_line, say
from agl_slime.support.threads import call_user_code, run_in_thread
from agl_slime.tokens.formats import UNREAD_FORMAT, find_format
from agl_slime.tokens.images import ImageSettings
from agl_slime.tokens.tokenizer import NO_TEMPLATE

logger = logging.getLogger(__name__)

# Settings that determine a run's rollouts and their order.
_FIXED = ("agent", "seed", "tasks", "eval_tasks", "env", "env_arguments", "env_tasks", "task_sampling")
_FIRST_VERSION = "default"  # engines' name of the weights that they were started with


@contextmanager
def run_directory(config: TrainConfig) -> Iterator[PendingRun]:
    """The directory of the run, locked while the block lasts. When the block ends before ``begin``, the directory is
    restored, except for the log of an engine."""
    if config.output_dir is None:
        path = new_run_dir(config.title)
        made = [path]
    else:
        path = config.output_dir
        made = make_directories(path)
    created = [file for file in (path / LOCK, RunDir(path).weights) if not file.exists()]
    pending = None
    with sole_owner(path):
        try:
            mode: dict[str, Any] = {"resume": config.resume, "overwrite": config.overwrite, "fixed": _FIXED}
            pending = check_run_dir(path, settings=config_values(config), **mode)
            yield pending
        finally:
            if pending is None or not pending.begun:
                for file in created:
                    remove(file)
                with suppress(OSError):  # it has an engine's log
                    for directory in made:
                        directory.rmdir()


def read_start(config: TrainConfig) -> dict[str, Any]:
    """``start.json`` of a resumed run; empty for a new one."""
    return (read_object(RunDir(config.output_dir).start) or {}) if config.resume and config.output_dir else {}


async def load_inputs(config: TrainConfig, *, prompt_tasks: list[Task] | None = None) -> RunInputs:
    """Load agent and tasks as ``config`` names them; ``prompt_tasks`` stand for its ``--tasks``. Raises
    ``ConfigError``."""
    if config.environment.name is not None:
        held_out = read_start(config).get("held_out") or None  # 0 where the taskset has its own split
        env = await run_in_thread(partial(environment_of, config, held_out=held_out))
        return RunInputs(tasks=env.tasks, val_tasks=env.val_tasks, held_out=env.held_out, environment=env)
    agent = None
    if config.runners != "controller":  # a controller imports the agent itself, in another Python
        agent, images = await run_in_thread(load_agent, config.agent), config.gateway.images
        configure_agent(
            agent,
            scheduler=config.multi_turn_scheduler,
            max_turns=config.gateway.max_turns,
            images=images if images != ImageSettings() else None,  # None: the agent class's limits
            plugins=config.external_plugins,
        )
    if config.tasks is not None or prompt_tasks is not None:
        tasks, val_tasks, held_out = split_tasks(config, prompt_tasks)
        return RunInputs(agent=agent, tasks=tasks, val_tasks=val_tasks, held_out=held_out)
    if (make_task := getattr(agent, "make_task", None)) is None:
        raise ConfigError(f"there are no tasks: give --tasks FILE.jsonl, or define make_task(rng) on {config.agent}")
    val_tasks = read_tasks(config.eval_tasks, flag="--eval-tasks") if config.eval_tasks is not None else None
    return RunInputs(agent=agent, tasks=make_task, val_tasks=val_tasks)


def split_tasks(
    config: TrainConfig, prompt_tasks: list[Task] | None = None
) -> tuple[list[Task], list[Task] | None, int]:
    """Training tasks, validation tasks, and the number held out of ``--tasks``: without ``--eval-tasks`` a tenth,
    chosen by the seed."""
    tasks = read_tasks(config.tasks or "") if prompt_tasks is None else prompt_tasks
    if config.eval_tasks is not None:
        return tasks, read_tasks(config.eval_tasks, flag="--eval-tasks"), 0
    default = max(1, len(tasks) // 10) if config.loop.eval_interval else 0
    held_out = int(read_start(config).get("held_out", default))
    if config.loop.eval_interval and not held_out < len(tasks):
        fix = "give --eval-tasks, or --eval-interval 0"
        source = "--prompt-data" if config.tasks is None else f"--tasks {config.tasks}"
        raise ConfigError(f"{source}: of {len(tasks)} none can be held out for validations; {fix}")
    if config.loop.eval_interval and not held_out:
        why = "the run began without validations and held no tasks out"
        raise ConfigError(f"--eval-interval {config.loop.eval_interval}: {why}; give --eval-tasks")
    out = set(shuffled(range(len(tasks)), f"{config.loop.seed}:held out")[:held_out])
    val_tasks = [task for number, task in enumerate(tasks) if number in out]
    return [task for number, task in enumerate(tasks) if number not in out], val_tasks or None, held_out


@dataclass(frozen=True)
class Start:
    """The model that trainer and engine start from, and the content of ``start.json``."""

    model: Path
    record: dict[str, Any]


async def find_start(
    config: TrainConfig, inputs: RunInputs, run: RunDir, described: EngineDescription | None, console: Console
) -> Start:
    """Find the model and check the tasks of ``run``; writes nothing. Raises ``ConfigError`` when a resumed run began
    with other tasks or another model."""
    recorded_start, environment = read_start(config), inputs.environment
    recorded_model, digests = recorded_start.get("model"), dict[str, str]()
    sources: dict[str, Any] = {"env": config.title}
    if environment is None:
        sources = {name: getattr(config, name) for name in ("tasks", "eval_tasks")}
    for name, source in sources.items():
        if source is not None:
            digests[name] = environment.digest if environment else await run_in_thread(digest, source)
            if (recorded_start.get("task_files") or digests).get(name) != digests[name]:
                fix = "resume it with the original ones, or begin a new run"
                why = f"not the tasks that the run in {run.path} began with"
                raise ConfigError(f"{flag(name)} {source}: {why}; {fix}")
    if environment is not None:
        print_line(environment.summary, to=console)
    if config.model_path is not None and (recorded_model is None or "model_path" in run.changed):
        model = await run_in_thread(find_model, config.model_path, partial(say, console))
        if recorded_model not in (None, str(model)):
            raise ConfigError(f"the run in {run.path} began with the model at {recorded_model}: leave --model-path out")
    elif recorded_model is not None:
        model = Path(str(recorded_model))
        if not (model / "config.json").is_file():
            raise ConfigError(f"the run in {run.path} began with the model at {recorded_model}, which no longer exists")
    else:
        model = default_model(config, inputs.agent, described)
    model_files = await run_in_thread(model_digests, model)
    begun_files = recorded_start.get("model_files") or model_files
    names = sorted({*begun_files, *model_files})
    if changed := [name for name in names if begun_files.get(name) != model_files.get(name)]:
        why = f"{', '.join(changed)}: not as in the model that the run in {run.path} began with"
        raise ConfigError(f"{model}: {why}; resume it with the original model, or begin a new run")
    if inputs.held_out and not config.resume and environment is None:
        rest = "give --eval-tasks to train on all"
        print_line(f"{inputs.held_out} of the tasks are held out for validations; {rest}", to=console)
    record = {"model": str(model), "held_out": inputs.held_out, "task_files": digests, "model_files": model_files}
    return Start(model, record)


def default_model(config: TrainConfig, agent: Any, described: EngineDescription | None) -> Path:
    """The model of a run without ``--model-path``: the server's, or the tiny policy for its own task."""
    if described is not None:
        server = f"the server at {described.base_url} serves {described.model_path!r}"
        if described.weight_version != _FIRST_VERSION:
            why = f"with weights of version {described.weight_version!r}, which were pushed to it"
            raise ConfigError(f"--model-path is needed: {server} {why}; name the model to start from")
        if not (Path(described.model_path) / "config.json").is_file():
            raise ConfigError(f"--model-path is needed: {server}, which is not a directory on this machine")
        return Path(described.model_path).resolve()
    if type(getattr(agent, "demonstrations", None)) is LookupDemonstrations:
        return LOOKUP_POLICY.resolve()
    why = "the tiny policy of the first command knows its lookup task only"
    fix = "agl-slime demo-policy makes one for an agent with `demonstrations`"
    raise ConfigError(f"--model-path is needed for {config.title}: {why}; {fix}")


async def uses_raw_prompts(inputs: RunInputs, model: Path, *, seed: int) -> bool:
    """Whether the agent's prompt of the first task is a text, as a model without chat template needs. Raises
    ``ConfigError`` when it is a list of chat messages."""
    agent = inputs.agent
    if not isinstance(agent, SGLangLitAgent) or agent.template_kwargs.get("chat_template"):
        return False
    prompt = await _call_with_first_task(agent.build_prompt, inputs, seed)
    if prompt is not None and not isinstance(prompt, str):
        raise ConfigError(f"--model-path {model}: {type(agent).__name__} gives chat messages, and {NO_TEMPLATE}")
    return prompt is not None


async def check_tools(inputs: RunInputs, model: Path, tokenizer: Any, *, seed: int) -> str:
    """Raise ``ConfigError`` when the agent offers tools for the first task and no parser reads the calls of the model's
    chat template. Returns a warning, or "", for agents behind the gateway, whose tools are unknown."""
    agent = inputs.agent
    if isinstance(agent, SGLangLitAgent):
        kwargs = agent.template_kwargs
        if agent.tool_parser or agent.chat_api or find_format(tokenizer, kwargs):
            return ""
        if await _call_with_first_task(agent.build_tools, inputs, seed):
            raise ConfigError(f"--model-path {model}: {type(agent).__name__} offers tools, and {UNREAD_FORMAT}")
        return ""
    if inputs.environment is None or find_format(tokenizer) is not None:
        return ""
    return f"--model-path {model}: a request with tools will be refused, for {UNREAD_FORMAT}"


async def _call_with_first_task(make: Callable[[Any], Any], inputs: RunInputs, seed: int) -> Any:
    """The result of an agent's method for the first task; ``None`` when there is none or the method fails."""
    tasks = inputs.tasks
    try:
        if callable(tasks):
            task = await call_user_code(tasks, random.Random(seed))
        elif isinstance(tasks, Sequence) and tasks:
            task = tasks[0]
        else:
            return None
        return await call_user_code(make, task)
    except Exception as error:  # the rollout of this task reports it; other tasks may work
        logger.debug("%s of the first task failed.", getattr(make, "__name__", make), exc_info=error)
        return None


def set_aside(run: RunDir) -> None:
    """Move the reports of a run without a checkpoint to ``before-N``: resumed, it starts from iteration 1."""
    if not any(path.exists() for path in (run.metrics, run.trained, run.ledger)):
        return
    aside = next(path for n in count(1) if not (path := run.path / f"before-{n}").exists())
    aside.mkdir()
    for path in run.reports:
        if path.exists():
            path.rename(aside / path.name)
    logger.warning("There is no checkpoint in %s: the run begins again; its earlier files are in %s.", run.path, aside)
