"""``agl-slime eval``: evaluate one model, or compare two on the same tasks, with a run's settings and the flags."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console

from agl_slime.agent.chat_api import DEFAULT_KEY, ChatApi
from agl_slime.cli.models import check_model, find_model
from agl_slime.cli.options import flag, split_env_flags
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.errors import ConfigError, EngineError, LoopError, format_exception
from agl_slime.loop.tasks import Task, as_task_source, read_tasks
from agl_slime.report.console import format_seconds
from agl_slime.report.files import RunDir, dump, make_directories, open_run_dir, read_object, redacted
from agl_slime.support.files import sole_owner, write_file
from agl_slime.support.model_files import model_digests
from agl_slime.support.net import shown_url
from agl_slime.support.ranges import check_ranges
from agl_slime.support.terminal import PlainConsole, print_line
from agl_slime.support.threads import run_in_thread
from agl_slime.tools.evaluation.settings import parse_command
from agl_slime.tools.evaluation.source import source_digest
from agl_slime.train.local.settings import LocalTrainerSettings

if TYPE_CHECKING:
    from agl_slime.tools.evaluation.samples import Sampling


MOST_TASKS = 100_000  # of make_task; more would take minutes to make
RUN_FIELDS = ("agent", "max_new_tokens", "temperature", "max_turns", "multi_turn_scheduler", "rollout_timeout", "seed")
RUN_FIELDS += ("chat_template_kwargs", "later_systems")
ENV_FIELDS = ("env_tasks", "eval_tasks", "runners", "env_arguments", "env_model")
ENV_FIELDS += ("trained_models", "untrained_models")
_RUN_SETTINGS = {
    "agent": ...,
    "env": ...,
    "env_python": ...,
    "temperature": ...,
    "max_new_tokens": ...,
    "chat_template_kwargs": ...,
    "max_concurrent": 256,
    "rollout_timeout": ...,
    "sglang_url": None,
    "engine": "embedded",
    "seed": ...,
}
_FIXED = ("models", "agent", "tasks", "k", "seed", "temperature", "max_new_tokens")
_FIXED += ("files", "agent_source", "environment", "max_turns", "multi_turn_scheduler")


@dataclass(frozen=True, kw_only=True)
class OtherModel:
    """A model behind an address."""

    openai_url: str | None = None
    """An OpenAI-compatible URL, such as https://host/v1, whose model does the tasks, before the named one or alone. It
    gets chat messages."""
    openai_model: str | None = None
    """The name of the model at --openai-url; not needed where there is only one."""
    openai_key_env: str = DEFAULT_KEY
    """The environment variable with the key of --openai-url; without it no key is sent."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(OtherModel):
    """Evaluate one model, or compare two, on held-out tasks: mean reward, pass@1, pass@k, 95 % intervals, failures. The
    same command resumes an interrupted evaluation. Agent, tasks and limits of rollouts default to the run's."""

    models: tyro.conf.Positional[tuple[Path, ...]]
    """One model, or two: before and after. A run's directory (its newest weights), a checkpoint of one, a Hugging Face
    directory, smollm2, or a name on the hub."""
    with_start: bool = False
    """Compare the run's model with the one that the run began with."""
    tasks: Path | None = None
    """Tasks as JSON lines; by default the run's held-out tasks, or the agent's make_task(rng) with the seed of its
    validations."""
    n_tasks: int | None = None
    """Most tasks; all of a file by default, and 32 of make_task."""
    k: int = 1
    """Samples per task."""
    passes: float = 1.0
    """Least reward of a sample that passes."""
    output_dir: Path | None = None
    """Directory of samples and eval.json; by default one under evals/, named after a hash of the settings."""

    settings: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Settings of a run by their names, which take precedence over the run's own."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("k", lambda value: value >= 1, "at least 1"),
            ("n_tasks", lambda value: 1 <= value <= MOST_TASKS, f"from 1 to {MOST_TASKS}"),
            named=flag,
        )
        changed = self.settings
        if (changed.get("temperature") or 0) < 0:
            raise ConfigError(f"--temperature must be 0 (greedy) or more, got {changed['temperature']}")
        if (env := changed.get("env")) is not None and ("agent" in changed or self.tasks is not None):
            raise ConfigError(f"--env {env} has its own agents and tasks; leave --agent and --tasks out")
        if self.openai_url is not None:
            if len(self.models) > 1 or self.with_start:
                raise ConfigError(
                    "--openai-url: two are compared at most; name one model, or none, without --with-start"
                )
            if env is not None:
                raise ConfigError("--openai-url: an environment's agents need an engine; use --agent and --tasks")
            return
        if self.openai_model is not None:
            raise ConfigError(f"--openai-model {self.openai_model} needs its address: give --openai-url")
        most = 1 if self.with_start or changed.get("sglang_url") else 2
        if not 1 <= len(self.models) <= most:
            which = "one model" if most == 1 else "one model, or two to compare"
            raise ConfigError(f"agl-slime eval: {len(self.models)} models are named; give {which}")


