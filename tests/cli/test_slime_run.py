"""``--trainer slime`` without slime: the loop's settings as slime's flags, and a stand-in that counts its calls."""

import argparse
import json
import os
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agl_slime.cli import slime
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.cli.slime import SlimeSteps, check_slime_args, loop_flags
from agl_slime.errors import ConfigError, EngineProtocolError
from agl_slime.loop.tasks import shuffled_tasks
from agl_slime.metric_names import TOKENS_TRAINED
from agl_slime.report.read import RunReader
from agl_slime.support.agl import NamedResources, Rollout
from agl_slime.tools.pages.file import write_report
from tests.harness.loop_thread import in_thread
from tests.harness.report_runs import floats
from tests.harness.scripted_engine import ScriptedEngine
from tests.programs.agents.contract_agent import ByteTokenizer, ContractAgent

BATCH, SIZE = 3, 2


class NumbersAgent(ContractAgent):
    """Records its tasks and their sampling parameters; writes its process into the file that a task names."""

    prompts: list[str] = []
    sampling: list[dict[str, Any]] = []
    lock = threading.Lock()

    async def rollout_async(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> None:
        if "process" in task:
            Path(task["process"]).write_text(str(os.getpid()))
        with self.lock:
            self.prompts.append(task["prompt"])
            self.sampling.append(dict(resources["main_llm"].sampling_parameters))  # type: ignore[union-attr]
        await super().rollout_async(task, resources, rollout)


class StandIn:
    """A ``SlimeTrainer`` that counts. A checkpoint is a file with the number of its step."""

    trained: list[int] = []
    args: Any = None

    def __init__(self, *, args: Any) -> None:
        StandIn.args = self.args = args
        self.updates = 0
        self.saved: int | None = None

    @property
    def first_rollout_id(self) -> int:
        return self.args.start_rollout_id

    def start(self) -> None:
        loaded = self.args.load is not None
        self.args.start_rollout_id = int((Path(self.args.load) / "latest").read_text()) + 1 if loaded else 0
        self.updates = 1

    def train(self, rollout_id: int) -> int:
        StandIn.trained.append(rollout_id)
        if self.args.save is not None:
            Path(self.args.save).mkdir(exist_ok=True)
            (Path(self.args.save) / "latest").write_text(str(rollout_id))
            self.saved = rollout_id
        return 1

    def saves(self, rollout_id: int) -> bool:
        return self.args.save is not None

    def update_weights(self) -> str:
        self.updates += 1
        return str(self.updates)

    def stop(self) -> None: ...


_FLAGS: dict[Any, str] = {
    int: "num-rollout rollout-batch-size n-samples-per-prompt rollout-max-response-len rollout-top-k "
    "rollout-max-context-len",
    float: "rollout-temperature eval-temperature",
    str: "prompt-data input-key load save",
    None: "colocate rollout-shuffle",
}


def parse(flags: Sequence[str]) -> Any:
    """slime's flags, as far as these tests use them."""
    parser = argparse.ArgumentParser()
    for kind, names in _FLAGS.items():
        for name in names.split():
            parser.add_argument(f"--{name}", **({"type": kind} if kind else {"action": "store_true"}))
    return parser.parse_known_args(list(flags))[0]


@contextmanager
def played(trainer: type[StandIn]) -> Iterator[str]:
    """The URL of an engine, while ``trainer`` takes the place of slime's."""
    with pytest.MonkeyPatch.context() as patch, in_thread(ScriptedEngine()) as engine:
        patch.setattr(slime, "require_slime", lambda: None)
        patch.setattr(slime, "parse_slime_args", parse)
        patch.setattr(slime, "SlimeTrainer", trainer)
        patch.setattr(slime, "load_tokenizer", lambda path: ByteTokenizer())
        for records in (StandIn.trained, NumbersAgent.prompts, NumbersAgent.sampling):
            records.clear()
        yield engine.url


@pytest.fixture
def engine() -> Iterator[str]:
    with played(StandIn) as url:
        yield url


def config_for(engine: str, directory: Path, n: int, tasks: list[dict[str, Any]], **settings: Any) -> TrainConfig:
    file = directory / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (directory / "config.json").write_text("{}")  # enough of a checkpoint until slime loads it
    defaults = {"agent": "tests.cli.test_slime_run:NumbersAgent", "trainer": "slime", "eval_interval": 0}
    sizes = {"num_iterations": n, "rollout_batch_size": BATCH, "n_samples_per_prompt": SIZE}
    paths = {"model_path": directory, "tasks": file, "output_dir": directory / f"run-{n}", "overwrite": True}
    return train_config(sglang_url=engine, **{**defaults, **sizes, **paths, **settings})


async def run(config: TrainConfig, *flags: str) -> Any:
    return await slime.run_slime_training(config, flags, console=Console(quiet=True))


def numbered(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"task {number}", "label": ""} for number in range(n)]


