"""``--trainer slime`` with all of a run but slime: its trainer is a stand-in that keeps what it was asked for."""

from __future__ import annotations

import argparse
import base64
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from agl_slime.cli import slime
from agl_slime.cli.settings import TrainConfig, train_config
from agl_slime.errors import ConfigError
from agl_slime.loop.tasks import ShuffledTasks
from agl_slime.report.page import write_report
from agl_slime.report.read import RunReader
from agl_slime.support.agl import NamedResources, Rollout
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.programs.agents.contract_agent import ByteTokenizer, ContractAgent

BATCH, SIZE = 3, 2
WHO = ("engine", "trainer")
HERE = "tests.cli.test_slime_run"


class NumbersAgent(ContractAgent):
    """Keeps its tasks and how they were to be sampled; writes its process into the file that a task names."""

    seen: list[str] = []
    sampling: list[dict[str, Any]] = []
    lock = threading.Lock()

    async def rollout_async(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> None:
        if "process" in task:
            Path(task["process"]).write_text(str(os.getpid()))
        with self.lock:
            self.seen.append(task["prompt"])
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


def parse(flags: Sequence[str]) -> Any:
    """slime's flags, as far as these tests give any."""
    parser = argparse.ArgumentParser()
    for name in (
        "num-rollout",
        "rollout-batch-size",
        "n-samples-per-prompt",
        "rollout-max-response-len",
        "rollout-top-k",
    ):
        parser.add_argument(f"--{name}", type=int)
    for name in ("rollout-temperature", "eval-temperature"):
        parser.add_argument(f"--{name}", type=float)
    for name in ("colocate", "rollout-shuffle"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--rollout-max-context-len", type=int)
    for name in ("prompt-data", "input-key"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--load")
    parser.add_argument("--save")
    return parser.parse_known_args(list(flags))[0]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(slime, "require_slime", lambda: None)
    monkeypatch.setattr(slime, "parse_slime_args", parse)
    monkeypatch.setattr(slime, "SlimeTrainer", StandIn)
    monkeypatch.setattr(slime, "load_tokenizer", lambda path: ByteTokenizer())
    for kept in (StandIn.trained, NumbersAgent.seen, NumbersAgent.sampling):
        kept.clear()
    with in_thread(ScriptedEngine()) as engine:
        yield engine.url


def config_for(engine: str, directory: Path, n: int, tasks: list[dict[str, Any]], **settings: Any) -> TrainConfig:
    file = directory / "tasks.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (directory / "config.json").write_text("{}")  # a checkpoint, as far as it is looked at before slime loads it
    return train_config(
        agent=f"{HERE}:NumbersAgent",
        trainer="slime",
        sglang_url=engine,
        model_path=directory,
        tasks=file,
        num_iterations=n,
        rollout_batch_size=BATCH,
        n_samples_per_prompt=SIZE,
        eval_interval=0,
        output_dir=directory / f"run-{n}",
        overwrite=True,
        **settings,
    )


async def run(config: TrainConfig, *flags: str) -> Any:
    return await slime.run_slime_training(config, flags, console=Console(quiet=True))


def numbered(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"task {number}", "label": ""} for number in range(n)]


def iterations() -> list[set[str]]:
    """The tasks that were run, by iteration."""
    per = BATCH * SIZE
    return [set(NumbersAgent.seen[i : i + per]) for i in range(0, len(NumbersAgent.seen), per)]


@pytest.mark.parametrize("own_checkpoint", [True, False], ids=["ours", "of slime's own loop"])
async def test_loaded_slime_run_continues_with_the_next_task_and_ends_in_time(
    engine: str, tmp_path: Path, own_checkpoint: bool
):
    """Tasks began again at the first one, and slime ran past --num-rollout."""
    tasks = numbered(4 * BATCH)
    checkpoint = tmp_path / "checkpoint"
    await run(config_for(engine, tmp_path, 2, tasks), "--save", str(checkpoint))
    if not own_checkpoint:
        (checkpoint / "rollout" / "agl_loop_1.json").unlink()
    result = await run(config_for(engine, tmp_path, 4, tasks), "--load", str(checkpoint))
    assert StandIn.trained == [0, 1, 2, 3]
    assert result.iterations == 4
    assert len(result.reward_means) == (4 if own_checkpoint else 2)
    in_order = ShuffledTasks(tasks=tasks, seed=0)
    assert iterations() == [{task["prompt"] for task in in_order.next_batch(BATCH)} for _ in range(4)]


async def test_a_loaded_run_that_is_done_says_so(engine: str, tmp_path: Path):
    flags = ("--save", str(tmp_path / "checkpoint"))
    await run(config_for(engine, tmp_path, 1, numbered(3)), *flags)
    with pytest.raises(ConfigError, match="--num-iterations above 1"):
        await run(config_for(engine, tmp_path, 1, numbered(3)), "--load", str(tmp_path / "checkpoint"))


async def test_page_shows_the_rollouts_of_a_slime_run(engine: str, tmp_path: Path):
    config = config_for(engine, tmp_path, 2, numbered(4 * BATCH), keep_rollouts="all")
    await run(config)
    reader = RunReader(tmp_path / "run-2")
    told = reader.update()
    assert told is not None
    assert (told["state"]["word"], told["damage"]) == ("finished", [])
    assert len(told["kept"]) == 2 * BATCH * SIZE
    for rollout_id in told["kept"]:
        line = json.loads(reader.rollout(rollout_id) or b"")
        (sample,) = line["samples"]
        assert line["outcome"] == "trained"
        engine_s, trainer_s = (np.frombuffer(base64.b64decode(sample[f"{who}_log_probs"]), "<f4") for who in WHO)
        assert np.isfinite(engine_s).all()
        assert np.isnan(trainer_s).all()  # slime does not tell
    assert told["kept"][0] in write_report([tmp_path / "run-2"]).read_text()


async def test_slimes_sampling_flags_reach_the_agents(engine: str, tmp_path: Path):
    config = config_for(engine, tmp_path, 1, numbered(3), temperature=0.8, max_new_tokens=7)
    await run(config, "--rollout-top-k", "9")
    assert NumbersAgent.sampling == [{"temperature": 0.8, "top_k": 9, "max_new_tokens": 7}] * BATCH * SIZE


@pytest.mark.parametrize("by_group", [True, False])
async def test_rewards_are_left_to_a_slime_that_finds_groups_itself(
    by_group: bool, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(slime, "normalizes_by_group", lambda: by_group)
    given: list[str] = []
    monkeypatch.setattr(slime, "parse_slime_args", lambda flags: (given.extend(flags), parse(flags))[1])
    await run(config_for(engine, tmp_path, 1, numbered(3)))
    assert ("--custom-reward-post-process-path" in given) is not by_group


async def test_an_engine_that_sends_no_experts_is_refused_before_slime_starts(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    assert not NumbersAgent.seen


async def test_slimes_evaluation_flags_are_refused(engine: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="--eval-temperature"):
        await run(config_for(engine, tmp_path, 1, numbered(3)), "--eval-temperature", "0")


async def test_the_store_host_is_where_slimes_manager_reaches_the_store(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("AGL_SLIME_STORE_TOKEN", raising=False)
    await run(config_for(engine, tmp_path, 1, numbered(3), store_host="0.0.0.0"))
    assert StandIn.args.agl_store_token  # an address that others reach needs one
    await run(config_for(engine, tmp_path, 1, numbered(3)))
    assert StandIn.args.agl_store_url.startswith("http://127.0.0.1:")
    assert StandIn.args.agl_store_token is None


@pytest.mark.slow  # a process that imports Agent Lightning
async def test_runners_in_processes_run_the_agent(engine: str, tmp_path: Path):
    file = tmp_path / "process"
    await run(
        config_for(engine, tmp_path, 1, [{"prompt": "x", "label": "", "process": str(file)}], runners="process:1")
    )
    assert int(file.read_text()) != os.getpid()
    assert NumbersAgent.seen == []


@pytest.mark.parametrize("shuffle", [False, True])
async def test_slimes_prompt_data_are_the_tasks(shuffle: bool, engine: str, tmp_path: Path):
    config = replace(config_for(engine, tmp_path, 4, numbered(1)), tasks=None)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"q": f"task {number}", "label": ""}) + "\n" for number in range(4 * BATCH + 5)))
    flags = ["--prompt-data", f"{file}@[:{4 * BATCH}]", "--input-key", "q", "--rollout-max-context-len", "99"]
    await run(config, *flags, *(["--rollout-shuffle"] if shuffle else []))
    in_order = [{f"task {number}" for number in range(at, at + BATCH)} for at in range(0, 4 * BATCH, BATCH)]
    assert {*NumbersAgent.seen} == set().union(*in_order)
    assert (iterations() == in_order) is not shuffle
    assert {sampling["context_length"] for sampling in NumbersAgent.sampling} == {99}
    assert StandIn.args.prompt_data is None  # the manager's data source enqueues none


async def test_prompt_data_beside_tasks_are_refused(engine: str, tmp_path: Path):
    config = config_for(engine, tmp_path, 1, numbered(3))
    with pytest.raises(ConfigError, match=r"--prompt-data x.jsonl after --: the run has other tasks"):
        await run(config, "--prompt-data", "x.jsonl")
