"""Each setting of a run changes something: a request, a batch, an object that the run works with, or it is refused.

The tables have each field of the settings tree, with a value and the place where it shows. The places are built
as a run builds them; what each object does with the value, the tests of its room show.
"""

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
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.cli.start import find_start, load_inputs, run_directory
from agl_slime.cli.wiring import RunInputs, environment_of, make_loop, model_for_agents, reporting
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
TASKS = Path("tasks.jsonl")
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
    parts = RunInputs(tasks=[{}], agent=HelloAgent())
    with model_for_agents(config, parts, url=URL, model_path=POLICY) as llm:
        params = sampling_of(llm)
        template = {name: llm.sampling_parameters.get(name) for name in ("chat_template_kwargs", "later_systems")}
        return params.to_payload(), params.context_length, template


def parts(config: TrainConfig) -> Any:
    """The agent and its tasks."""
    loaded = asyncio.run(load_inputs(config))
    if config.eval_tasks is None and isinstance(loaded.tasks, list):
        assert not [task for task in loaded.tasks if task in (loaded.val_tasks or ())]  # held out
    agent = loaded.agent
    figures = [getattr(agent, name, None) for name in ("max_turns", "scheduler", "image_settings")]
    return type(agent).__name__, [type(one) for one in figures], figures[0], loaded.tasks, loaded.val_tasks