def iterations() -> list[set[str]]:
    """The tasks that were run, by iteration."""
    size = BATCH * SIZE
    return [set(NumbersAgent.prompts[i : i + size]) for i in range(0, len(NumbersAgent.prompts), size)]


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "of slime's own loop"])
async def test_loaded_slime_run_continues_with_the_next_task_and_ends_in_time(engine: str, tmp_path: Path, ours: bool):
    tasks, checkpoint = numbered(4 * BATCH), tmp_path / "checkpoint"
    await run(config_for(engine, tmp_path, 2, tasks), "--save", str(checkpoint))
    if not ours:
        (checkpoint / "rollout" / "agl_loop_1.json").unlink()
    result = await run(config_for(engine, tmp_path, 4, tasks), "--load", str(checkpoint))
    assert StandIn.trained == [0, 1, 2, 3]
    assert result.iterations == 4
    assert len(result.reward_means) == (4 if ours else 2)
    in_order = shuffled_tasks(tasks, seed=0)
    assert iterations() == [{task["prompt"] for task in in_order.next_batch(BATCH)} for _ in range(4)]
    with pytest.raises(ConfigError, match="--num-iterations above 2"):
        await run(config_for(engine, tmp_path, 2, tasks), "--load", str(checkpoint))


async def test_page_shows_the_rollouts_of_a_slime_run(engine: str, tmp_path: Path) -> None:
    await run(config_for(engine, tmp_path, 2, numbered(4 * BATCH), keep_rollouts="all"))
    reader = RunReader(tmp_path / "run-2")
    page = reader.update()
    assert page is not None
    assert (page["state"]["word"], page["damage"]) == ("finished", [])
    assert len(page["kept"]) == 2 * BATCH * SIZE
    for rollout_id in page["kept"]:
        line = json.loads(reader.rollout(rollout_id) or b"")
        (sample,) = line["samples"]
        assert line["outcome"] == "trained"
        assert np.isfinite(floats(sample["engine_log_probs"])).all()
        assert np.isnan(floats(sample["trainer_log_probs"])).all()  # slime does not report them
    assert page["kept"][0] in write_report([tmp_path / "run-2"]).read_text()


async def test_slimes_sampling_flags_reach_the_agents(engine: str, tmp_path: Path) -> None:
    config = config_for(engine, tmp_path, 1, numbered(3), temperature=0.8, max_new_tokens=7)
    await run(config, "--rollout-top-k", "9")
    assert NumbersAgent.sampling == [{"temperature": 0.8, "top_k": 9, "max_new_tokens": 7}] * BATCH * SIZE


HOOKS = ("--custom-reward-post-process-path", "--custom-advantage-function-path")


