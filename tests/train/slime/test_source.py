"""``AGLDataSource(args)`` as slime builds it: an agent in its process, or a store over HTTP that may restart."""

import asyncio
import itertools
import json
import random
import sys
import threading
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.data import completions
from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError, DataSourceError, RewardError
from agl_slime.store.bridge import BridgeStore
from agl_slime.train.slime.generate import _completed, stop_rollouts
from agl_slime.types import RolloutFnEvalOutput, Sample
from tests.harness.datasource import QUICK, get
from tests.harness.slime_source import (
    AGENT,
    HELD_AGENT,
    HeldAgent,
    args_for,
    check,
    counts_of,
    enqueue,
    finished_rollouts,
    names,
    sampling_by_mode,
    service_with_runner,
    wait_until,
    write_tasks,
)
from tests.harness.waiting import becomes_true, until
from tests.programs.agents.contract_agent import ContractAgent


class FlakyAgent(ContractAgent):
    """Fails on tasks that ask for it."""

    share = 0.3

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {**super().make_task(rng), "fail": rng.random() < self.share}

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        if task.get("fail"):
            raise ValueError("this task has no answer")
        return super().compute_reward(task, response)


class KindsAgent(ContractAgent):
    """Tasks of eight kinds, of which one has differing rewards."""

    flips = itertools.cycle([0.0, 1.0])

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        kind = f"of {rng.randrange(8)}"
        return {**super().make_task(rng), "label": kind, "kind": kind}

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return next(self.flips) if task["kind"] == "of 3" else 0.25


class HopelessAgent(FlakyAgent):
    share = 1.0


def test_connected_to_nothing_it_gives_placeholders_like_slimes_own_source(caplog: pytest.LogCaptureFixture):
    source = AGLDataSource(args_for())
    groups = source.get_samples(2)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]
    assert all(sample.status == Sample.Status.PENDING for group in groups for sample in group)
    assert "agl_store_url" in caplog.text
    source.stop()


def test_an_agent_in_the_manager_s_own_process_needs_nothing_else():
    with AGLDataSource(args_for(agl_agent=AGENT, agl_eval_rollouts=3)) as source:
        groups = source.get_samples(3)
        check(groups)
        held_out: Any = slime_hooks.generate_rollout(None, 0, source, evaluation=True)
        trained = {str(sample.prompt) for group in groups for sample in group}
        assert not trained & {str(sample.prompt) for sample in held_out.data["agl"]["samples"]}
        assert [group[0].group_index for group in groups] == [0, 1, 2]
        output = slime_hooks.generate_rollout(Namespace(rollout_batch_size=2), 0, source)
        check(output.samples)
        assert (output.metrics or {})["agl/trained_total"] == 10
        output.samples[0][0].reward = None  # no 0.0, where slime leaves rewards to a function for groups
        with pytest.raises(RewardError, match="sample 0 is None"):
            asyncio.run(slime_hooks.rewards_of_agents(Namespace(), output.samples[0]))


def test_tasks_are_enqueued_as_they_are_asked_for_and_no_further(tmp_path: Path):
    tasks = write_tasks(tmp_path / "t.jsonl", 50)
    with service_with_runner() as (store, service):
        with AGLDataSource(args_for(agl_store_url=service.url, agl_tasks=tasks)) as source:
            assert len(source) == 50  # slime computes an epoch from it
            check(source.get_samples(3))
            check(source.get_samples(2))
        assert len(asyncio.run(store.query_rollouts())) == 10


def test_a_group_with_a_failed_rollout_is_replaced():
    with AGLDataSource(args_for(agl_agent=f"{__name__}:FlakyAgent")) as source:
        groups = source.get_samples(12)
        check(groups)
        assert len(groups) == 12
        assert counts_of(source).closed[Outcome.FAILED] > 0
    with (
        AGLDataSource(args_for(agl_agent=f"{__name__}:HopelessAgent")) as source,
        pytest.raises(DataSourceError, match="this task has no answer"),
    ):
        source.get_samples(1)