def main(arguments: Sequence[str]) -> Coroutine[Any, Any, dict[str, Any]]:
    ours, env_flags = split_env_flags(arguments)
    options = {"env_arguments": env_flags or None}
    return run_evaluation(parse_command(EvalConfig, _RUN_SETTINGS, prog="agl-slime eval", arguments=ours, **options))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The parts of an evaluation or a conversation: models (to load, or at an address), agent, tasks, sampling
    parameters."""

    models: list[Path | ChatApi]
    settings: TrainConfig
    agent: Any
    tasks: list[Task]
    sampling: dict[str, Any]


async def prepare(config: EvalConfig) -> Prepared:
    """Find the models, then agent, tasks and settings from the flags and the run."""
    run = RunDir(config.models[-1] if config.models else Path("no run"))
    run_settings = run.settings() or {} if (run.checkpoints.is_dir() or run.model.is_dir()) else {}
    models: list[Path | ChatApi] = []
    for path in config.models:
        models.append(await run_in_thread(find_model, _weights(path), lambda text: None))
    if config.with_start:
        start = (read_object(run.start) or {}).get("model")
        if start is None:
            raise ConfigError(f"--with-start: {run.path} is not a run with a start.json; name two models")
        models.insert(0, Path(str(start)))
    settings = _settings(config, run_settings)
    if config.openai_url is not None:
        if settings.environment.name is not None:
            raise ConfigError("--openai-url: the run is of an environment, whose agents need an engine; leave it out")
        api = await find_chat_api(config.openai_url, model=config.openai_model, key_env=config.openai_key_env)
        models.insert(0, api)
    temperature = config.settings.get("temperature", _validation_sampling(run_settings).get("temperature"))
    temperature = settings.sampling.temperature if temperature is None else temperature
    agent, tasks = await run_in_thread(_agent_and_tasks, config, settings, run if run_settings else None)
    sampling = {"temperature": temperature, "max_new_tokens": settings.sampling.max_new_tokens}
    return Prepared(models=models, settings=settings, agent=agent, tasks=tasks, sampling=sampling)


async def find_chat_api(url: str, *, model: str | None, key_env: str) -> ChatApi:
    """``model`` at ``url``; without a name the server's only model. Raises ``ConfigError``."""
    key = os.environ.get(key_env)
    if key is None and key_env != DEFAULT_KEY:
        raise ConfigError(f"--openai-key-env {key_env}: this environment variable is not set")
    api = ChatApi(url=url, model=model or "", api_key=key)
    if model is not None:
        return api
    flag = f"--openai-url {shown_url(url)}"
    try:
        names = await api.models()
    except EngineError as error:
        raise ConfigError(f"{flag} does not list its models ({error}); give --openai-model") from error
    finally:
        await api.aclose()
    if len(names) != 1:
        listed = ", ".join(names[:5]) or "none"
        raise ConfigError(f"{flag} has {len(names)} models ({listed}); name one with --openai-model")
    return replace(api, model=names[0])


