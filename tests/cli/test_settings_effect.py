"""Each setting of a run changes something: a request, a batch, an object that the run works with, or it is refused.

The table has a row for each field of the settings tree, with a value and the place where it shows. The places are built
as a run builds them; what each object does with the value, the tests of its room show.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from agl_slime.agent.access import sampling_of
from agl_slime.cli import local, slime
from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.parts import RunParts, environment_of, make_loop, make_reports, model_for_agents
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.cli.start import find_start, load_parts, run_directory
from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.gateway.agl1.settings import WorkerCommand
from agl_slime.report.files import RunDir
from agl_slime.support.agl import LLM
from tests.harness.datasource import Listener
from tests.harness.loop import HelloAgent
from tests.harness.stores import enqueue_group, finish
from tests.harness.tokenizers import small_tokenizer
from tests.harness.trainer_policy import make_model, make_samples, save_policy
from tests.harness.training import needs_torch

URL = "http://127.0.0.1:1"
POLICY = Path("policy")
TRAINED: dict[str, Any] = {}
PLUGIN = """
from agl_slime.agent.scheduler import MultiTurnScheduler, schedulers

class Thrice(MultiTurnScheduler):
    pass

if "thrice" not in schedulers:
    schedulers.register("thrice")(Thrice)
"""


class BegunError(Exception):
    """What a run begins with."""


def request(config: TrainConfig) -> Any:
    """What an agent's model is asked with."""
    parts = RunParts(tasks=[{}], agent=HelloAgent())
    with model_for_agents(config, parts, url=URL, model_path=POLICY) as llm:
        params = sampling_of(llm)
        template = {name: llm.sampling_parameters.get(name) for name in ("chat_template_kwargs", "later_systems")}
        return params.to_payload(), params.context_length, template


def parts(config: TrainConfig) -> Any:
    """The agent and its tasks."""
    loaded = asyncio.run(load_parts(config))
    agent = loaded.agent
    figures = [getattr(agent, name, None) for name in ("max_turns", "scheduler", "image_settings")]
    return type(agent).__name__, [type(one) for one in figures], figures[0], loaded.tasks, loaded.val_tasks


def loop(config: TrainConfig) -> Any:
    """The loop and its runners."""
    source = local.GroupSource(store=local.BridgeStore())
    try:
        made = make_loop(
            config,
            RunParts(tasks=[{}], val_tasks=[{}], agent=HelloAgent()),
            llm=LLM(endpoint=URL, model="m"),
            data_source=source,
            slime_train_fn=lambda iteration: None,
        )
        return made.settings, made._plan
    finally:
        source.stop()


def groups(config: TrainConfig) -> Any:
    """The reward and the groups of the data source."""

    async def collect() -> Any:
        async with AsyncExitStack() as stack:
            Path("ledger").mkdir(exist_ok=True)
            run = RunDir(Path(tempfile.mkdtemp(dir="ledger")))
            source = local._open_source(stack, config, RunParts(tasks=[]), run, small_tokenizer(), {}, None)
            listener = Listener(source)
            source.expect("g", size=2)
            rollouts = await enqueue_group(source._store, "g", size=2)
            source.opened(rollouts)
            for rollout in rollouts:
                await finish(source._store, rollout.rollout_id, reward={"score": 0.5, "format": 1.0})
            await listener.until(lambda: bool(listener.groups))
            [group] = listener.groups
            return source.settings.policy, group.ready, group.rewards

    return asyncio.run(collect())