def test_tasks_that_teach_are_drawn_more_often_and_a_restart_keeps_this():
    args = args_for(agl_agent=f"{__name__}:KindsAgent", agl_task_sampling="learnable", rollout_batch_size=4)
    with AGLDataSource(args) as first:
        labels = [group[0].label for _ in range(40) for group in first.get_samples(4)]
        state = json.loads(json.dumps(first.state_dict()))
    assert labels[80:].count("of 3") > 20  # under uniform sampling some ten of these eighty
    with AGLDataSource(args) as second:
        second.load_state_dict(state)
        assert second.state_dict()["demand"]["sampling"] == state["demand"]["sampling"]


def test_fully_async_source_returns_at_once_and_keeps_a_batch_in_flight():
    HeldAgent.release.clear()
    args = args_for(agl_agent=HELD_AGENT, rollout_function_path="x.fully_async_rollout.generate", rollout_batch_size=3)
    with AGLDataSource(args) as source:
        assert source.get_samples(1) == []
        HeldAgent.release.set()
        taken: list[list[Sample]] = []

        def complete() -> bool:
            taken.extend(source.get_samples(1))
            return len(taken) >= 3

        assert becomes_true(complete, 20)
        check(taken)
        assert len(taken) == 3


def test_evaluations_are_validation_rollouts_sampled_by_slimes_eval_flags(tmp_path: Path):
    tasks = write_tasks(tmp_path / "t.jsonl", 4)
    args = args_for(agl_tasks=tasks, agl_eval_tasks=tasks, agl_eval_rollouts=4)
    args.rollout_temperature, args.rollout_top_p, args.rollout_max_response_len = 0.9, 1.0, 64
    args.eval_temperature, args.eval_top_p, args.eval_max_response_len = 0.0, None, 512
    with service_with_runner() as (store, service):
        args.agl_store_url = service.url
        with AGLDataSource(args) as source:
            for _ in range(2):
                source.get_samples(1)
                output = slime_hooks.generate_rollout(None, 0, source, evaluation=True)
                assert isinstance(output, RolloutFnEvalOutput)
                entry = output.data["agl"]
                assert (entry["rewards"], entry["truncated"]) == ([0.25] * 4, [False] * 4)
                assert len(entry["samples"]) == 4
            assert counts_of(source).closed == {Outcome.VALIDATED: 8, Outcome.TRAINED: 4}
        assert asyncio.run(sampling_by_mode(store)) == {
            "train": [{"temperature": 0.9, "top_p": 1.0, "max_new_tokens": 64}],
            "val": [{"temperature": 0.0, "top_p": 1.0, "max_new_tokens": 512}],
        }


def test_without_data_sets_evaluations_are_of_make_task_or_of_our_tasks(tmp_path: Path):
    args = args_for(agl_agent=AGENT, eval_interval=2, agl_eval_rollouts=6, n_samples_per_eval_prompt=3)
    for tasks in (None, write_tasks(tmp_path / "t.jsonl", 4)):
        args.agl_eval_tasks = tasks
        with AGLDataSource(args) as source:
            first, again = ([sample.prompt for sample in source.evaluate(step)["agl"]["samples"]] for step in (0, 2))
        assert first == again
        assert first[:3] == [first[0]] * 3 != first[3:] == [first[3]] * 3
        assert first[0][0]["content"].startswith("task" if tasks else "say")


class OnceFailingAgent(ContractAgent):
    left: list[str] = []

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        if self.left:
            raise ValueError(self.left.pop())
        return super().compute_reward(task, response)


