"""The hooks on plain samples, the age of groups, and seeds of their members; slime itself is not needed."""

import json
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.cli.settings import train_config
from agl_slime.data.enqueueing import TaskGroup
from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError, DataSourceError, RewardError
from agl_slime.runner.base import RunnerPlan
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.connection import Connection
from agl_slime.train.slime.staleness import StalenessController
from agl_slime.types import RolloutFnTrainOutput, Sample, sample_from_fields
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.slime_source import AGENT, args_for, check, names
from tests.harness.waiting import becomes_true


def sample(
    reward: Any = 1.0, *, group: int | None = 0, rollout: int | None = None, index: int = 0, **fields: Any
) -> Sample:
    fields = {"tokens": [1, 2, 3], "response_length": 1, "status": Sample.Status.COMPLETED, **fields}
    return sample_from_fields(reward=reward, group_index=group, rollout_id=rollout, index=index, **fields)


class ListedSource:
    """Returns the listed answers, one per call, and takes groups back."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.back: list[list[Sample]] = []

    def get_samples(self, n: int) -> list[list[Sample]]:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.back.extend(groups)


def groups(n: int, *, reward: Any = None) -> list[list[list[Sample]]]:
    return [
        [[sample(float(i) if reward is None else reward, group=number, index=number * 2 + i) for i in range(2)]]
        for number in range(n)
    ]


# -- generate_rollout ------------------------------------------------------------------------------------------------


def test_batch_has_exactly_slimes_group_count_and_the_rest_waits():
    """In the order in which the tasks were drawn, whichever group was first to end."""
    source = ListedSource(*groups(5))
    output = slime_hooks.generate_rollout(Namespace(rollout_batch_size=3), 0, source)
    assert isinstance(output, RolloutFnTrainOutput)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2]
    assert len(source.answers) == 2
    drawn = ([[sample(group=end, metadata={"group_id": f"5f-{draw}"})]] for end, draw in enumerate((10, 9, 11)))
    output = slime_hooks.generate_rollout(Namespace(rollout_batch_size=3), 1, ListedSource(*drawn))
    assert [group[0].group_index for group in output.samples] == [1, 0, 2]


def test_groups_are_returned_when_the_rest_fails():
    source = ListedSource(*groups(2), DataSourceError("nothing came"))
    with pytest.raises(DataSourceError, match="nothing came"):
        slime_hooks.generate_rollout(Namespace(rollout_batch_size=3), 0, source)
    assert [group[0].group_index for group in source.back] == [0, 1]


@pytest.mark.parametrize("flag", ["use_tis", "use_rollout_logprobs"])
def test_a_group_without_log_probs_is_refused_where_slime_corrects_by_them(flag: str):
    plain = [sample(metadata={"agl_rollout_id": "ro-1"})]
    source = ListedSource([[sample(rollout_log_probs=[-0.5])]], [plain])
    with pytest.raises(DataSourceError, match=f"rollout ro-1 has no log-probs.*--{flag.replace('_', '-')} needs"):
        slime_hooks.generate_rollout(Namespace(rollout_batch_size=2, **{flag: True}), 0, source)
    assert len(source.back) == 1
    assert slime_hooks.generate_rollout(Namespace(rollout_batch_size=1), 0, ListedSource([plain])).samples == [plain]


def test_placeholders_and_a_data_source_that_does_not_wait_are_refused():
    placeholder = [[sample(None, status=Sample.Status.PENDING)]]
    for answer, text in ((placeholder, "agl_store_url"), ([], "no group")):
        with pytest.raises(DataSourceError, match=text):
            slime_hooks.generate_rollout(Namespace(rollout_batch_size=1), 0, ListedSource(answer))


# -- rewards: the cases of slime's issues ----------------------------------------------------------------------------

ARGS = Namespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=True, reward_key=None)
MEAN_ONLY = Namespace(**{**vars(ARGS), "grpo_std_normalization": False})


def normalized(args: Namespace, batch: Any) -> list[float]:
    return slime_hooks.normalize_rewards(args, batch)[1]


def test_a_rollout_of_three_samples_counts_once_while_one_of_them_does():
    siblings = [sample(1.0, rollout=7), sample(1.0, rollout=7), sample(1.0, rollout=7, remove_sample=True)]
    assert normalized(MEAN_ONLY, [*siblings, sample(0.0, rollout=8)]) == [0.5, 0.5, 0.0, -0.5]
    with pytest.raises(RewardError, match=r"rollout 1 .* 1\.0 and 0\.0"):
        normalized(ARGS, [sample(1.0, rollout=1), sample(0.0, rollout=1)])


def test_estimators_that_are_not_group_relative_keep_the_raw_rewards():
    ppo = Namespace(**{**vars(ARGS), "advantage_estimator": "ppo"})
    assert slime_hooks.normalize_rewards(ppo, [sample(3.0), sample(1.0)]) == ([3.0, 1.0], [3.0, 1.0])


def test_a_named_reward_is_picked_and_a_missing_one_is_an_error():
    named = Namespace(**{**vars(MEAN_ONLY), "reward_key": "exact"})
    batch = [sample({"exact": 1.0, "style": 9.0}, rollout=0), sample({"exact": 0.0, "style": 0.0}, rollout=1)]
    assert slime_hooks.normalize_rewards(named, batch) == ([1.0, 0.0], [0.5, -0.5])
    with pytest.raises(RewardError, match="sample 0 is None"):
        slime_hooks.normalize_rewards(ARGS, [sample(None)])


def test_unfit_samples_are_taken_out_of_loss_and_baseline():
    batch = [[sample(1.0), sample(0.0), sample(None), sample(-9.0, status=Sample.Status.ABORTED)]]
    slime_hooks.mask_unfit(None, batch)
    assert [entry.remove_sample for entry in batch[0]] == [False, False, True, True]
    assert slime_hooks.normalize_rewards(MEAN_ONLY, batch) == ([1.0, 0.0, 0.0, -9.0], [0.5, -0.5, 0.0, 0.0])
    assert normalized(MEAN_ONLY, batch[0][2:]) == [0.0, 0.0]


# -- filters and logs ------------------------------------------------------------------------------------------------


def _passes(samples: list[Any]) -> bool:
    output = slime_hooks.keep_nonzero_variance(Namespace(reward_key=None), samples)
    return bool(getattr(output, "keep", output))


def test_groups_without_variance_are_dropped_nested_ones_too():
    assert _passes([sample(1.0), sample(0.0)])
    assert _passes([[sample(1.0), sample(1.0)], [sample(0.0)]])
    assert not _passes([sample(1.0), sample(1.0)])
    assert not _passes([[sample(1.0), sample(1.0)], [sample(1.0)]])
    assert not _passes([sample(1.0), sample(1.0), sample(0.0, status=Sample.Status.FAILED)])


@pytest.mark.parametrize("rewards", [[1.0, 0.99999994], [1.0, 1 - 9.9e-7], [0.0, 9.9e-7, 0.0]])
def test_a_group_that_the_filter_drops_has_no_advantage(rewards: list[float]):
    batch = [sample(reward) for reward in rewards]
    assert not _passes(batch)
    for args in (ARGS, MEAN_ONLY):
        assert normalized(args, batch) == [0.0] * len(rewards)
    apart = [sample(reward * 10) for reward in rewards]
    assert _passes(apart) == any(normalized(MEAN_ONLY, apart))


def test_the_oldest_groups_leave_the_buffer_first():
    buffer = [[sample(group=number)] for number in (5, 2, 9, 3)]
    taken = slime_hooks.take_oldest(None, None, buffer, 2)
    assert [group[0].group_index for group in taken] == [2, 3]
    assert [group[0].group_index for group in buffer] == [5, 9]


def test_log_hook_adds_to_slimes_metrics_without_replacing_its_log():
    siblings = [sample(metadata={"agl_rollout_id": "a", "turns": turns}) for turns in (2, 1)]
    metrics: dict[str, Any] = {"loss": 1}
    args = Namespace()
    assert slime_hooks.log_rollout(3, args, siblings, metrics, 0.5) is False
    assert args.logged_rollout_id == 3
    assert metrics["loss"] == 1
    assert (metrics["agl/rollouts"], metrics["agl/forks"], metrics["agl/turns_mean"]) == (1, 1, 1.5)


def test_staleness_is_that_of_the_sampled_tokens():
    old = sample(metadata={"policy_version": 5, "weight_spans": [["3", 0, 1], ["5", 1, 4]]})
    fresh = sample(metadata={"policy_version": 5, "weight_spans": [["5", 0, 4]]})
    unversioned = sample(metadata={"policy_version": None, "weight_spans": [["default", 0, 4]]})
    metrics: dict[str, Any] = {}
    slime_hooks.log_rollout(0, Namespace(), [old, fresh, unversioned], metrics, 1.0)
    assert (metrics["agl/staleness_mean"], metrics["agl/staleness_max"]) == (2 / 8, 2)
    metrics.clear()
    slime_hooks.log_rollout(0, Namespace(), [unversioned], metrics, 1.0)
    assert not [name for name in metrics if "staleness" in name]


# -- settings --------------------------------------------------------------------------------------------------------


def test_args_come_before_the_environment_and_slimes_flags_fill_the_rest():
    args = Namespace(agl_store_url="http://127.0.0.1:1", sglang_router_ip="127.0.0.1", sglang_router_port=3000)
    args.hf_checkpoint, args.rollout_temperature, args.rollout_max_response_len = "/model", 0.8, 64
    settings = PluginSettings.from_args(args, {"AGL_SLIME_STORE_URL": "http://other:1", "AGL_SLIME_GET_TIMEOUT_S": "5"})
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:3000")
    assert (settings.store_url, settings.llm_url, settings.get_timeout_s) == (*urls, 5.0)
    assert settings.sampling == settings.eval_sampling == {"temperature": 0.8, "max_new_tokens": 64}
    assert settings.blocking
    function = "examples.fully_async.fully_async_rollout.generate_rollout_fully_async"
    assert not PluginSettings.from_args(Namespace(rollout_function_path=function), {}).blocking


@pytest.mark.parametrize(
    ("flags", "path"),
    [
        ({"rollout_global_dataset": True}, "a.jsonl"),
        ({}, "a.jsonl"),  # older slimes have no switch
        ({"rollout_global_dataset": False}, None),
        ({"agl_tasks": "b.jsonl"}, None),
    ],
)
def test_slimes_prompt_data_is_used_unless_switched_off_or_replaced(flags: dict[str, Any], path: str | None):
    data = PluginSettings.from_args(Namespace(prompt_data="a.jsonl", **flags), {}).prompt_data
    assert (data and data.path) == path


@pytest.mark.parametrize("variables", [{"A": "input.a", "B": "input.b"}, "A=input.a B=input.b"])
def test_the_plan_of_a_controller_is_the_loops(variables: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("AGL_KEY", "the-key")
    monkeypatch.delenv("AGL_CONTROLLER_PYTHON", raising=False)
    args = Namespace(agl_runners="controller", agl_agent="a:B", agl_env_map=variables, agl_controller_port=4711)
    settings = PluginSettings.from_args(args, {})
    loops: dict[str, Any] = {"runners": "controller", "agent": "a:B", "tasks": tmp_path / "tasks.jsonl"}
    config = train_config(**loops, env_map=("A=input.a", "B=input.b"), controller_port=4711)
    assert settings.connected
    assert settings.loop.max_attempts == 1
    plan = settings.plan()
    controller = config.controller.complete(agent="a:B")
    expected = {"kind": "controller", "store_setting": "agl_store_host", "controller": controller}
    assert plan == RunnerPlan(settings=plan.settings, **expected)
    assert plan.settings.gateway.port == 4711


def test_a_job_template_alone_is_a_plan(tmp_path: Path):
    args = Namespace(agl_runners="controller", agl_job_template=str(tmp_path / "job.yaml"))
    settings = PluginSettings.from_args(args, {})
    controller = settings.plan().controller
    assert settings.connected
    assert controller is not None
    assert (controller.job_template, controller.agent, controller.python) == (tmp_path / "job.yaml", None, None)


CONTROLLER = {"RUNNERS": "controller", "AGENT": "a:B"}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"STORE_URL": "http://x:1", "AGENT": "a:B"}, "agl_store_url .* agl_agent"),
        ({"STORE_URL": "x:1"}, "agl_store_url is 'x:1'"),
        ({"STORE_URL": "me:SECRET@h"}, r"agl_store_url is \*\*\*@h'"),
        ({"AGENT": "a:B", "RUNNERS": "threads"}, "agl_runners 'threads': expected inproc"),
        ({"STORE_URL": "http://x:1", "RUNNERS": "ray:2"}, "agl_runners ray:2: .* leave one out"),
        ({"STORE_URL": "http://x:1", "MAX_CONCURRENT": "8"}, "agl_max_concurrent 8: .* leave one out"),
        ({**CONTROLLER, "MAX_CONCURRENT": "8"}, "agl_max_concurrent 8: a controller runs the agents; leave it out"),
        ({"AGENT": "a:B", "MAX_CONCURRENT": "0"}, "agl_max_concurrent is '0'"),
        ({"AGENT": "a:B", "ENV_MAP": "A=input.a"}, "agl_env_map is for a controller only; set agl_runners: controller"),
        ({"RUNNERS": "controller"}, "an agent .* or Jobs"),
        ({**CONTROLLER, "CONTROLLER_HOST": "0.0.0.0"}, "AGL_KEY"),
        ({**CONTROLLER, "MAX_ATTEMPTS": "2"}, "agl_max_attempts 2: a controller runs one attempt"),
        ({**CONTROLLER, "CONTROLLER_PORT": "70000"}, "^agl_controller_port must be from 0.* to 65535, got 70000$"),
        ({"ENV_MAP": "A"}, "^env_map A=: expected NAME=input.path"),
        ({"GET_TIMEOUT_S": "soon"}, "agl_get_timeout_s is 'soon'"),
        ({"GROUP_TIMEOUT_S": "0"}, "^agl_group_timeout_s must be above 0 seconds or None, got 0.0$"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(variables: dict[str, str], text: str):
    environment = {f"AGL_SLIME_{name}": value for name, value in variables.items()}
    with pytest.raises(ConfigError, match=text):
        PluginSettings.from_args(Namespace(), environment)


GROUPS = [TaskGroup(name, {"prompt": name}) for name in ("a", "b")]


@asynccontextmanager
async def connected(**args: Any) -> AsyncIterator[Connection]:
    args = {"agl_agent": AGENT, "rollout_temperature": 0.7, **args}
    connection = Connection(PluginSettings.from_args(Namespace(**args), {}))  # its runner is not started
    yield connection
    connection.stop()


async def enqueued(connection: Connection, **options: Any) -> list[tuple[str, dict[str, Any]]]:
    """Group and sampling parameters of two groups of three rollouts."""
    rows = []
    for rollout in await connection.enqueue(GROUPS, size=3, mode="train", **options):
        update = await connection.store.get_resources_by_id(rollout.resources_id or "")
        assert update is not None
        llm = update.resources["main_llm"]
        assert isinstance(llm, LLM)
        assert rollout.metadata["group_size"] == 3
        rows.append((rollout.metadata["group_id"], llm.sampling_parameters))
    return rows


async def test_members_of_a_group_have_their_own_seeds_and_one_resources_id() -> None:
    async with connected(rollout_seed=40) as connection:
        rollouts = await connection.enqueue(GROUPS, size=3, mode="train", oldest_version=4)
        seeds = [(rollout.metadata["seed"], rollout.metadata["oldest_version"]) for rollout in rollouts]
        assert seeds == [(f"40/train/{group}/{member}", 4) for group in "ab" for member in range(3)]
        assert len({rollout.resources_id for rollout in rollouts}) == 1
        assert all("sampling_seed" not in sampling for _, sampling in await enqueued(connection))
        sampling = {"sampling_seed": 7}  # slime's own generate function sets it
        assert await enqueued(connection, sampling=sampling) == [(group, sampling) for group in "aaabbb"]


async def test_routed_experts_are_requested_without_a_probe_if_no_url_is_set() -> None:
    replayed = {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 2}
    async with connected(**replayed) as connection:
        assert connection.settings.llm_url is None
        assert {tuple(sampling["routed_experts"]) for _, sampling in await enqueued(connection)} == {(2, 2)}


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with in_thread(ScriptedEngine(weight_version="1")) as engine:
        yield engine


def paced(engine: ScriptedEngine, max_staleness: int, **settings: Any) -> Namespace:
    settings = {"rollout_batch_size": 2, "agl_get_timeout_s": 10, **settings}
    return args_for(agl_agent=AGENT, agl_llm_url=engine.url, agl_max_staleness=max_staleness, **settings)


def opened(source: AGLDataSource) -> int:
    """The number of groups that were enqueued."""
    return source.groups.ledger.counts().opened // 2


def wait_for_opened(source: AGLDataSource, n: int) -> None:
    assert becomes_true(lambda: opened(source) == n, 10)


def wait_for_ready(source: AGLDataSource, n: int) -> None:
    assert becomes_true(lambda: len(source.groups.delivery.ready) == n, 10)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_groups_are_enqueued_so_far_ahead_of_training_and_none_is_dropped(engine: ScriptedEngine, max_staleness: int):
    args = paced(engine, max_staleness)
    trained: list[str] = []
    with AGLDataSource(args) as source:
        for rollout_id in range(4):
            engine.weight_version = str(rollout_id + 1)  # slime's first version is 1
            output = slime_hooks.generate_rollout(args, rollout_id, source)
            check(output.samples)
            trained += names(output.samples)
            wait_for_opened(source, (rollout_id + max_staleness + 1) * 2)
        assert source.groups.ledger.counts().closed == {Outcome.TRAINED: 16}
        wait_for_ready(source, max_staleness * 2)
        assert opened(source) == (3 + max_staleness + 1) * 2
        assert len(set(trained)) == 16
        rollouts = run_blocking(source._producer._connection.store.query_rollouts())  # type: ignore[union-attr]
        assert {rollout.metadata["oldest_version"] for rollout in rollouts} == {1, 2, 3, 4}


def test_staleness_limit_below_the_drivers_is_an_error_with_the_minimum(engine: ScriptedEngine) -> None:
    args = paced(engine, 0)
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        # as train_async does: the next rollout is requested before the weights of the last step are there
        with pytest.raises(DataSourceError, match="rollout 1 while weights after 0 steps are in use; set 1 or more"):
            slime_hooks.generate_rollout(args, 1, source)


def test_an_engine_that_names_no_version_is_taken_to_be_one_rollout_behind(engine: ScriptedEngine) -> None:
    engine.weight_version = "default"
    args = paced(engine, 1)
    with AGLDataSource(args) as source:
        for rollout_id in range(3):
            slime_hooks.generate_rollout(args, rollout_id, source)
            assert opened(source) <= (rollout_id + 2) * 2


def test_fully_async_rollouts_are_paced_by_the_engine_s_version(engine: ScriptedEngine) -> None:
    args = paced(engine, 1, rollout_function_path="slime.fully_async_rollout.generate_rollout_fully_async")
    taken: list[str] = []

    def take(source: AGLDataSource) -> int:
        taken.extend(names(source.get_samples(1)))
        return len(taken)

    with AGLDataSource(args) as source:
        assert becomes_true(lambda: take(source) >= 8, 10)
        assert source.get_samples(1) == []
        assert opened(source) == 4  # of two steps' groups, and no more until the weights change
        engine.weight_version = "2"
        assert becomes_true(lambda: take(source) >= 12, 10)
        wait_for_opened(source, 6)
    assert len(set(taken)) == 12


def test_ages_outlive_a_restart(engine: ScriptedEngine, tmp_path: Path) -> None:
    args = paced(engine, 2, save=str(tmp_path), load=str(tmp_path))
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        wait_for_ready(source, 4)
        source.save(0)
        saved = {*names([*source.groups.delivery.ready])}
    state = json.loads((tmp_path / "rollout" / "agl_datasource_0.json").read_text())
    assert [version for _, version in state["pacing"]] == [0, 0, 0, 0]
    engine.weight_version = "2"
    with AGLDataSource(args) as resumed:
        resumed.load(0)
        first = slime_hooks.generate_rollout(args, 1, resumed)
        assert set(names(first.samples)) < saved
        wait_for_opened(resumed, 2 + 4 + 2)  # trained, saved, new
        assert [version for _, version in resumed._producer._staleness.state()] == [0, 0, 1, 1]  # type: ignore[union-attr]


def test_restored_groups_are_as_old_as_they_were() -> None:
    pacing = StalenessController(cast(Any, Namespace(in_flight=["b", "a"])), batch_size=2, max_staleness=2)
    pacing.restore([("a", 1), ("b", 2)])
    pacing.begin_rollout(3, cast(Any, Namespace(ready=[], reserve=print)))
    assert pacing.state() == [("a", 1), ("b", 2)]


def test_a_lower_limit_is_refused_while_groups_of_a_higher_one_wait(engine: ScriptedEngine, tmp_path: Path) -> None:
    """They would be trained on four versions behind, under a limit of one."""
    args = paced(engine, 4, save=str(tmp_path), load=str(tmp_path))
    with AGLDataSource(args) as source:
        slime_hooks.generate_rollout(args, 0, source)
        wait_for_ready(source, 8)
        source.save(0)
    engine.weight_version = "2"
    with AGLDataSource(paced(engine, 1, load=str(tmp_path))) as resumed:
        resumed.load(0)
        with pytest.raises(DataSourceError, match="agl_max_staleness 1: the saved state holds 8 groups"):
            slime_hooks.generate_rollout(args, 1, resumed)
    with AGLDataSource(args) as resumed:
        resumed.load(0)
        assert len(slime_hooks.generate_rollout(args, 1, resumed).samples) == 2


def test_it_needs_to_know_the_size_of_a_batch(engine: ScriptedEngine) -> None:
    with pytest.raises(ConfigError, match="agl_max_staleness 1 needs slime's --rollout-batch-size"):
        AGLDataSource(paced(engine, 1, rollout_batch_size=None))