async def run_evaluation(config: EvalConfig, *, console: Console | None = None) -> dict[str, Any]:
    """Take the missing samples, write ``eval.json`` and return its content."""
    console = console or PlainConsole()
    ready = await prepare(config)
    models, settings, tasks = ready.models, ready.settings, ready.tasks
    identity: dict[str, Any] = {
        "models": [str(model) for model in models],
        # by which changed models are recognized
        "files": [{} if isinstance(model, ChatApi) else await run_in_thread(model_digests, model) for model in models],
        "agent": settings.title,
        "agent_source": await run_in_thread(_agent_source, settings, ready.agent),
        "environment": await run_in_thread(_environment_identity, settings),
        "max_turns": settings.gateway.max_turns,
        "multi_turn_scheduler": settings.multi_turn_scheduler,
        "tasks": hashlib.blake2b(dump(tasks), digest_size=8).hexdigest(),
        "k": config.k,
        "seed": settings.loop.seed,
        **settings.template,
        **({"reward_key": settings.local.reward_key} if settings.local.reward_key else {}),
        **ready.sampling,
        "sglang_url": settings.sglang_url and shown_url(settings.sglang_url),
    }
    name = hashlib.blake2b(dump(identity), digest_size=5).hexdigest()
    directory = config.output_dir or Path("evals") / f"{settings.title.rpartition(':')[2]}-{name}"
    make_directories(directory)
    from agl_slime.tools.evaluation.samples import SampleFile, reward_name, take_samples

    with sole_owner(directory):
        resume = (directory / "config.json").exists()
        open_run_dir(directory, agent=settings.title, settings=identity, resume=resume, fixed=_FIXED)
        write_file(directory / "tasks.jsonl", b"".join(map(dump, tasks)))
        samples, new = [], 0
        for number, model in enumerate(models):
            with SampleFile(directory / f"samples-{number + 1}.jsonl") as file:
                name = model.model if isinstance(model, ChatApi) else model.name
                which = f"model {number + 1} of {len(models)}" if len(models) > 1 else name
                new -= len(file.lines)
                if file.missing(tasks=len(tasks), k=config.k):
                    reward_key = reward_name(line for lines in samples for line in lines)
                    engine = sampling_with(ready, model, directory=RunDir(directory), console=console)
                    async with engine as sampling:
                        with _progress(console, which) as report:
                            options: dict[str, Any] = {"k": config.k, "sampling": sampling, "run_key": reward_key}
                            await take_samples(tasks, into=file, on_progress=report, **options)
                samples.append(file.lines)
                new += len(file.lines)
        result = _result(config, identity, samples, tasks)
        write_file(directory / "eval.json", dump(result, indent=2))
    if not new:
        text = f"0 new samples: the figures are of {sum(map(len, samples))} earlier samples"
        print_line(f"{text}; a new --output-dir takes new ones", to=console)
    for line in format_result(result):
        print_line(line, to=console)
    print_line(f"written to    {directory / 'eval.json'}", to=console)
    for model in result["models"]:
        if model["failed"] == model["samples"]:
            reason = max(model["failures"], key=model["failures"].get)
            raise LoopError(f"{model['model']}: all {model['samples']} samples failed, most with {reason}")
    return result


def format_result(result: dict[str, Any]) -> list[str]:
    lines, n_tasks = [], result["tasks"]
    for model in result["models"]:
        figures = {name: value for name, value in model.items() if name == "reward" or name.startswith("pass@")}
        failed = f"; {model['failed']} of {model['samples']} samples failed" if model["failed"] else ""
        lines.append(f"{model['model']}: {_estimates(figures, n_tasks) or 'no sample has a reward'}{failed}")
        lines += [f"  failed: {count} x {reason}" for reason, count in model["failures"].items()]
    if (difference := result.get("difference")) is not None:
        figures = {name: difference[name] for name in ("reward", "pass@1")}
        estimates = _estimates(figures, n_tasks, kind="+.3f") or "no task has rewards of both"
        lines.append(f"difference on the same tasks: {estimates}")
        lines.append(
            f"{len(difference['gained'])} tasks from wrong to right, {len(difference['lost'])} from right to wrong"
        )
    repeats = f" in {result['draws']} draws" if result["draws"] > n_tasks else ""
    each = f"{n_tasks} tasks{repeats}, {result['k']} samples of each"
    return [*lines, f"{each}; [95 % interval over tasks]"]


def _validation_sampling(run_settings: dict[str, Any]) -> dict[str, Any]:
    return train_config(eval_sampling=run_settings.get("eval_sampling") or "").validation_sampling


def _estimates(figures: Mapping[str, Any], n_tasks: int, *, kind: str = ".3f") -> str:
    """The known figures, each with its interval, and its number of tasks if it is not ``n_tasks``."""
    texts = []
    for name, value in figures.items():
        if value:
            between = "" if value["low"] is None else f" [{value['low']:{kind}}, {value['high']:{kind}}]"
            number = "" if value["tasks"] == n_tasks else f" over {value['tasks']} of {n_tasks} tasks"
            texts.append(f"{name} {value['mean']:{kind}}{between}{number}")
    return ", ".join(texts)


def _weights(path: Path) -> Path:
    """``path``, or the directory of the weights in a run's checkpoint."""
    path = path / "trainer" if (path / "trainer" / "config.json").is_file() else path
    check_model(path)
    return path