@pytest.mark.parametrize("log_passrate", [False, True])
def test_slimes_pass_rate_gets_all_rollouts_of_a_task_or_none(log_passrate: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OnceFailingAgent, "left", ["this one fails"])
    args = args_for(agl_agent=f"{__name__}:OnceFailingAgent", agl_eval_rollouts=6, n_samples_per_eval_prompt=3)
    args.log_passrate = log_passrate
    with AGLDataSource(args) as source:
        assert source.evaluate(0)["agl"]["rewards"] == [0.25] * (3 if log_passrate else 5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"eval_datasets": [Namespace(name="a", path="a")]}, "agl_eval_rollouts 6 has no effect, as slime's data sets"),
        ({"eval_interval": None}, "agl_eval_rollouts 6 has no effect, as slime evaluates nothing: set eval_interval"),
        ({"eval_interval": None, "agl_eval_tasks": "a"}, "agl_eval_tasks a has no effect, as slime evaluates nothing"),
        ({"eval_function_path": "slime.x"}, "agl_eval_rollouts 6 has no effect: give --eval-function-path agl_slime"),
        ({"n_samples_per_eval_prompt": 4}, "agl_eval_rollouts 6 is no multiple of --n-samples-per-eval-prompt 4"),
        (
            {"agl_agent": None, "agl_store_url": "http://127.0.0.1:1", "agl_eval_rollouts": None, "eval_interval": 5},
            "--eval-interval 5: there are no evaluation tasks: set agl_eval_tasks",
        ),
    ],
)
def test_evaluations_that_cannot_be_are_refused_at_the_start(settings: dict[str, Any], text: str):
    with pytest.raises((ConfigError, DataSourceError), match=text):
        AGLDataSource(args_for(**{"agl_agent": AGENT, "eval_interval": 2, "agl_eval_rollouts": 6, **settings}))


def test_a_store_that_restarts_gets_the_tasks_in_flight_again(tmp_path: Path):
    HeldAgent.release.clear()
    tasks = write_tasks(tmp_path / "t.jsonl", 20)
    with service_with_runner(HeldAgent()) as (store, service):
        port = int(service.url.rpartition(":")[2])
        source = AGLDataSource(args_for(agl_store_url=service.url, agl_tasks=tasks))
        # one end tells the source the store's instance id
        [cancelled] = enqueue(service.url, "cancelled", 1, size=1)
        source.demand(2)
        wait_until(source, 4)
        asyncio.run(store.update_rollout(cancelled, status="cancelled"))  # type: ignore[arg-type]
        wait_until(source, 5)
        lost = [rollout.input for rollout in asyncio.run(store.query_rollouts()) if rollout.rollout_id != cancelled]
    HeldAgent.release.set()
    with service_with_runner(port=port) as (store, _), source:
        check(source.get_samples(2))
        repeated = [rollout.input for rollout in asyncio.run(store.query_rollouts())]
        assert sorted(task["prompt"] for task in repeated) == sorted(task["prompt"] for task in lost)
        assert counts_of(source).reasons[Outcome.CANCELLED, "store_restarted"] == 4


