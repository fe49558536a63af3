"""On-policy distillation: teachers score the tokens of rollouts, and the reverse KL to them trains the policy."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from agl_slime import AGLDataSource
from agl_slime.cli.settings import train_config
from agl_slime.cli.wiring import teacher_warning
from agl_slime.data.enqueueing import TaskGroup, enqueue_requests
from agl_slime.data.results import MemberResult, Outcome
from agl_slime.data.teacher import Teacher, Teachers
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.errors import ConfigError, TrainerError
from agl_slime.report.metrics import read_metrics
from agl_slime.support.http import listening
from agl_slime.train.slime.source import score_delivered
from agl_slime.types import Sample, flat_samples
from tests.data.sources import Running
from tests.harness.engine_client import PROMPTS, TOLERANCE, expected_log_probs
from tests.harness.slime_source import AGENT, args_for
from tests.harness.training import train, weights_restored

QUICK = ClientSettings(max_attempts=2, backoff_base_s=0.001, total_timeout_s=5.0)


def sample(ids: list[int], length: int, *, source: str | None = None) -> Sample:
    metadata = {} if source is None else {"source_name": source}
    return Sample(tokens=ids, response_length=length, loss_mask=[1] * length, reward=1.0, metadata=metadata)


def member(*samples: Sample, **changes: Any) -> MemberResult:
    return MemberResult(rollout_id="r", group_id="g", samples=samples, reward=1.0, **changes)


@asynccontextmanager
async def scoring(log_prob: float | None) -> AsyncIterator[str]:
    """An engine under which each token has ``log_prob``; None: it answers 500."""

    async def answer(request: web.Request) -> web.Response:
        if log_prob is None:
            return web.json_response({"error": {"message": "out of memory"}}, status=500)
        payload = await request.json()
        scored = [
            [[None if n == start else log_prob, token, None] for n, token in enumerate(ids) if n >= start]
            for ids, start in zip(payload["input_ids"], payload["logprob_start_len"], strict=True)
        ]
        return web.json_response([{"text": "", "meta_info": {"input_token_logprobs": pairs}} for pairs in scored])

    app = web.Application()
    app.router.add_post("/generate", answer)
    async with listening(app, host="127.0.0.1", port=0, backlog=8) as url:
        yield url


@pytest.fixture
async def broken() -> AsyncIterator[str]:
    async with scoring(None) as url:
        yield url


async def test_every_response_token_gets_the_teachers_log_prob(embedded_engine: str, model: Any):
    samples = [sample(ids, length) for ids, length in zip(PROMPTS, (2, 3, 30), strict=True)]
    async with Teachers([Teacher(embedded_engine)]) as teachers:
        assert await teachers(scored := member(*samples)) is scored
    for scored_sample in samples:
        length = scored_sample.response_length
        expected = expected_log_probs(model, scored_sample.tokens[:-length], scored_sample.tokens[-length:])
        assert np.abs(np.array(scored_sample.teacher_log_probs) - expected).max() < TOLERANCE


async def test_teachers_of_one_source_are_averaged_by_weight():
    unscored = member(sample(PROMPTS[0], 2, source="math"))
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(scoring(log_prob)) for log_prob in (-1.0, -2.0)]
        both = [Teacher(url, "math", weight) for url, weight in zip(urls, (3.0, 1.0), strict=True)]
        result = await (await stack.enter_async_context(Teachers(both, settings=QUICK)))(unscored)
    assert result.ok
    assert unscored.samples[0].teacher_log_probs == [-1.25, -1.25]


async def test_teachers_are_chosen_by_source(embedded_engine: str, broken: str):
    of_math = [Teacher(embedded_engine, "math", 3.0), Teacher(broken, "code")]
    async with Teachers(of_math, settings=QUICK) as teachers:
        good = await teachers(member(sample(PROMPTS[0], 2, source="math")))
        failed = await teachers(member(sample(PROMPTS[0], 2, source="code")))
        unknown = await teachers(member(sample(PROMPTS[0], 2)))
    assert good.ok
    assert (failed.failure, unknown.failure) == ("teacher", "teacher")
    assert "out of memory" in failed.failure_message
    assert "source_name ''" in unknown.failure_message


async def test_a_failed_teacher_fails_the_rollout_and_gives_no_number(broken: str):
    samples = [sample(ids, 2) for ids in PROMPTS]
    async with Teachers([Teacher(broken)], settings=QUICK) as teachers:
        result = await teachers(member(*samples))
        validation = await teachers(member(*samples, mode="val"))
    assert (result.ok, result.samples) == (False, ())
    assert [unscored.teacher_log_probs for unscored in samples] == [None] * 3
    assert validation.ok


async def test_another_vocabulary_is_refused_with_its_url(embedded_engine: str, tokenizer: Any):
    async with Teachers([Teacher(embedded_engine)]) as teachers:
        await teachers.check(tokenizer)
        other = type(tokenizer).from_pretrained(tokenizer.name_or_path)
        other.add_tokens(["<|new|>"])
        with pytest.raises(ConfigError, match=r"http://127.* differs from the policy's .* same tokenizer"):
            await teachers.check(other)


async def test_a_rollout_that_its_teacher_failed_is_failed_in_the_ledger(embedded_engine: str, broken: str):
    urls = iter([embedded_engine, broken, embedded_engine, embedded_engine])

    async def score(member: MemberResult) -> MemberResult:
        async with Teachers([Teacher(next(urls))], settings=QUICK) as teachers:
            return await teachers(member)

    with Running(annotate=score) as running:
        for number, rollout_id in enumerate(await running.opened(size=4), 1):
            await running.finish([rollout_id])
            await running.until_members(number)
        [group] = await running.get()
        assert [len(scored.teacher_log_probs or ()) for scored in group] == [2, 2, 2]
        assert running.listener.failures == ["teacher"]
        assert running.reason(Outcome.FAILED, "teacher") == 1


async def test_a_delivered_rollout_without_its_teacher_is_out_of_slimes_loss(embedded_engine: str, broken: str):
    both = [Teacher(embedded_engine, "good"), Teacher(broken, "bad")]
    group = [replace(sample(PROMPTS[0], 2, source=name), rollout_log_probs=[-1.0, -2.0]) for name in ("good", "bad")]
    await score_delivered([group], Teachers(both, settings=QUICK))
    assert [scored.remove_sample for scored in group] == [False, True]
    assert group[0].teacher_log_probs != group[1].teacher_log_probs == [-1.0, -2.0]


def test_slimes_data_source_gives_samples_with_the_teachers_log_probs(embedded_engine: str):
    with AGLDataSource(args_for(agl_agent=AGENT, agl_teacher_url=embedded_engine)) as source:
        groups = source.get_samples(2)
        assert len(groups) == 2
        for scored in flat_samples(groups):
            assert len(scored.teacher_log_probs or ()) == scored.response_length > 0
        assert source._teachers is not None
        clients = source._teachers._clients
        assert all(client._http._sessions for client in clients)
    assert not any(client._http._sessions for client in clients)


def test_a_rollout_has_the_source_name_of_its_task():
    tasks = ({"source_name": "math"}, {"source_name": 3}, {}, "a text")
    for task, expected in zip(tasks, ({"source_name": "math"}, {}, {}, {}), strict=True):
        [request] = enqueue_requests([TaskGroup("g", task)], size=1, mode="train", resources_id=None, timeout_s=60)
        assert request.metadata == {"group_id": "g", "group_size": 1, "seed": "0/train/g/0", **expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://a:1/v1", Teacher("http://a:1")),
        ("math=http://a:1", Teacher("http://a:1", "math")),
        ("math:0.5=https://a/x=y", Teacher("https://a/x=y", "math", 0.5)),
        ("a:1", None),
        ("math:much=http://a:1", None),
        ("math:nan=http://a:1", None),
    ],
)
def test_the_forms_of_teacher_url(text: str, expected: Teacher | None):
    if expected is None:
        with pytest.raises(ConfigError, match="--teacher-url"):
            train_config(teacher_url=(text,))
    else:
        assert Teacher.parse(text) == expected


def test_settings_of_a_teacher_without_a_url_are_refused():
    for fields in ({"teacher_coef": 0.5}, {"teacher_alone": True}):
        with pytest.raises(ConfigError, match="add --teacher-url URL"):
            train_config(**fields)


@pytest.mark.parametrize("alone", [False, True])
def test_the_gradient_is_that_of_rewards_less_reverse_kl(tmp_path: Path, alone: bool):
    """Against autograd over one rollout after the other; ratios are 1, so the loss is the plain policy gradient."""
    torch = pytest.importorskip("torch")
    from tests.harness.trainer_policy import make_model, make_samples, response_log_probs
    from tests.harness.trainers import ONE_STEP, assert_close, gradient_of, recorded_gradients, trainer

    student, teacher, coef = make_model(seed=0), make_model(seed=1), 0.3
    student.save_pretrained(tmp_path)
    samples = make_samples(student, groups=1)
    for sample in samples:
        sample.teacher_log_probs = response_log_probs(teacher, sample.tokens, sample.response_length)
    ours = trainer(tmp_path, ONE_STEP, rewards_normalization=False, std_normalization=False)
    ours._teacher_coef, ours._teacher_alone = coef, alone
    ours.model.double()
    with recorded_gradients(ours) as steps:
        metrics = ours.train(samples, iteration=0)

    student.double()
    total, kl, n_tokens = torch.zeros((), dtype=torch.float64), 0.0, sum(sum(s.loss_mask or []) for s in samples)
    for sample in samples:
        ids, trained = torch.tensor(sample.tokens), torch.tensor(sample.loss_mask, dtype=torch.bool)
        every = student(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        columns = (every[-sample.response_length :], sample.rollout_log_probs, sample.teacher_log_probs)
        now, old, of_teacher = (torch.as_tensor(column, dtype=torch.float64)[trained] for column in columns)
        advantages = (0.0 if alone else float(sample.reward)) - coef * (old - of_teacher)  # type: ignore[arg-type]
        total = total - ((now - old).exp() * advantages).sum() / n_tokens
        kl += float((old - of_teacher).sum())
    total.backward()
    assert metrics["train/teacher_kl"] == pytest.approx(kl / n_tokens, rel=1e-6)
    assert metrics["train/loss"] == pytest.approx(total.item(), rel=1e-6)
    assert_close(steps[0], gradient_of(student))

    samples[1].teacher_log_probs = None
    with pytest.raises(TrainerError, match="sample 1 has no teacher_log_probs while others do"):
        ours.train(samples, iteration=1)
    with pytest.raises(TrainerError, match="give --teacher-url"):
        ours.train([replace(sample, teacher_log_probs=None) for sample in samples], iteration=1)


def test_another_temperature_than_the_teachers_warns():
    teacher = {"teacher_url": ("http://x:1",)}
    assert teacher_warning(train_config(temperature=0.7)) == teacher_warning(train_config(**teacher)) == {}
    [text] = teacher_warning(train_config(temperature=0.7, **teacher)).values()
    assert text.startswith("--temperature 0.7 with a teacher: ")


def test_a_run_whose_teacher_alone_is_its_own_policy_learns_nothing(policy_dir, embedded_engine, tmp_path):
    pytest.importorskip("torch")
    sizes = {"num_iterations": 1, "rollout_batch_size": 8, "eval_interval": 0, "output_dir": tmp_path}
    engines = {"sglang_url": embedded_engine, "teacher_url": (embedded_engine,), "teacher_alone": True}
    with weights_restored(embedded_engine, policy_dir):
        train(model_path=policy_dir, **engines, **sizes)
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    assert row["rollout/reward_mean"] > 0
    assert row["train/teacher_kl"] == pytest.approx(0.0, abs=1e-4)
    assert row["train/loss"] == pytest.approx(0.0, abs=1e-4)