@pytest.mark.parametrize(
    ("by_group", "estimator", "hooks"),
    [(True, True, []), (False, True, ["--custom-reward-post-process-path"]), (True, False, [*HOOKS])],
)
async def test_rewards_are_left_to_a_slime_that_normalizes_by_group(
    by_group: bool, estimator: bool, hooks: list[str], engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rewards of turns, which the advantage hook takes where the estimator is the default."""
    monkeypatch.setattr(slime, "normalizes_by_group", lambda: by_group)
    slime_flags: list[str] = []
    monkeypatch.setattr(slime, "parse_slime_args", lambda flags: (slime_flags.extend(flags), parse(flags))[1])
    await run(config_for(engine, tmp_path, 1, numbered(3)), *(["--advantage-estimator", "grpo"] if estimator else []))
    assert [flag for flag in slime_flags if flag in HOOKS] == hooks


async def test_an_engine_that_sends_no_experts_is_refused_before_slime_starts(engine, tmp_path, monkeypatch):
    def replaying(flags: Sequence[str]) -> Any:
        args = parse(flags)
        args.use_rollout_routing_replay, args.num_layers, args.moe_router_topk = True, 2, 2
        return args

    started: list[Any] = []
    monkeypatch.setattr(slime, "parse_slime_args", replaying)
    monkeypatch.setattr(StandIn, "start", started.append)
    with pytest.raises(ConfigError, match="start SGLang with --enable-return-routed-experts"):
        await run(config_for(engine, tmp_path, 1, numbered(3)))
    assert not started
    assert not NumbersAgent.prompts


@pytest.mark.parametrize(
    ("flags", "settings", "sentence"),
    [
        ("--prompt-data x.jsonl", {}, r"--prompt-data x.jsonl after --: the run has other tasks"),
        ("--colocate", {"max_staleness": 1}, "--max-staleness 1 with --colocate"),
    ],
)
async def test_flags_of_slime_that_contradict_the_run_are_refused(flags, settings, sentence, engine, tmp_path):
    with pytest.raises(ConfigError, match=sentence):
        await run(config_for(engine, tmp_path, 1, numbered(3), **settings), *flags.split())


async def test_the_store_host_is_the_address_for_slimes_manager(engine, tmp_path, monkeypatch):
    monkeypatch.delenv("AGL_SLIME_STORE_TOKEN", raising=False)
    await run(config_for(engine, tmp_path, 1, numbered(3), store_host="0.0.0.0"))
    assert StandIn.args.agl_store_token  # an address that other hosts reach needs one
    await run(config_for(engine, tmp_path, 1, numbered(3)))
    assert StandIn.args.agl_store_url.startswith("http://127.0.0.1:")
    assert StandIn.args.agl_store_token is None


@pytest.mark.parametrize("workers", [None, ["http://127.0.0.1:9"], []], ids=["server", "router", "empty router"])
async def test_engines_at_the_url_are_slimes_and_an_empty_router_waits_for_them(workers: list[str] | None) -> None:
    with in_thread(ScriptedEngine(workers=workers)) as engine:
        config = train_config(trainer="slime", sglang_url=engine.url, rollout_num_gpus=2)
        engines, router, url = await slime._engines(config)
        assert engines == ((engine.url,) if workers is None else tuple(workers))
        assert (router is None, url) == (workers is None, engine.url)
        if not engines:
            with pytest.raises(EngineProtocolError, match="has no workers; start some"):
                await slime._engines(replace(config, rollout_num_gpus=0))


@pytest.mark.slow  # a process that imports Agent Lightning
async def test_runners_in_processes_run_the_agent(engine: str, tmp_path: Path) -> None:
    file = tmp_path / "process"
    task = {"prompt": "x", "label": "", "process": str(file)}
    await run(config_for(engine, tmp_path, 1, [task], runners="process:1"))
    assert int(file.read_text()) != os.getpid()
    assert NumbersAgent.prompts == []


@pytest.mark.parametrize("shuffle", [False, True])
async def test_slimes_prompt_data_are_the_tasks(shuffle: bool, engine: str, tmp_path: Path) -> None:
    config = replace(config_for(engine, tmp_path, 4, numbered(1)), tasks=None)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"q": f"task {number}", "label": ""}) + "\n" for number in range(4 * BATCH + 5)))
    flags = ["--prompt-data", f"{file}@[:{4 * BATCH}]", "--input-key", "q", "--rollout-max-context-len", "99"]
    await run(config, *flags, *(["--rollout-shuffle"] if shuffle else []))
    in_order = [{f"task {n}" for n in range(start, start + BATCH)} for start in range(0, 4 * BATCH, BATCH)]
    assert {*NumbersAgent.prompts} == set().union(*in_order)
    assert (iterations() == in_order) is not shuffle
    assert {sampling["context_length"] for sampling in NumbersAgent.sampling} == {99}
    assert StandIn.args.prompt_data is None  # the manager's data source enqueues none


def _config(**settings: Any) -> TrainConfig:
    return train_config(model_path=Path("/model"), trainer="slime", **settings)


def _value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def test_the_loops_settings_become_slimes_flags() -> None:
    config = _config(rollout_batch_size=4, n_samples_per_prompt=2, temperature=0.7)
    engines = ("http://10.0.0.1:30000", "http://10.0.0.2:30000")
    flags = loop_flags(config, engines=engines, router=("10.0.0.9", 3000))
    assert (_value(flags, "--global-batch-size"), _value(flags, "--rollout-temperature")) == ("8", "0.7")
    assert flags[flags.index("--rollout-external-engine-addrs") + 1 :][:2] == ["10.0.0.1:30000", "10.0.0.2:30000"]
    assert (_value(flags, "--sglang-router-ip"), _value(flags, "--sglang-router-port")) == ("10.0.0.9", "3000")
    assert "--rollout-num-gpus" not in flags
    assert "--override-opt_param-scheduler" in flags  # a resume has more steps than its checkpoint's schedule
    assert _value(flags, "--data-source-path") == "agl_slime.AGLDataSource"
    # under in-place pauses slime's default for evaluations is its own function
    assert _value(flags, "--eval-function-path") == "agl_slime.slime_hooks.generate_rollout"

    flags = loop_flags(_config(rollout_num_gpus=8), router=(None, 3100))  # slime launches the engines
    assert (_value(flags, "--rollout-num-gpus"), _value(flags, "--sglang-router-port")) == ("8", "3100")
    assert not {"--sglang-router-ip", "--rollout-external-engine-addrs"} & {*flags}


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ({"eval_temperature": 0.0}, "--eval-temperature"),
        ({"release_train": True}, "--release-train"),
        ({"num_rollout": 9}, "--num-rollout 9 .*--num-iterations 40"),
        ({"rollout_external_engine_addrs": ["w:1"]}, "--rollout-num-gpus 2: the engines at --sglang-url have 4 GPUs"),
    ],
)
def test_slime_flags_that_contradict_the_loop_are_refused(flag: dict[str, Any], sentence: str) -> None:
    args = Namespace(num_rollout=40, rollout_batch_size=16, n_samples_per_prompt=4, rollout_num_gpus=4)
    check_slime_args(args, _config(rollout_num_gpus=2))
    with pytest.raises(ConfigError, match=sentence):
        check_slime_args(Namespace(**{**vars(args), **flag}), _config(rollout_num_gpus=2))


class Trainer(SimpleNamespace):
    first_rollout_id = 5
    updates = 3
    saved = None

    def train(self, rollout_id: int) -> int:
        self.trained.append(rollout_id)
        return 100

    def saves(self, rollout_id: int) -> bool:
        return False

    def update_weights(self) -> str:
        self.updates += 1
        return str(self.updates)


class Source(SimpleNamespace):
    def get_samples(self, n: int) -> list[Any]:
        self.deliverable -= n
        return [[]] * n


def test_a_short_batch_waits_for_the_next_iteration_and_nothing_is_dropped() -> None:
    source, trainer = Source(deliverable=4), Trainer(trained=[])
    steps: Any = SlimeSteps(trainer=trainer, source=source, batch_size=4)  # type: ignore[arg-type]
    assert steps.train(1)[TOKENS_TRAINED] == 100
    assert steps.sync(1) == "4"
    source.deliverable = 3  # a group was dropped
    assert steps.train(2) == {"train/waiting_groups": 3.0}
    assert steps.sync(2) == "4"  # no weight update without a step
    source.deliverable += 4
    steps.train(3)
    assert steps.sync(3) == "5"
    assert trainer.trained == [5, 6]  # slime's numbers continue from its checkpoint, without a gap
    assert source.deliverable == 3