def loop(config: TrainConfig) -> Any:
    """The loop and its runners."""
    source = local.GroupSource(store=local.BridgeStore())
    try:
        made = make_loop(
            config,
            RunInputs(tasks=[{}], val_tasks=[{}], agent=HelloAgent()),
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
            source = local._open_source(stack, config, RunInputs(tasks=[]), run, small_tokenizer(), {}, None)
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
        patch.setattr("agl_slime.cli.wiring.load_environment", lambda settings, **how: (settings, how))
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
            enter = partial(model_for_agents, config, RunInputs(tasks=[]), url=URL, model_path=POLICY)
            llm = local._validation_llm(stack, config, weights, enter).get("val_llm")
            return llm and (llm.endpoint, llm.sampling_parameters)

    return asyncio.run(entered())


def autopsy(config: TrainConfig) -> Any:
    """The turns that are scored again."""

    async def made() -> Any:
        async with AsyncExitStack() as stack:
            trainer, weights = SimpleNamespace(score=None, computes_in=""), SimpleNamespace(directory=None, dtype="")
            tokenizer = SimpleNamespace(decode=str)
            others: Any = (trainer, tokenizer, weights, SimpleNamespace(warn=None))
            made = await local._step_observer(stack, config, RunDir(Path("run")), URL, *others)
            return made and made.turns

    return asyncio.run(made())


def reports(config: TrainConfig) -> Any:
    """The reporters of a run."""
    Path("run").mkdir(exist_ok=True)

    async def entered() -> Any:
        parts: Any = (config, RunDir(Path("run")), Console(file=io.StringIO()))
        async with reporting(*parts, tokenizer=None, warnings={}) as made:
            kinds = {type(reporter).__name__: reporter for reporter in made._reporters}
            return [*kinds], made.rollouts._keep, kinds["ProgressReporter"]._live is None

    return asyncio.run(entered())


def files(config: TrainConfig) -> Any:
    """The directory of a run and its model."""
    with run_directory(config) as pending:
        start = asyncio.run(find_start(config, RunInputs(tasks=[]), pending.run, None, Console(quiet=True)))
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
        return URL, None, SimpleNamespace(model=SimpleNamespace(num_parameters=lambda: 0), lr=1.0)

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
JOBS = {"runners": "controller", "tasks": TASKS, "agent": "m:C"}
OLD = {"local.old_log_probs": "recompute"}
LORA = {"local.lora_rank": 2}
LONG = {"local.aggregation": "constant", "local.max_response": 12}
TEACHER = {"teacher_url": (URL,)}
ASYNC = {"max_staleness": 1}
SLIME = {"trainer": "slime"}
BEGINS = {"sglang_url": URL, "model_path": LOOKUP_POLICY}
TIMES = ("num_iterations", "rollout_batch_size", "n_samples_per_prompt", "rollout_timeout_s", "max_attempts")
TIMES += ("eval_interval", "eval_rollouts", "save_interval", "max_staleness")
ENDS = ("max_empty_iterations", "failure_patience_s", "max_replaced_groups")
LIMITS = ("max_trajectory_tokens", "max_in_flight", "max_body_mb", "max_messages")
# the place where a setting shows, the beginning of its path, what else is set, and its value
SHOWN: list[tuple[Any, str, dict[str, Any], dict[str, Any]]] = [
    (parts, "", {"tasks": TASKS}, {"agent": "tests.harness.loop:HelloAgent"}),
    (parts, "", {}, {"tasks": TASKS, "eval_tasks": TASKS, "external_plugins": (Path("none.py"),)}),
    (parts, "", {"external_plugins": (Path("plugin.py"),)}, {"multi_turn_scheduler": "thrice"}),
    (files, "", {"model_path": POLICY}, {"model_path": Path("other"), "output_dir": Path("b")}),
    (files, "", {"model_path": POLICY, "output_dir": Path("new")}, {"resume": True}),
    (files, "", {"model_path": POLICY, "output_dir": Path("begun")}, {"overwrite": True}),
    (engine, "", {}, {"sglang_url": "http://127.0.0.1:2", "engine": "sglang"}),
    (engine, "loop.", {}, {"deterministic": True}),
    (reports, "", {}, {"view": "live", "track": ("wandb",), "keep_rollouts": "all"}),
    (autopsy, "", {}, {"autopsy": 2}),
    (validations, "", {}, {"eval_sampling": '{"temperature": 0}'}),
    (validations, "", ASYNC, {"eval_sglang_url": "http://127.0.0.1:2"}),
    (start, "", BEGINS, {"keep_best": True}),
    (start, "", BEGINS | ASYNC, {"weight_pause": "in_place"}),
    (slimes, "", SLIME, {"actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}),
    (request, "", {}, {"chat_template_kwargs": '{"a": 1}', "later_systems": "user"}),
    (request, "sampling.", {}, {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "max_new_tokens": 5}),
    (request, "sampling.", {}, {"stop": ("x",), "stop_token_ids": (3,), "skip_special_tokens": True}),
    (request, "sampling.", {}, {"context_length": 64, "extra": {"repetition_penalty": 1.5}}),
    (groups, "", {}, {"drop_zero_variance": True, "local.rewards": "format"}),
    (groups, "group.", {}, {"min_ratio": 1.0, "min_members": 1, "max_retries": 1}),
    (groups, "group.", {}, {"timeout_s": 1.0, "drop_early": False}),
    (loop, "", {}, {"max_concurrent": 2, "runners": "process:2"}),
    (loop, "", {"runners": "process:2"}, {"store_host": "10.0.0.1"}),
    (loop, "loop.", {}, dict.fromkeys(TIMES, 3) | dict.fromkeys(ENDS, 1)),
    (loop, "loop.", {}, {"task_sampling": "learnable", "group_pilot": 2}),
    (loop, "gateway.", {}, {"host": "0.0.0.0", "port": 7, "branches": "all", "constraints": "mask"}),
    (loop, "gateway.", {}, {"untrained_models": ("judge",), "trained_models": ("judge",), **dict.fromkeys(LIMITS, 3)}),
    (loop, "gateway.", {"gateway.port": 7}, {"public_url": URL}),
    (parts, "gateway.", {}, {"max_turns": 3, "images.image_hosts": ("a.example",)}),
    (parts, "gateway.images.", {}, {"max_image_mb": 3.0, "max_megapixels": 3.0, "max_images": 3}),
    (environment, "environment.", ENV, {"name": "y", "python": Path("p"), "arguments": ("--env.a", "1")}),
    (environment, "environment.", ENV, {"most_tasks": 3, "models": ("judge=http://x",)}),
    (loop, "controller.", JOBS, {"env_map": ("A=input.a",), "job_template": Path("job.yaml"), "python": Path("p")}),
    (loop, "controller.", JOBS, {"host": "localhost", "port": 7, "key": "k", "max_processes": 3, "max_restarts": 1}),
    (training, "", {}, {"teacher_url": (URL,), "loop.seed": 3}),
    (training, "", TEACHER, {"teacher_coef": 0.5, "teacher_alone": True}),
    (training, "local.", {}, {"lr": 1e-3, "warmup_steps": 8, "betas": (0.5, 0.6), "weight_decay": 0.5}),
    (training, "local.", {}, {"grad_clip": 0.001, "clip": 0.001, "clip_high": 0.001, "n_minibatches": 2, "epochs": 2}),
    (training, "local.", {}, {"kl_coef": 0.5, "loss": "cispo", "aggregation": "rollout", "device": "cuda:99"}),
    (training, "local.", {}, {"rewards_normalization": False, "std_normalization": False}),
    (training, "local.", {}, {"advantage": "functions.py:twice", "metric": "functions.py:count", "credit": "anchor"}),
    (training, "local.", {}, {"max_tokens_per_microbatch": 16, "gradient_checkpointing": True}),
    (training, "local.", {}, {"compute_dtype": "bfloat16", "old_log_probs": "recompute", "lora_rank": 2}),
    (training, "local.", LONG, {"max_response": 24, "overlong_buffer": 10}),
    (training, "local.", OLD, {"off_policy": "tis"}),
    (training, "local.", OLD | {"local.off_policy": "tis"}, {"tis_clip": 1.01}),
    (training, "local.", OLD | {"local.off_policy": "icepop"}, {"icepop_range": (0.99, 1.01)}),
    (training, "local.", LORA, {"lora_alpha": 2.0, "lora_targets": ("q_proj",)}),
]
ROWS = {
    begin + name: (place, others, value) for place, begin, others, values in SHOWN for name, value in values.items()
}
# a setting that a run sets itself: the flag that it is set from, and a value
SET_BY: dict[str, tuple[str, Any]] = {
    "sampling.routed_experts": ("--model-path", (1, 2)),
    "sampling.nucleus": ("--top-p", True),
    "sampling.replay_files": ("--output-dir", "x"),
    "environment.eval_split": ("--eval-tasks", "x"),
    "environment.trained": ("--trained-models", ("a",)),
    "environment.untrained": ("--untrained-models", ("a",)),
    "environment.workers": ("--runners", 2),
    "environment.max_concurrent": ("--max-concurrent", 2),
    "environment.keep_traces": ("--keep-rollouts", True),
    "controller.agent": ("--agent", "m:C"),
    "controller.worker": ("--env", WorkerCommand(name="w", argv=("w",))),
    "controller.log": ("--output-dir", Path("x")),
}


def leaves(settings: Any, prefix: str = "") -> Iterator[str]:
    for each in fields(settings):
        value = getattr(settings, each.name)
        yield from leaves(value, f"{prefix}{each.name}.") if is_dataclass(value) else [f"{prefix}{each.name}"]


def test_each_setting_has_a_row() -> None:
    assert sorted(leaves(train_config())) == sorted([*ROWS, *SET_BY, "trainer"])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the runs."""
    path = tmp_path_factory.mktemp("settings")
    (path / "tasks.jsonl").write_text("".join(json.dumps({"prompt": n}) + "\n" for n in "abc"))
    (path / "plugin.py").write_text(PLUGIN)
    (path / "functions.py").write_text(
        "twice = lambda r, g: 2 * r\ncount = lambda **a: {'count': len(a['rollouts'])}\n"
    )
    (path / "job.yaml").touch()
    (path / "begun").mkdir()
    (path / "begun" / "config.json").write_text("{}")
    for seed, name in enumerate(("policy", "other")):
        save_policy(path / name, seed=seed)
    return path


def test_a_setting_that_a_run_makes_itself_is_refused() -> None:
    for path, (flag, value) in SET_BY.items():
        with pytest.raises(ConfigError, match=f"^{path}: a run sets it from {flag}; give that"):
            train_config(**{"env": "x", path: value})
    with pytest.raises(ConfigError, match="--trainer slime: leave it out"):
        train_config(trainer="slime", **{"local.lr": 0.1})


@needs_torch
@pytest.mark.parametrize("path", ROWS)
def test_a_setting_changes_a_run_or_is_refused(path: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setenv("AGL_SLIME_SGLANG_PYTHON", "python")
    place, settings, value = ROWS[path]
    try:
        without = place(train_config(**settings))
    except ConfigError as error:  # "overwrite" alone: the setting makes a run possible
        without = str(error)
    try:
        assert place(train_config(**{**settings, path: value})) != without
    except AglSlimeError:
        assert not isinstance(without, str)  # the run begins without the setting, and is refused with it