def _agent_source(settings: TrainConfig, agent: Any) -> str | None:
    """A digest of the agent's code; ``None`` for an environment, whose agents run in another Python."""
    from agl_slime.agent.loading import agent_module, load_plugins

    if settings.environment.name is not None:
        return None
    return source_digest(agent, [agent_module(settings.agent), *load_plugins(settings.external_plugins)])


def _environment_identity(settings: TrainConfig) -> dict[str, Any] | None:
    if settings.environment.name is None:
        return None
    arguments = settings.environment.arguments
    files = [hashlib.sha256(Path(path).read_bytes()).hexdigest() for mark, path in pairwise(arguments) if mark == "@"]
    return redacted({"arguments": arguments, "config": files, "models": settings.environment.models})


def _settings(config: EvalConfig, run_settings: dict[str, Any]) -> TrainConfig:
    """The settings of a run: from the flags, else from the model's run."""
    inherited = {name: run_settings[name] for name in RUN_FIELDS if run_settings.get(name) is not None}
    if (limit := _validation_sampling(run_settings).get("max_new_tokens")) is not None:
        inherited["max_new_tokens"] = limit
    inherited["external_plugins"] = tuple(map(Path, run_settings.get("external_plugins") or ()))
    if "agent" not in config.settings and (key := (run_settings.get("local") or {}).get("rewards")):
        inherited["local"] = LocalTrainerSettings(rewards=key)
    flags = dict(config.settings)
    if flags.get("temperature") == 0:
        del flags["temperature"]  # TrainConfig refuses 0, which training cannot use; Prepared.sampling has it
    if (env := flags.get("env") or (None if "agent" in flags else run_settings.get("env"))) is not None:
        inherited.pop("agent", None)
        if "env" not in flags:
            known = {name: value for name in ENV_FIELDS if (value := run_settings.get(name)) is not None}
            inherited |= {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
            paths = {name: run_settings.get(name) for name in ("env_python", "eval_tasks")}
            inherited |= {name: Path(path) for name, path in paths.items() if path}
        flags["env"] = env
    return train_config(**{"max_concurrent": _RUN_SETTINGS["max_concurrent"], **inherited, **flags})


def _agent_and_tasks(config: EvalConfig, settings: TrainConfig, run: RunDir | None) -> tuple[Any, list[Task]]:
    from agl_slime.agent.loading import configure_agent, load_agent
    from agl_slime.cli.start import split_tasks

    if settings.environment.name is not None:
        from agl_slime.cli.wiring import environment_of

        env_run = run if "env" not in config.settings else None
        start = (read_object(env_run.start) or {}) if env_run is not None else {}
        seed = (env_run.settings() or {}).get("seed", settings.loop.seed) if env_run is not None else settings.loop.seed
        same_split = replace(settings, loop=replace(settings.loop, seed=seed))
        environment = environment_of(same_split, held_out=start.get("held_out") or None)
        if env_run is not None and environment.held_out and not start.get("held_out"):
            raise ConfigError(
                f"the run in {env_run.path} held out no tasks; --env {settings.environment.name} evaluates all tasks"
            )
        tasks: list[Any] = environment.val_tasks or environment.tasks
        return environment, tasks[: config.n_tasks]
    agent = load_agent(settings.agent)
    configure_agent(
        agent,
        scheduler=settings.multi_turn_scheduler,
        max_turns=settings.gateway.max_turns,
        plugins=settings.external_plugins,
    )
    if config.tasks is not None:
        return agent, read_tasks(config.tasks)[: config.n_tasks]
    run_settings: dict[str, Any] = (run.settings() or {}) if run is not None else {}
    if run is not None and run_settings.get("tasks"):
        paths = {name: run_settings.get(name) for name in ("tasks", "eval_tasks")}
        named: dict[str, Any] = {name: Path(path) for name, path in paths.items() if path}
        named |= {"seed": run_settings["seed"], "eval_interval": run_settings["eval_interval"]}
        held_out = split_tasks(train_config(**named, output_dir=run.path, resume=True))[1]
        if not held_out:
            raise ConfigError(f"the run in {run.path} held out no tasks; give --tasks FILE.jsonl")
        return agent, held_out[: config.n_tasks]
    if (make_task := getattr(agent, "make_task", None)) is None:
        raise ConfigError(f"there are no tasks: give --tasks FILE.jsonl, or define make_task(rng) on {settings.agent}")
    try:
        return agent, as_task_source(make_task, seed=settings.loop.seed + 1).next_batch(config.n_tasks or 32)
    except Exception as error:
        raise ConfigError(f"make_task of {settings.agent} failed with {format_exception(error)}") from error


@asynccontextmanager
async def sampling_with(
    ready: Prepared, model: Path | ChatApi, *, directory: RunDir, console: Console, max_concurrent: int | None = None
) -> AsyncIterator[Sampling]:
    """Start an engine that serves ``model``, or use its address; yields the runners and limits of samples."""
    from agl_slime.runner.base import RunnerPlan
    from agl_slime.runner.concurrent import RunnerSettings
    from agl_slime.support.agl import LLM
    from agl_slime.tools.evaluation.samples import Sampling

    settings, agent, sampling = ready.settings, ready.agent, ready.sampling
    max_concurrent = max_concurrent or settings.max_concurrent
    limits: dict[str, Any] = {"timeout_s": settings.loop.rollout_timeout_s, "max_in_flight": max_concurrent}
    limits |= {"seed": settings.loop.seed, "reward_key": settings.local.reward_key}
    if isinstance(model, ChatApi):
        # no gateway, which would request token ids
        runners = RunnerSettings(max_concurrent=max_concurrent, gateway=None)
        parameters = {"max_tokens" if name == "max_new_tokens" else name: value for name, value in sampling.items()}
        key = model.api_key or "none"  # OpenAI's client requires a key
        llm = LLM(endpoint=model.base_url, model=model.model, api_key=key, sampling_parameters=parameters)
        agent.chat_api = model  # other agents than SGLangLitAgent call ``llm`` themselves
        try:
            yield Sampling(agent=agent, llm=llm, tokenizer=None, runners=RunnerPlan(settings=runners), **limits)
        finally:
            agent.chat_api = None
        return
    from agl_slime.cli.local import running_engine
    from agl_slime.cli.wiring import RunInputs, model_for_agents
    from agl_slime.environments.environment import Environment
    from agl_slime.tokens.loading import load_tokenizer

    environment = agent if isinstance(agent, Environment) else None
    agent = None if isinstance(agent, Environment) else agent
    async with AsyncExitStack() as stack:
        url, alive = await stack.enter_async_context(running_engine(settings, model, directory, console))
        inputs = RunInputs(agent=agent, tasks=[{}])
        llm = stack.enter_context(model_for_agents(settings, inputs, url=url, model_path=model, sampling=sampling))
        runners = RunnerSettings(max_concurrent=max_concurrent, gateway=settings.gateway)
        yield Sampling(
            agent=agent,
            llm=llm,
            tokenizer=await run_in_thread(load_tokenizer, model),
            runners=RunnerPlan(settings=runners) if environment is None else environment.plan(settings=runners),
            check_alive=alive,
            **limits,
        )


@contextmanager
def _progress(console: Console, which: str) -> Iterator[Callable[[int, int], None]]:
    """Shows progress and remaining time: continuously on a terminal, elsewhere as ten lines."""
    status = console.status(which) if console.is_terminal else None
    began, first, printed = time.monotonic(), -1, -1

    def report(done: int, total: int) -> None:
        nonlocal first, printed
        first = done if first < 0 else first
        fresh = done - first
        remaining = (time.monotonic() - began) / fresh * (total - done) if fresh else None
        text = f"{which}: {done} of {total} samples" + (f", {format_seconds(remaining)} left" if remaining else "")
        if status is not None:
            status.update(text)
        elif (tenth := 10 * done // total) > printed:
            printed = tenth
            print_line(text, to=console.file)

    with status or nullcontext():
        yield report


def _result(
    config: EvalConfig, identity: dict[str, Any], samples: Sequence[Sequence[dict[str, Any]]], tasks: Sequence[Task]
) -> dict[str, Any]:
    from collections import Counter

    from agl_slime.tools.evaluation.samples import rewards_of
    from agl_slime.tools.evaluation.statistics import compare, sum_up

    first: dict[bytes, int] = {}
    numbers = [first.setdefault(dump(task), number) for number, task in enumerate(tasks)]
    rewards = [rewards_of(lines, numbers) for lines in samples]
    models = []
    for model, lines, by_task in zip(identity["models"], samples, rewards, strict=True):
        failures = Counter(line["failure"] for line in lines if line["reward"] is None)
        about = {"model": model, "samples": len(lines), "failed": failures.total(), "failures": dict(failures)}
        models.append({**about, **sum_up(by_task, limit=config.passes, k=config.k)})
    result: dict[str, Any] = {"tasks": len(first), "draws": len(tasks), "k": config.k, "passes": config.passes}
    result |= {"settings": identity, "models": models}
    if len(models) == 2:
        result["difference"] = compare(*rewards, limit=config.passes)
    return result