def environment(config: TrainConfig) -> Any:
    """How an environment is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agl_slime.cli.parts.load_environment", lambda settings, **how: (settings, how))
        return environment_of(config)


def engine(config: TrainConfig) -> Any:
    """The engine that a run starts, or its address."""

    class Engine:
        name = "an engine"

        def __init__(self, *given: Any, **more: Any) -> None:
            self.given = given, more

        def start(self) -> None:
            raise BegunError(type(self).__name__, self.given)

        def stop(self) -> None:
            pass

    async def started() -> Any:
        async with local.running_engine(config, POLICY, RunDir(Path("run")), Console(quiet=True)) as engine:
            return engine

    with pytest.MonkeyPatch.context() as patch:
        for name in ("EmbeddedEngine", "SGLangProcess"):
            patch.setattr(local, name, type(name, (Engine,), {}))
        try:
            return asyncio.run(started())
        except BegunError as begun:
            return begun.args


def validations(config: TrainConfig) -> Any:
    """What validations are asked with, and where, if not as training."""

    async def entered() -> Any:
        async with AsyncExitStack() as stack:
            weights: Any = SimpleNamespace(push_again=print)
            enter = partial(model_for_agents, config, RunParts(tasks=[]), url=URL, model_path=POLICY)
            llm = local._validation_llm(stack, config, weights, enter).get("val_llm")
            return llm and (llm.endpoint, llm.sampling_parameters)

    return asyncio.run(entered())


def autopsy(config: TrainConfig) -> Any:
    """The turns that are scored again."""

    async def made() -> Any:
        async with AsyncExitStack() as stack:
            trainer, weights = SimpleNamespace(score=None, computes_in=""), SimpleNamespace(directory=None, dtype="")
            others: Any = (trainer, None, weights, SimpleNamespace(warn=None))
            made = await local._run_autopsy(stack, config, RunDir(Path("run")), URL, *others)
            return made and made.turns

    return asyncio.run(made())


def reports(config: TrainConfig) -> Any:
    """The reporters of a run."""
    Path("run").mkdir(exist_ok=True)
    with make_reports(config, RunDir(Path("run")), Console(file=io.StringIO())) as made:
        kinds = {type(reporter).__name__: reporter for reporter in made._reporters}
        return [*kinds], made.rollouts._keep, kinds["ProgressReporter"]._live is None


def files(config: TrainConfig) -> Any:
    """The directory of a run and its model."""
    with run_directory(config) as pending:
        start = asyncio.run(find_start(config, RunParts(tasks=[]), pending.run, None, Console(quiet=True)))
        return pending.run.path, start.model


def slimes(config: TrainConfig) -> Any:
    """The flags of slime."""
    return slime.loop_flags(config)


@functools.cache
def samples() -> list[Any]:
    """Rollouts of the tiny policy, whose engine is somewhat off, with the log-probs of a teacher."""
    made = make_samples(make_model(), groups=2, per_group=3, response_lengths=(2, 9))
    for number, sample in enumerate(made):
        sample.rollout_log_probs = [value * (1.1 + number / 50) for value in sample.rollout_log_probs or ()]
        sample.teacher_log_probs = [value * 1.2 for value in sample.rollout_log_probs]
        sample.reward = number / 4 + (number == 1)
    return made


def training(config: TrainConfig) -> Any:
    """A batch trained on: metrics and weights, and how they were computed."""
    if (key := repr(config)) not in TRAINED:
        TRAINED[key] = trained(config)
    return TRAINED[key]


def trained(config: TrainConfig) -> Any:
    trainer = local._make_trainer(config, POLICY)
    steps: list[float] = []
    trainer.on_progress = steps.append
    metrics = trainer.train(samples(), iteration=0)
    del metrics["train/seconds"]
    weights = [float(parameter.detach().double().abs().sum()) for parameter in trainer.model.parameters()]
    recomputed = any(isinstance(module.forward, partial) for module in trainer.model.modules())
    return metrics, weights, len(steps), trainer.computes_in, recomputed


def start(config: TrainConfig) -> Any:
    """How the weights of a run are pushed, and which are kept."""
    pauses: list[str] = []

    async def engine(*_: Any) -> Any:
        return URL, None, SimpleNamespace(model=SimpleNamespace(parameters=list), lr=1.0)

    async def push(config: TrainConfig, weights: Any, *_: Any) -> None:
        pauses.append(weights.sync.pause)

    async def nothing(*_: Any) -> dict[str, Any]:
        return {}

    def models(*_: Any, weights: Any, **__: Any) -> None:
        raise BegunError(*pauses, weights is None)

    with pytest.MonkeyPatch.context() as patch:
        for name, fake in {"_start_engine": engine, "_push_start": push, "RunModels": models}.items():
            patch.setattr(local, name, fake)
        for name in ("_probe_servers", "_replayed_experts", "check_replay"):
            patch.setattr(local, name, nothing)
        try:
            asyncio.run(local.run_training(config, console=Console(quiet=True)))
        except BegunError as begun:
            return begun.args


ENV = {"env": "x"}
JOBS = {"runners": "controller", "tasks": Path("tasks.jsonl"), "agent": "m:C"}
OLD = {"local.old_log_probs": "recompute"}
LORA = {"local.lora_rank": 2}
LONG = {"local.aggregation": "constant", "local.max_response": 12}
TEACHER = {"teacher_url": (URL,)}
ASYNC = {"max_staleness": 1}
SLIME = {"trainer": "slime"}
BEGINS = {"sglang_url": URL, "model_path": LOOKUP_POLICY}
# path: the place where it shows, the value, and what else is set; with a text, the sentence that refuses the value
ROWS: dict[str, tuple[Any, ...]] = {
    "agent": (parts, "tests.harness.loop:HelloAgent", {"tasks": Path("tasks.jsonl")}),
    "tasks": (parts, Path("tasks.jsonl")),
    "model_path": (files, Path("other"), {"model_path": POLICY}),
    "sglang_url": (engine, "http://127.0.0.1:2"),
    "trainer": ("--trainer slime: leave it out", "slime", {"local.lr": 0.1}),
    "output_dir": (files, Path("b"), {"model_path": POLICY}),
    "resume": (files, True, {"output_dir": Path("new"), "model_path": POLICY}),
    "overwrite": (files, True, {"output_dir": Path("begun"), "model_path": POLICY}),
    "view": (reports, "live"),
    "track": (reports, ("wandb",)),
    "keep_rollouts": (reports, "all"),
    "autopsy": (autopsy, 2),
    "eval_tasks": (parts, Path("tasks.jsonl")),
    "eval_sampling": (validations, '{"temperature": 0}'),
    "keep_best": (start, True, BEGINS),
    "chat_template_kwargs": (request, '{"a": 1}'),
    "later_systems": (request, "user"),
    "max_concurrent": (loop, 2),
    "runners": (loop, "process:2"),
    "store_host": (loop, "10.0.0.1", {"runners": "process:2"}),
    "multi_turn_scheduler": (parts, "thrice", {"external_plugins": (Path("plugin.py"),)}),
    "external_plugins": (parts, (Path("none.py"),)),
    "drop_zero_variance": (groups, True),
    "weight_pause": (start, "in_place", BEGINS | ASYNC),
    "eval_sglang_url": (validations, "http://127.0.0.1:2", ASYNC),
    "teacher_url": (training, (URL,)),
    "teacher_coef": (training, 0.5, TEACHER),
    "teacher_alone": (training, True, TEACHER),
    "engine": (engine, "sglang"),
    "actor_num_nodes": (slimes, 2, SLIME),
    "actor_num_gpus_per_node": (slimes, 2, SLIME),
    "rollout_num_gpus": (slimes, 2, SLIME),
    "loop.num_iterations": (loop, 3),
    "loop.rollout_batch_size": (loop, 3),
    "loop.n_samples_per_prompt": (loop, 3),
    "loop.rollout_timeout_s": (loop, 3.0),
    "loop.max_attempts": (loop, 3),
    "loop.eval_interval": (loop, 3),
    "loop.eval_rollouts": (loop, 3),
    "loop.max_empty_iterations": (loop, 1),
    "loop.failure_patience_s": (loop, 1.0),
    "loop.max_replaced_groups": (loop, 1),
    "loop.save_interval": (loop, 3),
    "loop.max_staleness": (loop, 3),
    "loop.seed": (training, 3),
    "sampling.temperature": (request, 0.5),
    "sampling.top_p": (request, 0.5),
    "sampling.top_k": (request, 5),
    "sampling.max_new_tokens": (request, 5),
    "sampling.stop": (request, ("x",)),
    "sampling.stop_token_ids": (request, (3,)),
    "sampling.skip_special_tokens": (request, True),
    "sampling.routed_experts": ("sampling.routed_experts: a run sets it from --model-path", (1, 2)),
    "sampling.nucleus": ("sampling.nucleus: a run sets it from --top-p", True),
    "sampling.replay_files": ("sampling.replay_files: a run sets it from --output-dir", "x"),
    "sampling.context_length": (request, 64),
    "sampling.extra": (request, {"repetition_penalty": 1.5}),
    "group.min_ratio": (groups, 1.0),
    "group.min_members": (groups, 1),
    "group.max_retries": (groups, 1),
    "group.timeout_s": (groups, 1.0),
    "group.drop_early": (groups, False),
    "gateway.host": (loop, "0.0.0.0"),
    "gateway.port": (loop, 7),
    "gateway.public_url": (loop, URL, {"gateway.port": 7}),
    "gateway.branches": (loop, "all"),
    "gateway.constraints": (loop, "mask"),
    "gateway.untrained_models": (loop, ("judge",)),
    "gateway.trained_models": (loop, ("judge",)),
    "gateway.max_turns": (parts, 3),
    "gateway.max_trajectory_tokens": (loop, 3),
    "gateway.max_in_flight": (loop, 3),
    "gateway.max_body_mb": (loop, 3.0),
    "gateway.max_messages": (loop, 3),
    "gateway.images.max_image_mb": (parts, 3.0),
    "gateway.images.max_megapixels": (parts, 3.0),
    "gateway.images.max_images": (parts, 3),
    "gateway.images.image_hosts": (parts, ("a.example",)),
    "environment.name": (environment, "y", ENV),
    "environment.python": (environment, Path("p"), ENV),
    "environment.arguments": (environment, ("--env.a", "1"), ENV),
    "environment.most_tasks": (environment, 3, ENV),
    "environment.models": (environment, ("judge=http://x",), ENV),
    "environment.eval_split": ("environment.eval_split: a run sets it from --eval-tasks", "x", ENV),
    "environment.trained": ("environment.trained: a run sets it from --trained-models", ("a",), ENV),
    "environment.untrained": ("environment.untrained: a run sets it from --untrained-models", ("a",), ENV),
    "environment.workers": ("environment.workers: a run sets it from --runners", 2, ENV),
    "environment.max_concurrent": ("environment.max_concurrent: a run sets it from --max-concurrent", 2, ENV),
    "environment.keep_traces": ("environment.keep_traces: a run sets it from --keep-rollouts", True, ENV),
    "controller.agent": ("controller.agent: a run sets it from --agent", "m:C"),
    "controller.env_map": (loop, ("A=input.a",), JOBS),
    "controller.job_template": (loop, Path("job.yaml"), JOBS),
    "controller.worker": ("controller.worker: a run sets it from --env", WorkerCommand(name="w", argv=("w",))),
    "controller.python": (loop, Path("p"), JOBS),
    "controller.host": (loop, "localhost", JOBS),
    "controller.port": (loop, 7, JOBS),
    "controller.key": (loop, "k", JOBS),
    "controller.max_processes": (loop, 3, JOBS),
    "controller.max_restarts": (loop, 1, JOBS),
    "controller.log": ("controller.log: a run sets it from --output-dir", Path("x")),
    "local.lr": (training, 1e-3),
    "local.warmup_steps": (training, 8),
    "local.betas": (training, (0.5, 0.6)),
    "local.weight_decay": (training, 0.5),
    "local.grad_clip": (training, 0.001),
    "local.clip": (training, 0.001),
    "local.clip_high": (training, 0.001),
    "local.n_minibatches": (training, 2),
    "local.epochs": (training, 2),
    "local.kl_coef": (training, 0.5),
    "local.loss": (training, "cispo"),
    "local.aggregation": (training, "rollout"),
    "local.max_response": (training, 24, LONG),
    "local.overlong_buffer": (training, 10, LONG),
    "local.old_log_probs": (training, "recompute"),
    "local.off_policy": (training, "tis", OLD),
    "local.tis_clip": (training, 1.01, OLD | {"local.off_policy": "tis"}),
    "local.icepop_range": (training, (0.99, 1.01), OLD | {"local.off_policy": "icepop"}),
    "local.rewards_normalization": (training, False),
    "local.std_normalization": (training, False),
    "local.reward_key": (groups, "format"),
    "local.lora_rank": (training, 2),
    "local.lora_alpha": (training, 2.0, LORA),
    "local.lora_targets": (training, ("q_proj",), LORA),
    "local.max_tokens_per_microbatch": (training, 16),
    "local.gradient_checkpointing": (training, True),
    "local.compute_dtype": (training, "bfloat16"),
    "local.device": (training, "cuda:99"),
}


def leaves(settings: Any, prefix: str = "") -> Iterator[str]:
    for each in fields(settings):
        value = getattr(settings, each.name)
        yield from leaves(value, f"{prefix}{each.name}.") if is_dataclass(value) else [f"{prefix}{each.name}"]


def test_each_setting_has_a_row() -> None:
    assert {*leaves(train_config())} == {*ROWS}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the runs."""
    path = tmp_path_factory.mktemp("settings")
    (path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": n}) + "\n" for n in "abc"))
    (path / "plugin.py").write_text(PLUGIN)
    (path / "job.yaml").touch()
    (path / "begun").mkdir()
    (path / "begun" / "config.json").write_text("{}")
    for seed, name in enumerate(("policy", "other")):
        save_policy(path / name, seed=seed)
    return path


@needs_torch
@pytest.mark.parametrize("path", ROWS)
def test_a_setting_changes_a_run_or_is_refused(path: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("AGL_SLIME_SGLANG_PYTHON", "python")
    place, value, *more = ROWS[path]
    settings = {**(more[0] if more else {})}
    if isinstance(place, str):
        with pytest.raises(ConfigError, match=place):
            train_config(**{**settings, path: value})
        return
    try:
        without = place(train_config(**settings))
    except ConfigError as error:  # "overwrite" alone: the setting makes a run possible
        without = str(error)
    try:
        assert place(train_config(**{**settings, path: value})) != without
    except AglSlimeError:
        assert not isinstance(without, str)  # the run begins without the setting, and is refused with it
