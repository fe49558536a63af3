"""The embedded engine's routed experts and nuclei, and the local trainer's replay of them."""

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from rich.console import Console

from agl_slime.agent.access import EngineAccess, check_replay
from agl_slime.cli.local import run_training
from agl_slime.cli.settings import train_config
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.describe import experts_shape_of
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.experts import ExpertCapture
from agl_slime.errors import ConfigError, TrainerError
from agl_slime.gateway.server import Gateway
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.replay import file_replay
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.train.local.model import force_experts
from agl_slime.types import Sample, sample_from_fields
from tests.harness.engine_servers import engine_in_thread
from tests.harness.gateway import QUICK, writer
from tests.harness.moe_policy import FAMILIES, LAYERS, TOP_K, save_moe
from tests.harness.trainers import ONE_STEP, trainer

SAMPLING = SamplingParams(max_new_tokens=12, routed_experts=(LAYERS, TOP_K), extra={"ignore_eos": True})


@pytest.fixture(scope="module", params=FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    directory = save_moe(tmp_path_factory.mktemp("moe"), family=request.param)
    with engine_in_thread(directory, return_routed_experts=True) as url:
        yield url, directory


def family_of(directory: Path) -> str:
    return "olmoe" if "olmoe" in (directory / "config.json").read_text() else "qwen3_moe"


def expected(directory: Path, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """By transformers' own forward pass."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    capture = ExpertCapture(model)
    with torch.no_grad():
        model(torch.tensor([ids[:-1]]))
    return capture.take(len(ids) - 1)


def samples_of(prompts: Sequence[Sequence[int]], answers: Sequence[Generation], *, replay: bool = True) -> list[Sample]:
    made = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        nucleus = answer.nucleus if replay else None
        made.append(
            sample_from_fields(
                tokens=[*prompt, *answer.output_ids],
                response_length=len(answer.output_ids),
                loss_mask=[1] * len(answer.output_ids),
                rollout_log_probs=list(answer.log_probs),
                rollout_routed_experts=answer.experts.rows if answer.experts is not None and replay else None,
                rollout_top_p_token_ids=None if nucleus is None else nucleus.ids,
                rollout_top_p_token_offsets=None if nucleus is None else nucleus.offsets,
                reward=float(number % 2),
                group_index=0,
                rollout_id=number,
            )
        )
    return made


async def ask(url: str, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Generation]:
    async with SGLangClient(base_url=url) as client:
        return [await client.generate(prompt, sampling.seeded(number)) for number, prompt in enumerate(prompts)]


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(3)
    begin = [rng.randrange(50) for _ in range(20)]  # so that prefixes are copied and not computed
    return [[*begin, *(rng.randrange(50) for _ in range(rng.randint(1, 9)))] for _ in range(count)]


async def test_the_embedded_engine_tells_the_experts_that_transformers_picks(served: tuple[str, Path]) -> None:
    url, directory = served
    assert experts_shape_of(str(directory)) == (LAYERS, TOP_K)
    prompts = prompts_of(4)
    for prompt, answer in zip(prompts, await ask(url, prompts, SAMPLING), strict=True):
        assert answer.experts is not None
        ids = [*prompt, *answer.output_ids]
        assert np.array_equal(np.sort(answer.experts.rows), np.sort(expected(directory, ids)))
        async with SGLangClient(base_url=url) as client:
            later = await client.generate([*ids, 7, 8], SAMPLING, experts_start=len(ids) - 1)
        assert later.cached_tokens >= 20  # copied from another row, with their experts
        assert later.experts is not None
        whole = expected(directory, [*ids, 7, 8, *later.output_ids])
        assert np.array_equal(np.sort(later.experts.rows), np.sort(whole[len(ids) - 1 :]))


async def test_new_weights_of_a_mixture_of_experts_are_loaded(served: tuple[str, Path], tmp_path: Path) -> None:
    url, directory = served
    new_weights = save_moe(tmp_path, family=family_of(directory), router_noise=1.0)
    async with SGLangClient(base_url=url) as client:
        await client.update_weights_from_disk(str(new_weights), "2")
        answer = await client.generate(prompts_of(1)[0], SAMPLING)
        await client.update_weights_from_disk(str(directory), "3")
    assert answer.experts is not None
    ids = [*prompts_of(1)[0], *answer.output_ids]
    assert np.array_equal(np.sort(answer.experts.rows), np.sort(expected(new_weights, ids)))
    assert not np.array_equal(np.sort(answer.experts.rows), np.sort(expected(directory, ids)))


async def test_replayed_experts_reduce_the_log_prob_gap_of_a_noisy_router(served: tuple[str, Path], tmp_path: Path):
    url, directory = served
    noisy = save_moe(tmp_path, family=family_of(directory), router_noise=0.02)
    prompts = prompts_of(32)  # answers of few prompts would leave the ratio between 0.2 and 0.8
    async with SGLangClient(base_url=url) as client:
        await client.update_weights_from_disk(str(noisy), "2")
        answers = await ask(url, prompts, SAMPLING)
        await client.update_weights_from_disk(str(directory), "3")
    differ = {}
    for replay in (True, False):
        metrics = trainer(directory, ONE_STEP).train([samples_of(prompts, answers, replay=replay)], iteration=0)
        differ[replay] = metrics["train/logprob_diff_mean"]
    assert differ[True] < 0.7 * differ[False]


async def test_the_trainers_log_probs_are_of_the_nucleus_that_was_sampled_from(served: tuple[str, Path]) -> None:
    url, directory = served
    prompts = prompts_of(4)
    for cut in ({"top_p": 0.6}, {"top_k": 5}):
        sampling = replace(SAMPLING, nucleus=True, temperature=0.7, **cut)
        answers = await ask(url, prompts, sampling)
        assert all(answer.nucleus is not None and len(answer.nucleus) == 12 for answer in answers)
        metrics = trainer(directory, ONE_STEP, temperature=0.7).train([samples_of(prompts, answers)], iteration=0)
        assert metrics["train/logprob_diff_max"] < 1e-3
        whole = trainer(directory, ONE_STEP, temperature=0.7).train(
            [samples_of(prompts, answers, replay=False)], iteration=0
        )
        assert whole["train/logprob_diff_mean"] > 0.1
        assert metrics["train/entropy"] < whole["train/entropy"]


async def test_recomputed_layers_are_given_the_same_experts_again(served: tuple[str, Path]) -> None:
    url, directory = served
    prompts = prompts_of(4)
    answers = await ask(url, prompts, SAMPLING)
    norms = [
        trainer(directory, ONE_STEP, gradient_checkpointing=checkpointing).train(
            [samples_of(prompts, answers)], iteration=0
        )
        for checkpointing in (False, True)
    ]
    assert norms[0]["train/grad_norm"] == pytest.approx(norms[1]["train/grad_norm"], rel=1e-4)


async def test_replay_settings_are_checked_before_the_first_batch(served: tuple[str, Path], embedded_engine: str):
    url, _ = served
    assert await check_replay(url, {"routed_experts": [LAYERS, TOP_K]})
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        await check_replay(embedded_engine, {"routed_experts": [LAYERS, TOP_K]})
    with pytest.raises(ConfigError, match="--num-layers"):
        await check_replay(url, {"routed_experts": [LAYERS + 1, TOP_K]})


def test_experts_of_another_model_are_refused(policy_dir: Path) -> None:
    answer = Generation(output_ids=(5, 6), log_probs=(-1.0, -1.0), text="", finish_reason="stop")
    (sample,) = samples_of([[1, 2]], [answer])
    sample.rollout_routed_experts = np.zeros((3, LAYERS, TOP_K), dtype=np.uint8)
    with pytest.raises(TrainerError, match="has no known routers"):
        trainer(policy_dir, ONE_STEP, rewards_normalization=False, std_normalization=False).train(
            [[sample]], iteration=0
        )


def test_gateway_agents_are_trained_with_the_experts_of_all_turns(served: tuple[str, Path]) -> None:
    url, directory = served
    sampling = {"max_new_tokens": 8, "temperature": 1.0, "routed_experts": [LAYERS, TOP_K]}
    llm = LLM(endpoint=url, model=str(directory), sampling_parameters=sampling)
    spans: list[Any] = []
    with Gateway(access=EngineAccess(settings=QUICK)) as gateway:
        attempt, resources = gateway.open("ro-1", "at-1", {"main_llm": llm}, writer(spans))
        assert attempt is not None
        address = resources["main_llm"].endpoint
        messages = [{"role": "user", "content": "one"}]
        for text in ("two", "three"):
            body = {"model": "m", "messages": messages}
            answer = httpx.post(f"{address}/chat/completions", json=body, timeout=30).json()["choices"][0]["message"]
            messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": text}]
        httpx.post(f"{address}/chat/completions", json={"model": "m", "messages": messages[2:]}, timeout=30)
        run_blocking(gateway.close(attempt))
    turns = decode_turns(spans)
    segments = merge_turns(turns)
    assert sum(len(segment.placements) for segment in segments) == 3
    assert len(segments) > 1  # the last one begins anew
    for segment in segments:
        assert segment.experts is not None
        assert (segment.experts == expected(directory, segment.token_ids.tolist())).all()
    if turns[1].fork is None:
        assert turns[1].experts is not None
        assert turns[1].experts.start > 0  # rows of the first turn are not requested again


@pytest.mark.slow
def test_a_whole_run_trains_on_the_experts_that_its_engine_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """train.py with a mixture of experts, in this process: each pass of the trainer, the embedded engine beside it; the
    experts of some turns in files."""
    forced: list[Any] = []
    filed: list[str] = []

    def watched(*args: Any) -> Any:
        if (replay_file := file_replay(*args)) is not None:
            filed.append(replay_file.file)
        return replay_file

    monkeypatch.setattr("agl_slime.agent.session.file_replay", watched)
    monkeypatch.setattr("agl_slime.tokens.replay.FILED_FROM_BYTES", 64)

    def spy(model: Any, experts: Any) -> None:
        forced.append(None if experts is None else tuple(experts.shape))
        force_experts(model, experts)

    monkeypatch.setattr("agl_slime.train.local.model.force_experts", spy)
    config = train_config(
        model_path=save_moe(tmp_path / "moe"),
        num_iterations=2,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        eval_interval=0,
        output_dir=tmp_path / "run",
    )
    asyncio.run(run_training(config, console=Console(quiet=True)))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/tokens_trained"] > 0 for row in rows] == [True, True]
    assert max(row["train/logprob_diff_max"] for row in rows) < 1e-4
    shapes = [shape for shape in forced if shape is not None]
    assert shapes
    assert {shape[1:] for shape in shapes} == {(LAYERS, TOP_K)}
    assert filed
    assert not [*(tmp_path / "run").rglob("*replay*")]