# -- one rollout for one prompt --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stopped_rollouts")
async def test_generate_runs_one_rollout_for_one_prompt_of_slime():
    args = args_for(agl_agent=AGENT)
    prompts = [
        Sample(group_index=3, index=i, prompt=f"say {i}", label="x", metadata={"source_name": "chat"}) for i in range(5)
    ]
    results = await asyncio.gather(*(slime_hooks.generate(args, sample, {"temperature": 0.5}) for sample in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert isinstance(result, Sample)
        assert (result.index, result.group_index, result.prompt, result.label) == (prompt.index, 3, prompt.prompt, "x")
        assert result.metadata["source_name"] == "chat"
        assert [*vars(result.spec_info).values()] == [6, 8, 2, 10]
        check([[result]], size=1)


@pytest.mark.usefixtures("stopped_rollouts")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("teacher_url", "http://t:1"), ("tasks", "t.jsonl"), ("max_staleness", 1), ("drop_zero_variance", True)),
        *(("group_max_retries", 2), ("group_timeout_s", 60), ("task_sampling", "learnable")),
    ],
)
async def test_data_source_settings_are_refused_where_slime_groups_prompts(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("t.jsonl").write_text('{"prompt": "x"}\n')
    args = args_for(agl_agent=AGENT, **{f"agl_{name}": value})
    with pytest.raises(
        ConfigError, match=f"^agl_{name} has no effect with agl_slime.slime_hooks.generate: .* leave it"
    ):
        await slime_hooks.generate(args, Sample(index=0, prompt="x"), {})
    assert isinstance(await slime_hooks.generate(args, Sample(index=0, prompt="x"), {}, evaluation=True), Sample)


def test_generate_takes_every_field_of_the_rollout_but_slimes_own():
    values: dict[str, Any] = {field.name: {field.name: 1} for field in fields(Sample)}
    taken = vars(_completed(Sample(metadata={"slime": 2}), Sample(**values)))
    assert taken["metadata"] == {"slime": 2, "metadata": 1}
    assert {name for name, value in values.items() if taken[name] != value} == {
        *("index", "group_index", "rollout_id", "session_id", "prompt", "label", "metadata", "train_metadata"),
        *("apply_chat_template_kwargs", "multimodal_train_input_id", "generate_function_path", "custom_rm_path"),
        *("remove_sample", "teacher_log_probs"),
    }


@pytest.mark.usefixtures("stopped_rollouts")
async def test_a_failed_rollout_of_generate_is_a_failed_sample_with_its_reason():
    args = args_for(agl_agent=f"{__name__}:FlakyAgent")
    prompts = [Sample(index=i, group_index=0, prompt="x", metadata={"fail": i == 0}) for i in range(3)]
    failed, *siblings = await asyncio.gather(*(slime_hooks.generate(args, sample, {}) for sample in prompts))
    assert isinstance(failed, Sample)
    assert (failed.status, failed.index, failed.remove_sample) == (Sample.Status.FAILED, 0, True)
    assert "this task has no answer" in failed.metadata["agl_failure"]
    assert failed.response_length == len(failed.loss_mask or ()) == len(failed.rollout_log_probs or ()) == 1
    assert failed.response_length < len(failed.tokens)
    assert sum(failed.loss_mask or ()) == 0
    check([[sample] for sample in siblings if isinstance(sample, Sample)], size=1)
    _, rewards = slime_hooks.normalize_rewards(Namespace(), [failed, *siblings])
    assert rewards == [0.0, 0.0, 0.0]  # the baseline is the siblings'


@pytest.mark.usefixtures("stopped_rollouts")
async def test_stopping_fails_pending_calls_and_the_next_prompt_restarts():
    HeldAgent.release.clear()
    with service_with_runner(HeldAgent()) as (store, service):
        args = args_for(agl_store_url=service.url)
        waiting = asyncio.ensure_future(slime_hooks.generate(args, Sample(index=0, prompt="x"), {}))
        await until(lambda: store.usage().running)
        await asyncio.to_thread(stop_rollouts)
        with pytest.raises(DataSourceError, match="stopped"):
            await asyncio.wait_for(waiting, 10)
        HeldAgent.release.set()
        sample = await asyncio.wait_for(slime_hooks.generate(args, Sample(index=1, prompt="y"), {}), 20)
        assert isinstance(sample, Sample)
        check([[sample]], size=1)


class Away(BridgeStore):
    def __init__(self) -> None:
        super().__init__()
        self.causes = ["the first cause", "a later cause"]

    async def get_latest_attempt(self, rollout_id: str) -> Any:
        raise ConnectionError(self.causes.pop(0) if len(self.causes) > 1 else self.causes[0])


async def test_a_store_that_stays_away_ends_it_with_the_first_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PATIENCE_S", 0.5)
    store = Away()
    with AGLDataSource(store=store, settings=QUICK) as source:
        await finished_rollouts(store, 3)
        for _ in range(2):
            with pytest.raises(DataSourceError, match="the first cause"):
                await get(source, 1)


def test_a_store_server_that_restarts_between_an_end_and_its_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent Lightning's client answers "there is no such rollout" for a server that cannot be reached."""
    with service_with_runner() as (_, service):
        source = AGLDataSource(args_for(agl_store_url=service.url))
        request = source.groups._store._request_json
        calls = 0

        async def interrupted(method: Any, path: str, **arguments: Any) -> Any:
            nonlocal calls
            if method == "get" and "/rollouts/" in path:
                calls += 1
                if calls <= 2:
                    raise ConnectionError("the server is restarting")
            return await request(method, path, **arguments)

        monkeypatch.setattr(source.groups._store, "_request_json", interrupted)
        ids = enqueue(service.url, "g", 2)
        with source:
            assert sorted(names(source.get_samples(1))) == sorted(ids)
        assert calls > 2


def keep_odd(args: Any, samples: list[Sample], **_: Any) -> Any:
    return Namespace(keep=bool((samples[0].group_index or 0) % 2), reason="even")


def test_groups_that_slimes_dynamic_filter_drops_are_counted_as_filtered() -> None:
    with AGLDataSource(args_for(agl_agent=AGENT)) as source:
        args = Namespace(rollout_batch_size=2, dynamic_sampling_filter_path=f"{__name__}.keep_odd")
        output = slime_hooks.generate_rollout(args, 0, source)
        assert len(output.samples) == 2
        assert sum(value for name, value in (output.metrics or {}).items() if "dynamic_filter" in name) == 2
        counts = counts_of(source)
        assert counts.closed[Outcome.TRAINED] == counts.reasons[Outcome.FILTERED, "even"] == 4


def test_a_store_that_restarts_during_an_evaluation(tmp_path: Path) -> None:
    HeldAgent.release.clear()
    evaluation: dict[str, Any] = {}
    with service_with_runner(HeldAgent()) as (_, service):
        port = int(service.url.rpartition(":")[2])
        tasks = write_tasks(tmp_path / "e.jsonl", 3)
        source = AGLDataSource(args_for(agl_store_url=service.url, agl_eval_tasks=tasks, agl_eval_rollouts=3))
        evaluating = threading.Thread(target=lambda: evaluation.update(source.evaluate(0)), daemon=True)
        evaluating.start()
        wait_until(source, 3)
    HeldAgent.release.set()
    with service_with_runner(port=port), source:
        evaluating.join(30)
        assert not evaluating.is_alive(), "it waits for rollouts that the store has lost"
        assert evaluation["agl"]["rewards"] == [0.25] * 3
        counts = source.groups.ledger.counts()
        assert counts.reasons[Outcome.CANCELLED, "store_restarted"] == counts.closed[Outcome.VALIDATED] == 3


def test_states_taken_at_any_moment_have_each_group_in_one_place() -> None:
    """A task is pending or its group is ready, not both, also at the very moment at which the group is finalized."""
    args = args_for(agl_agent=AGENT, n_samples_per_prompt=1)
    both: list[set[str]] = []
    errors: list[BaseException] = []
    taken = 0
    interval = sys.getswitchinterval()

    def take_states() -> None:
        try:
            while source.groups.ledger.counts().closed.get(Outcome.TRAINED, 0) < 400:
                with source.groups.changed:
                    source.groups.changed.wait(0.1)  # woken by each group that is finalized
                    state = source.groups.state()
                pending = set(state["demand"]["under_way"])
                both.append(pending & {group[0]["metadata"]["group_id"] for group in state["groups"]})
        except BaseException as error:
            errors.append(error)

    sys.setswitchinterval(1e-6)
    try:
        with AGLDataSource(args) as source:
            watcher = threading.Thread(target=take_states)
            watcher.start()
            while taken < 400:
                taken += len(source.get_samples(20))
            watcher.join(30)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert len(both) > 20
    assert not set().union(*both)
