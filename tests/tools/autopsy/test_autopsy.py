"""``agl-slime autopsy``: planted faults of a real (embedded) engine are named first, and a clean one has none."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason='forward passes need torch: pip install "agl-slime[local]"')

from transformers import AutoModelForCausalLM  # noqa: E402

from agl_slime.cli.autopsy import AutopsyConfig, Case, Measured, autopsy, diagnose, with_engine  # noqa: E402
from agl_slime.engine.client.client import SGLangClient  # noqa: E402
from agl_slime.engine.client.generation import SamplingParams  # noqa: E402
from agl_slime.engine.engine import Engine  # noqa: E402
from agl_slime.errors import ConfigError  # noqa: E402
from agl_slime.report.autopsy import Diagnosis, KeptSample, explain, mean_gap  # noqa: E402
from agl_slime.report.files import IterationFile  # noqa: E402
from agl_slime.report.rollouts import pack  # noqa: E402
from tests.harness.engine_servers import Server  # noqa: E402
from tests.tools.autopsy.autopsies import (  # noqa: E402
    BASE,
    BEFORE,
    NOW,
    Bench,
    sample_rollouts,
    serve,
)

ROLLOUTS = 3


def test_a_clean_engine_has_no_cause(bench: Bench):
    for recorded in ([one.sampler for one in bench.samples], bench.scored()):
        found = bench.diagnosis(recorded)
        assert (found.causes, found.first) == ((), None)
        assert found.gap < 1e-4
        assert found.sentence.startswith("Sampler and model agree")


def without_marks(ids: np.ndarray, *, mark: int) -> np.ndarray:
    return ids[(ids != mark) | (np.arange(len(ids)) == len(ids) - 1)]


def without_line_ends(ids: np.ndarray, *, mark: int, line_end: int) -> np.ndarray:
    """Messages that follow the end mark at once."""
    return ids[~(np.r_[False, ids[:-1] == mark] & (ids == line_end))]


TOKENS: dict[str, Callable[[Bench, np.ndarray], np.ndarray]] = {
    "double_bos": lambda bench, ids: np.insert(ids, 0, ids[0]),
    "missing_bos": lambda bench, ids: ids[1:],
    "end_mark": lambda bench, ids: without_marks(ids, mark=bench.tokenizer.eos_token_id),
    "newline": lambda bench, ids: without_line_ends(
        ids, mark=bench.tokenizer.eos_token_id, line_end=bench.tokenizer.encode("\n")[0]
    ),
    "token_removed": lambda bench, ids: np.delete(ids, 9),
    "token_inserted": lambda bench, ids: np.insert(ids, 3, bench.tokenizer.encode("\n")[0]),
}


@pytest.mark.parametrize("fault", TOKENS)
def test_a_fault_of_the_engines_prompt_is_named_first(bench: Bench, fault: str):
    recorded = bench.scored(partial(TOKENS[fault], bench))
    found = bench.diagnosis(recorded)
    assert found.first is not None, found
    assert found.first.cause == fault, found.sentence
    gaps = [np.abs(a - b) for a, b in zip(recorded, bench.scored(), strict=True)]
    number = int(np.argmax([gap.max() for gap in gaps]))
    place = int(bench.samples[number].places[gaps[number].argmax()])
    assert (found.worst[0].rollout_id, found.worst[0].place) == (f"r{number}", place)


@given(number=st.integers(0, ROLLOUTS - 1), at=st.integers(0, 5), nats=st.floats(1.0, 9.0), more=st.booleans())
def test_a_planted_token_is_the_worst_one(number: int, at: int, nats: float, more: bool):
    drawn = np.random.default_rng(at)
    samples = [
        KeptSample(
            rollout_id=f"r{one}",
            iteration=1,
            version="0",
            ids=np.arange(20),
            prompt_length=8,
            places=np.arange(9, 20, 2),
            sampler=drawn.normal(-2.0, 0.3, 6).astype(np.float32),
            trainer=np.zeros(6, dtype=np.float32),
            pieces=[f"p{place}" for place in range(20)],
        )
        for one in range(ROLLOUTS)
    ]
    expected = [one.sampler + drawn.uniform(-0.3, 0.3, 6).astype(np.float32) for one in samples]
    recorded = [one.sampler.copy() for one in samples]
    recorded[number][at] = expected[number][at] + (nats if more else -nats)
    worst = explain(samples, recorded, expected, ()).worst
    place = 9 + 2 * at
    assert (worst[0].rollout_id, worst[0].place, worst[0].piece) == (f"r{number}", place, f"p{place}")
    assert worst[0].recorded - worst[0].expected == pytest.approx(nats if more else -nats, abs=1e-5)
    assert [abs(one.recorded - one.expected) for one in worst] == sorted(
        (abs(one.recorded - one.expected) for one in worst), reverse=True
    )


def test_the_prompt_in_another_rendering_is_named_first(bench: Bench):
    def other(sample: KeptSample) -> list[int]:
        text = bench.tokenizer.decode(sample.ids[: sample.prompt_length]).replace("Call lookup", "You may call lookup")
        return bench.tokenizer.encode(text, add_special_tokens=False)

    by_ids = {one.ids.tobytes(): one for one in bench.samples}

    def edit(ids: np.ndarray) -> np.ndarray:
        one = by_ids[ids.tobytes()]
        return np.concatenate([other(one), ids[one.prompt_length :]]).astype(np.int64)

    renderings = [("template", "the engine was asked with the prompt as the model's own template writes it", other)]
    found = bench.diagnosis(bench.scored(edit), renderings=renderings)
    assert found.first is not None
    assert found.first.cause == "template"


def test_the_thinking_of_an_earlier_turn_that_was_dropped_is_named_first(bench: Bench):
    tokenizer = copy.deepcopy(bench.tokenizer)
    begin, end = 451, 450  # the tiny vocabulary has no marks of thinking: two tokens stand for them
    tokenizer.get_vocab = lambda: {"<think>": begin, "</think>": end}
    think = [begin, *tokenizer.encode(" the lookup", add_special_tokens=False), end]
    thought = []
    for one in bench.samples:
        at = one.prompt_length
        thought.append(replace(one, ids=np.insert(one.ids, at, think), places=one.places + len(think)))

    def dropped(ids: np.ndarray) -> np.ndarray:
        at = ids.tolist().index(think[0])
        return np.delete(ids, range(at, at + len(think)))

    other = replace(bench, tokenizer=tokenizer, samples=thought)
    honest = other.scored()
    runs = [np.flatnonzero(np.diff(one.places) > 1)[-1] for one in thought]
    recorded = other.scored(dropped)
    # the answer that thought was sampled with its thinking
    recorded = [np.r_[a[: n + 1], b[n + 1 :]] for a, b, n in zip(honest, recorded, runs, strict=True)]
    other = replace(
        other, samples=[replace(one, places=one.places[n + 1 :]) for one, n in zip(thought, runs, strict=True)]
    )
    found = other.diagnosis([values[n + 1 :] for values, n in zip(recorded, runs, strict=True)])
    assert found.first is not None, found
    assert found.first.cause == "thinking", found.sentence


def stale_cache(bench: Bench) -> list[np.ndarray]:
    """A real prefix cache that an update of the weights does not empty."""
    engine = Engine(bench.model(BEFORE), bench.tokenizer)
    try:
        serve(engine, [one.ids[: one.prompt_length] for one in bench.samples], max_new_tokens=1)
        engine._slots.stale = lambda: None  # type: ignore[method-assign]
        engine.update_weights(dict(bench.model().state_dict())).result(30)
        starts = [one.prompt_length - 1 for one in bench.samples]
        requests = serve(engine, [one.ids for one in bench.samples], start=starts, max_new_tokens=0)
    finally:
        engine.close()
    scores = []
    for one, request in zip(bench.samples, requests, strict=True):
        assert request.cached_tokens > 0
        every = np.array([np.nan if value is None else value for value, _ in request.input_log_probs])
        scores.append(every[one.places - one.prompt_length + 1].astype(np.float32))
    return scores


def partial_update(bench: Bench) -> list[np.ndarray]:
    mixed, old = bench.model(), bench.model(BEFORE).state_dict()
    mixed.load_state_dict({k: old[k] if ".layers.1." in k else v for k, v in mixed.state_dict().items()})
    return bench.scored(model=mixed)


def other_rope(bench: Bench) -> list[np.ndarray]:
    config = bench.model().config
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    other = AutoModelForCausalLM.from_config(config).eval()
    other.load_state_dict(bench.model().state_dict())
    return bench.scored(model=other)


WEIGHTS: dict[str, Callable[[Bench], list[np.ndarray]]] = {
    "late_weights": lambda bench: bench.scored(model=bench.model(BEFORE)),
    "adapter": lambda bench: bench.scored(model=bench.model(BASE)),
    "partial_weights": partial_update,
    "stale_cache": stale_cache,
    "rope": other_rope,
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_fault_of_the_engines_weights_is_named_first(bench: Bench, fault: str):
    found = bench.diagnosis(WEIGHTS[fault](bench), without_adapter=bench.directory / BASE)
    assert found.first is not None, found
    assert found.first.cause == fault, found.sentence
    assert found.first.left < 0.1 * found.gap


def test_faults_that_only_a_measurement_finds_are_named_first(bench: Bench):
    right, stale = bench.scored(), stale_cache(bench)
    wrong = [replace(one, sampler=values) for one, values in zip(bench.samples, stale, strict=True)]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    for fault, samples, (fresh, cached, batch) in (
        ("cache", bench.samples, (right, stale, stale)),
        ("batch", bench.samples, (right, right, stale)),
        ("engine", bench.samples, (stale, stale, stale)),
        ("decode", wrong, (right, right, right)),
    ):
        case = Case(samples=samples, version="3", weights=bench.directory / NOW, sampling=sampling)
        measured = Measured(fresh=fresh, cached=cached, batch=batch, versions=frozenset("3"))
        found = with_engine(diagnose(case), measured, case)
        assert found.first is not None, found
        assert found.first.cause == fault, found.sentence


def test_half_precision_is_named_and_told_from_a_half_precision_head(bench: Bench):
    model = bench.model()
    whole, head = [], []
    for one in bench.samples:
        ids, targets = torch.from_numpy(one.ids)[None], torch.from_numpy(one.ids[one.places])[:, None]
        with torch.no_grad():
            hidden = model.base_model(ids).last_hidden_state[0, one.places - 1].bfloat16()
            logits = torch.nn.functional.linear(hidden, model.lm_head.weight.bfloat16()).float()
            head.append(logits.log_softmax(-1).gather(-1, targets)[:, 0].numpy())
    model.bfloat16()
    for one in bench.samples:
        targets = torch.from_numpy(one.ids[one.places])[:, None]
        with torch.no_grad():
            logits = model(torch.from_numpy(one.ids)[None]).logits[0, one.places - 1].float()
            whole.append(logits.log_softmax(-1).gather(-1, targets)[:, 0].numpy())
    for recorded, fault in ((head, "bf16_head"), (whole, "bf16")):
        found = bench.diagnosis(recorded)
        assert found.first is not None, found
        assert found.first.cause == fault, found.sentence


def test_a_clean_mixture_of_experts_has_no_cause(routed: Bench):
    assert all(one.experts is not None and len(one.experts) == len(one.ids) - 1 for one in routed.samples)
    found = routed.diagnosis([one.sampler for one in routed.samples])
    assert (found.causes, found.gap < 1e-4) == ((), True)


REPLAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the experts that are recorded for the token before": lambda experts: np.r_[experts[1:], experts[-1:]],
    "the experts that are recorded for the next token": lambda experts: np.r_[experts[:1] * 0, experts[:-1]],
    "the experts that are recorded for the layer before": lambda experts: np.roll(experts, -1, axis=1),
    "the experts that are recorded for the next layer": lambda experts: np.roll(experts, 1, axis=1),
    "the router's own choice and not the recorded experts": lambda experts: experts[::-1],
}


@pytest.mark.parametrize("fault", REPLAYS)
def test_a_wrong_replay_of_the_router_is_named_first(routed: Bench, fault: str):
    wrong = [replace(one, experts=REPLAYS[fault](one.experts)) for one in routed.samples]
    found = replace(routed, samples=wrong).diagnosis([one.sampler for one in wrong])
    assert found.sentence.startswith(f"routing: the engine used {fault} (100 %"), found
    assert found.first is not None
    assert found.first.left < 1e-4 < 0.01 < found.gap


def test_other_faults_of_a_mixture_of_experts_are_named_first(routed: Bench):
    cooler = sample_rollouts(routed.model(), routed.tokenizer, temperature=0.7)
    late = sample_rollouts(routed.model(BEFORE), routed.tokenizer)
    for samples, fault in ((cooler, "temperature"), (late, "late_weights")):
        found = replace(routed, samples=samples).diagnosis([one.sampler for one in samples])
        assert found.first is not None, found
        assert (found.first.cause, found.first.left < 1e-4) == (fault, True), found.sentence


@pytest.mark.parametrize(
    ("fault", "sampling", "conditions"),
    [
        ("temperature", {"temperature": 0.7}, {}),
        ("temperature", {"temperature": 1.0}, {"temperature": 0.7}),
        ("nucleus", {"top_p": 0.8, "nucleus": True}, {}),
        ("nucleus", {}, {"top_p": 0.8}),
    ],
)
def test_a_convention_in_one_place_only_is_named_first(bench: Bench, fault: str, sampling: Any, conditions: Any):
    samples = sample_rollouts(bench.model(), bench.tokenizer, **sampling)
    other = replace(bench, samples=samples)
    found = other.diagnosis([one.sampler for one in samples], **conditions)
    assert found.first is not None, found
    assert found.first.cause == fault, found.sentence


def test_log_probs_one_place_off_are_named_first(bench: Bench):
    found = bench.diagnosis([np.roll(one.sampler, 1) for one in bench.samples])
    assert found.first is not None
    assert found.first.cause == "shift"


@pytest.mark.parametrize(
    ("nats", "end"), [(3.0, "half of it."), (0.02, "; rounding to bfloat16 alone gives up to 0.05.")]
)
def test_an_unknown_cause_is_not_given_a_name(bench: Bench, nats: float, end: str):
    drawn = np.random.default_rng(0)
    recorded = [one.sampler - drawn.exponential(nats, len(one.sampler)).astype(np.float32) for one in bench.samples]
    found = bench.diagnosis(recorded)
    assert found.first is None
    assert "no known cause" in found.sentence
    assert found.sentence.endswith(end)


def write_run(directory: Path, samples: Sequence[KeptSample], *, base: Path, version: str, **settings: Any) -> Path:
    """The files of a run that an autopsy reads."""
    directory.mkdir(exist_ok=True)
    config = {"trainer": "local", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "local": {"n_minibatches": 4}}
    (directory / "config.json").write_text(json.dumps({**config, **settings}))
    (directory / "start.json").write_text(json.dumps({"model": str(base)}))
    lines = []
    for one in samples:
        length = len(one.ids) - one.prompt_length
        log_probs, mask = np.full(length, np.nan, dtype=np.float32), np.zeros(length, dtype=np.int8)
        log_probs[one.places - one.prompt_length], mask[one.places - one.prompt_length] = one.sampler, 1
        edges = np.flatnonzero(np.diff(mask, prepend=0, append=0)).reshape(-1, 2).tolist()
        sample = {
            "token_source": "engine",
            "prompt_length": one.prompt_length,
            "tokens": pack(one.ids, "<i4"),
            "trained": edges,
            "engine_log_probs": pack(log_probs),
            "trainer_log_probs": pack(log_probs),
            "weight_versions": [[version, *edge] for edge in edges],
            "left_out": 0,
        }
        lines.append({"rollout_id": one.rollout_id, "messages": [*one.messages], "samples": [sample]})
    file = IterationFile(directory / "rollouts.jsonl")
    file.append(1, lines)
    file.close()
    return directory


async def diagnose_run(run: Path, url: str) -> tuple[Diagnosis, str]:
    diagnosis, case = await autopsy(AutopsyConfig(run_dir=run, sglang_url=url, samples=4))
    return diagnosis, case.version


async def test_a_run_is_diagnosed_from_its_files_and_its_engine(
    bench: Bench, policy_dir: Path, embedded_engine: str, tmp_path: Path
):
    samples = sample_rollouts(bench.model(BASE), bench.tokenizer)
    run = write_run(tmp_path / "run", samples, base=policy_dir, version="0")
    clean, version = await diagnose_run(run, embedded_engine)
    assert version == "0"
    assert clean.first is None, clean.sentence
    assert max(clean.parts.values()) < 1e-4
    assert {"sampler", "cache", "batch", "engine", "decode"} <= {*clean.parts}

    other = replace(bench, samples=samples)
    recorded = other.scored(partial(TOKENS["double_bos"], bench), model=bench.model(BASE))
    planted = [replace(one, sampler=values) for one, values in zip(samples, recorded, strict=True)]
    found, _ = await diagnose_run(
        write_run(tmp_path / "planted", planted, base=policy_dir, version="0"), embedded_engine
    )
    assert found.sentence.startswith("double_bos: the engine was asked with a second first token")
    assert found.parts["engine"] < 1e-4 < found.parts["decode"]


async def test_a_system_message_that_the_engine_did_not_get_is_named_first(
    bench: Bench, policy_dir: Path, embedded_engine: str, tmp_path: Path
):
    samples = sample_rollouts(bench.model(BASE), bench.tokenizer)
    marks = [np.flatnonzero(one.ids == bench.tokenizer.eos_token_id) for one in samples]
    # with its end mark and line end
    without = {one.ids.tobytes(): one.ids[ends[0] + 2 :] for one, ends in zip(samples, marks, strict=True)}
    other = replace(bench, samples=samples)
    recorded = other.scored(lambda ids: without[ids.tobytes()], model=bench.model(BASE))
    planted = [replace(one, sampler=values) for one, values in zip(samples, recorded, strict=True)]
    found, _ = await diagnose_run(write_run(tmp_path, planted, base=policy_dir, version="0"), embedded_engine)
    assert found.sentence.startswith("system_message: the engine was asked without the system message"), found


async def test_a_clean_server_has_no_cause_at_any_temperature(server: Server, bench: Bench, tmp_path: Path):
    sampling = SamplingParams(temperature=0.9, max_new_tokens=16)
    samples = []
    async with SGLangClient(base_url=server.url) as client:
        for number, one in enumerate(bench.samples):
            prompt = one.ids[: one.prompt_length].tolist()
            answer = await client.generate(prompt, sampling)
            sampler, ids = np.array(answer.log_probs, dtype=np.float32), np.array([*prompt, *answer.output_ids])
            places = np.arange(len(prompt), len(ids))
            kept = {"rollout_id": f"r{number}", "ids": ids, "places": places, "sampler": sampler}
            samples.append(replace(one, trainer=sampler, **kept))
    run = write_run(tmp_path, samples, base=server.policy, version="0", temperature=0.9)
    found, _ = await diagnose_run(run, server.url)
    assert found.first is None, found.sentence
    assert max(found.parts.values()) < 1e-4


async def test_an_engine_with_other_weights_than_sampled_is_named(
    bench: Bench, policy_dir: Path, embedded_engine: str, tmp_path: Path
):
    run = write_run(tmp_path, bench.samples, base=policy_dir, version="3")
    shutil.copytree(bench.directory / NOW, tmp_path / "weights" / NOW)
    found, version = await diagnose_run(run, embedded_engine)  # it serves the start model
    assert (version, found.gap < 1e-4) == ("3", True)
    assert found.sentence.startswith("engine: the engine's prefill is not what the model's own code computes")


def test_a_run_without_weights_or_rollouts_is_one_sentence(bench: Bench, policy_dir: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="not the directory of a run of the local trainer"):
        asyncio.run(diagnose_run(tmp_path, "http://127.0.0.1:9"))
    run = write_run(tmp_path / "run", bench.samples, base=policy_dir, version="7")
    with pytest.raises(ConfigError, match="kept rollouts of versions 7 and weights of 0; train with"):
        asyncio.run(diagnose_run(run, "http://127.0.0.1:9"))
    (run / "rollouts.jsonl").unlink()
    with pytest.raises(ConfigError, match="no kept rollouts"):
        asyncio.run(diagnose_run(run, "http://127.0.0.1:9"))


def test_the_gap_is_the_mean_over_tokens_that_both_know():
    assert mean_gap([np.array([1.0, np.nan]), np.array([2.0])], [np.array([2.0, 1.0]), np.array([2.5])]) == 0.75
    assert mean_gap([], []) == 0.0
