"""``agl-slime autopsy``: planted faults of a real (embedded) engine are named first, and a clean one has none."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from agl_slime.report.autopsy import Diagnosis, KeptSample, explain  # noqa: E402
from agl_slime.report.files import IterationFile  # noqa: E402
from agl_slime.report.rollouts import describe_tokens  # noqa: E402
from tests.harness.engine_servers import Server  # noqa: E402
from tests.tools.autopsy.autopsies import (  # noqa: E402
    BASE,
    NEW,
    OLD,
    Bench,
    cause,
    is_clean,
    prompt_log_probs,
    sample_rollouts,
    serve,
    slime_sample,
)


def test_a_clean_engine_has_no_cause(bench: Bench, routed: Bench):
    for diagnosis in (
        bench.diagnosis(bench.sampled()),
        bench.diagnosis(bench.scored()),
        routed.diagnosis(routed.sampled()),
    ):
        assert is_clean(diagnosis)
        assert diagnosis.sentence.startswith("Sampler and model agree")


def without_marks(bench: Bench, ids: np.ndarray) -> np.ndarray:
    return ids[(ids != bench.tokenizer.eos_token_id) | (np.arange(len(ids)) == len(ids) - 1)]


def without_line_ends(bench: Bench, ids: np.ndarray) -> np.ndarray:
    """Messages that follow the end mark at once."""
    marks = np.r_[False, ids[:-1] == bench.tokenizer.eos_token_id]
    return ids[~(marks & (ids == bench.tokenizer.encode("\n")[0]))]


TOKENS: dict[str, Callable[[Bench, np.ndarray], np.ndarray]] = {
    "double_bos": lambda bench, ids: np.insert(ids, 0, ids[0]),
    "missing_bos": lambda bench, ids: ids[1:],
    "end_mark": without_marks,
    "newline": without_line_ends,
    "token_removed": lambda bench, ids: np.delete(ids, 9),
    "token_inserted": lambda bench, ids: np.insert(ids, 3, bench.tokenizer.encode("\n")[0]),
}


@pytest.mark.parametrize("fault", TOKENS)
def test_a_fault_of_the_engines_prompt_is_named_first(bench: Bench, fault: str):
    recorded = bench.scored(lambda ids: TOKENS[fault](bench, ids))
    diagnosis = bench.diagnosis(recorded)
    assert cause(diagnosis) == fault, diagnosis.sentence
    gaps = [np.abs(a - b) for a, b in zip(recorded, bench.scored(), strict=True)]
    number = int(np.argmax([gap.max() for gap in gaps]))
    place = int(bench.samples[number].places[gaps[number].argmax()])
    assert (diagnosis.worst[0].rollout_id, diagnosis.worst[0].place) == (f"r{number}", place)


@given(number=st.integers(0, 3), token=st.integers(0, 5), nats=st.floats(1.0, 9.0), sign=st.sampled_from([-1, 1]))
def test_a_planted_token_is_the_worst_one(bench: Bench, number: int, token: int, nats: float, sign: int):
    rng = np.random.default_rng(token)
    samples = [replace(sample, pieces=[f"p{n}" for n in range(len(sample.ids))]) for sample in bench.samples]
    recorded = [values.copy() for values in bench.sampled()]
    expected = [values + rng.uniform(-0.3, 0.3, len(values)).astype(np.float32) for values in recorded]
    recorded[number][token] = expected[number][token] + sign * nats
    worst = explain(samples, recorded, expected, ()).worst
    place = samples[number].places[token]
    assert (worst[0].rollout_id, worst[0].place, worst[0].piece) == (f"r{number}", place, f"p{place}")
    assert worst[0].recorded - worst[0].expected == pytest.approx(sign * nats, abs=1e-5)
    gaps = [abs(line.recorded - line.expected) for line in worst]
    assert gaps == sorted(gaps, reverse=True)


def test_the_prompt_in_another_rendering_is_named_first(bench: Bench):
    def rendered(sample: KeptSample) -> list[int]:
        text = bench.tokenizer.decode(sample.ids[: sample.prompt_length]).replace("Call lookup", "You may call lookup")
        return bench.tokenizer.encode(text, add_special_tokens=False)

    by_ids = {sample.ids.tobytes(): sample for sample in bench.samples}

    def edit(ids: np.ndarray) -> np.ndarray:
        sample = by_ids[ids.tobytes()]
        return np.concatenate([rendered(sample), ids[sample.prompt_length :]]).astype(np.int64)

    renderings = [("template", "the engine was asked with the prompt as the model's own template writes it", rendered)]
    assert cause(bench.diagnosis(bench.scored(edit), renderings=renderings)) == "template"


def test_the_thinking_of_an_earlier_turn_that_was_dropped_is_named_first(bench: Bench):
    tokenizer = copy.deepcopy(bench.tokenizer)
    begin, end = 451, 450  # the tiny vocabulary has no marks of thinking: two tokens stand for them
    tokenizer.get_vocab = lambda: {"<think>": begin, "</think>": end}
    think = [begin, *tokenizer.encode(" the lookup", add_special_tokens=False), end]
    thoughtful = [
        replace(sample, ids=np.insert(sample.ids, sample.prompt_length, think), places=sample.places + len(think))
        for sample in bench.samples
    ]

    def dropped(ids: np.ndarray) -> np.ndarray:
        start = ids.tolist().index(begin)
        return np.delete(ids, range(start, start + len(think)))

    recorded = replace(bench, tokenizer=tokenizer, samples=thoughtful).scored(dropped)
    # only second turns: the first was sampled with its thinking
    firsts = [int(np.flatnonzero(np.diff(sample.places) > 1)[-1]) + 1 for sample in thoughtful]
    second_turns = [replace(sample, places=sample.places[n:]) for sample, n in zip(thoughtful, firsts, strict=True)]
    diagnosis = replace(bench, tokenizer=tokenizer, samples=second_turns).diagnosis(
        [values[n:] for values, n in zip(recorded, firsts, strict=True)]
    )
    assert cause(diagnosis) == "thinking", diagnosis.sentence


def stale_cache(bench: Bench) -> list[np.ndarray]:
    """A real prefix cache that an update of the weights does not empty."""
    engine = Engine(bench.model(OLD), bench.tokenizer)
    try:
        serve(engine, [sample.ids[: sample.prompt_length] for sample in bench.samples], max_new_tokens=1)
        engine._slots.stale = lambda: None  # type: ignore[method-assign]
        engine.update_weights(dict(bench.model().state_dict())).result(30)
        starts = [sample.prompt_length - 1 for sample in bench.samples]
        requests = serve(engine, [sample.ids for sample in bench.samples], start=starts, max_new_tokens=0)
    finally:
        engine.close()
    assert all(request.cached_tokens > 0 for request in requests)
    return [
        prompt_log_probs(request)[sample.places - sample.prompt_length + 1].astype(np.float32)
        for sample, request in zip(bench.samples, requests, strict=True)
    ]


def partial_update(bench: Bench) -> list[np.ndarray]:
    mixed, old = bench.model(), bench.model(OLD).state_dict()
    mixed.load_state_dict({k: old[k] if ".layers.1." in k else v for k, v in mixed.state_dict().items()})
    return bench.scored(model=mixed)


def linear_rope(bench: Bench) -> list[np.ndarray]:
    config = bench.model().config
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(bench.model().state_dict())
    return bench.scored(model=model)


WEIGHTS: dict[str, Callable[[Bench], list[np.ndarray]]] = {
    "late_weights": lambda bench: bench.scored(model=bench.model(OLD)),
    "adapter": lambda bench: bench.scored(model=bench.model(BASE)),
    "partial_weights": partial_update,
    "stale_cache": stale_cache,
    "rope": linear_rope,
}


@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_fault_of_the_engines_weights_is_named_first(bench: Bench, fault: str):
    diagnosis = bench.diagnosis(WEIGHTS[fault](bench), without_adapter=bench.directory / BASE)
    assert cause(diagnosis) == fault, diagnosis.sentence
    assert diagnosis.first is not None
    assert diagnosis.first.left < 0.1 * diagnosis.gap


def test_faults_that_only_a_measurement_finds_are_named_first(bench: Bench):
    right, stale = bench.scored(), stale_cache(bench)
    wrong = [replace(sample, sampler=values) for sample, values in zip(bench.samples, stale, strict=True)]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    for fault, samples, (fresh, cached, batch) in (
        ("cache", bench.samples, (right, stale, stale)),
        ("batch", bench.samples, (right, right, stale)),
        ("engine", bench.samples, (stale, stale, stale)),
        ("decode", wrong, (right, right, right)),
    ):
        case = Case(samples=samples, version="3", weights=bench.directory / NEW, sampling=sampling)
        measured = Measured(fresh=fresh, cached=cached, batch=batch, versions=frozenset("3"))
        diagnosis = with_engine(diagnose(case), measured, case)
        assert cause(diagnosis) == fault, diagnosis.sentence


def test_half_precision_is_told_from_a_half_precision_head(bench: Bench):
    def chosen(logits: Any, sample: KeptSample) -> np.ndarray:
        targets = torch.from_numpy(sample.ids[sample.places])[:, None]
        return logits.float().log_softmax(-1).gather(-1, targets)[:, 0].numpy()

    model, whole, head = bench.model(), [], []
    with torch.no_grad():
        for sample in bench.samples:
            hidden = model.base_model(torch.from_numpy(sample.ids)[None]).last_hidden_state[0, sample.places - 1]
            head.append(chosen(torch.nn.functional.linear(hidden.bfloat16(), model.lm_head.weight.bfloat16()), sample))
        model.bfloat16()
        for sample in bench.samples:
            whole.append(chosen(model(torch.from_numpy(sample.ids)[None]).logits[0, sample.places - 1], sample))
    assert (cause(bench.diagnosis(head)), cause(bench.diagnosis(whole))) == ("bf16_head", "bf16")


REPLAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the experts that are recorded for the token before": lambda experts: np.r_[experts[1:], experts[-1:]],
    "the experts that are recorded for the next token": lambda experts: np.r_[experts[:1] * 0, experts[:-1]],
    "the experts that are recorded for the layer before": lambda experts: np.roll(experts, -1, axis=1),
    "the experts that are recorded for the next layer": lambda experts: np.roll(experts, 1, axis=1),
    "the router's own choice and not the recorded experts": lambda experts: experts[::-1],
}


@pytest.mark.parametrize("fault", REPLAYS)
def test_a_wrong_replay_of_the_router_is_named_first(routed: Bench, fault: str):
    assert all(sample.experts is not None and len(sample.experts) == len(sample.ids) - 1 for sample in routed.samples)
    wrong = [replace(sample, experts=REPLAYS[fault](sample.experts)) for sample in routed.samples]
    diagnosis = replace(routed, samples=wrong).diagnosis(routed.sampled())
    assert diagnosis.sentence.startswith(f"routing: the engine used {fault} (100 %"), diagnosis
    assert diagnosis.first is not None
    assert diagnosis.first.left < 1e-4 < 0.01 < diagnosis.gap


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
    skewed = replace(bench, samples=sample_rollouts(bench.model(), bench.tokenizer, **sampling))
    diagnosis = skewed.diagnosis(skewed.sampled(), **conditions)
    assert cause(diagnosis) == fault, diagnosis.sentence


def test_late_weights_of_experts_and_shifted_log_probs_are_named_first(bench: Bench, routed: Bench):
    late = replace(routed, samples=sample_rollouts(routed.model(OLD), routed.tokenizer))
    diagnosis = late.diagnosis(late.sampled())
    assert cause(diagnosis) == "late_weights", diagnosis.sentence
    assert diagnosis.first is not None
    assert diagnosis.first.left < 1e-4
    assert cause(bench.diagnosis([np.roll(values, 1) for values in bench.sampled()])) == "shift"


@pytest.mark.parametrize(
    ("nats", "end"), [(3.0, "half of it."), (0.02, "; rounding to bfloat16 alone gives up to 0.05.")]
)
def test_an_unknown_cause_has_no_name(bench: Bench, nats: float, end: str):
    rng = np.random.default_rng(0)
    recorded = [values - rng.exponential(nats, len(values)).astype(np.float32) for values in bench.sampled()]
    diagnosis = bench.diagnosis(recorded)
    assert diagnosis.first is None
    assert "no known cause" in diagnosis.sentence
    assert diagnosis.sentence.endswith(end)


def write_run(directory: Path, samples: Sequence[KeptSample], *, base: Path, version: str, **settings: Any) -> Path:
    """The files of a run that an autopsy reads."""
    directory.mkdir(exist_ok=True)
    config = {"trainer": "local", "temperature": 1.0, "top_p": 1.0, "top_k": -1, "local": {"n_minibatches": 4}}
    (directory / "config.json").write_text(json.dumps({**config, **settings}))
    (directory / "start.json").write_text(json.dumps({"model": str(base)}))
    file = IterationFile(directory / "rollouts.jsonl")
    lines = []
    for sample in samples:
        scores = (sample.sampler, sample.sampler)
        tokens = describe_tokens(slime_sample(sample, version), lambda ids: [], scores=scores)  # type: ignore[arg-type]
        lines.append({"rollout_id": sample.rollout_id, "messages": [*sample.messages], "samples": [tokens]})
    file.append(1, lines)
    file.close()
    return directory


async def diagnose_run(run: Path, url: str) -> tuple[Diagnosis, str]:
    diagnosis, case = await autopsy(AutopsyConfig(run_dir=run, sglang_url=url, samples=4))
    return diagnosis, case.version


async def test_a_run_is_diagnosed_from_its_files_and_its_engine(
    bench: Bench, policy_dir: Path, embedded_engine: str, tmp_path: Path
):
    """Clean; with a second first token; without the system message; with later weights than the engine's."""
    samples = sample_rollouts(bench.model(BASE), bench.tokenizer)
    clean, version = await diagnose_run(
        write_run(tmp_path / "clean", samples, base=policy_dir, version="0"), embedded_engine
    )
    assert version == "0"
    assert clean.first is None, clean.sentence
    assert max(clean.parts.values()) < 1e-4
    assert {"sampler", "cache", "batch", "engine", "decode"} <= {*clean.parts}

    mark = bench.tokenizer.eos_token_id
    edits = {
        "double_bos: the engine was asked with a second first token": lambda ids: np.insert(ids, 0, ids[0]),
        # with its end mark and line end
        "system_message: the engine was asked without the system message": lambda ids: ids[
            np.flatnonzero(ids == mark)[0] + 2 :
        ],
    }
    for sentence, edit in edits.items():
        recorded = replace(bench, samples=samples).scored(edit, model=bench.model(BASE))
        planted = [replace(sample, sampler=values) for sample, values in zip(samples, recorded, strict=True)]
        run = write_run(tmp_path / sentence[:6], planted, base=policy_dir, version="0")
        diagnosis, _ = await diagnose_run(run, embedded_engine)
        assert diagnosis.sentence.startswith(sentence), diagnosis
        assert diagnosis.parts["engine"] < 1e-4 < diagnosis.parts["decode"]

    run = write_run(tmp_path / "late", bench.samples, base=policy_dir, version="3")
    shutil.copytree(bench.directory / NEW, run / "weights" / NEW)
    diagnosis, version = await diagnose_run(run, embedded_engine)  # it serves the start model
    assert (version, diagnosis.gap < 1e-4) == ("3", True)
    assert diagnosis.sentence.startswith("engine: the engine's prefill is not what the model's own code computes")


async def test_a_clean_server_has_no_cause_at_any_temperature(server: Server, bench: Bench, tmp_path: Path):
    sampling = SamplingParams(temperature=0.9, max_new_tokens=16)
    samples = []
    async with SGLangClient(base_url=server.url) as client:
        for sample in bench.samples:
            prompt = sample.ids[: sample.prompt_length].tolist()
            answer = await client.generate(prompt, sampling)
            log_probs, ids = np.array(answer.log_probs, dtype=np.float32), np.array([*prompt, *answer.output_ids])
            places = np.arange(len(prompt), len(ids))
            samples.append(replace(sample, ids=ids, places=places, sampler=log_probs, trainer=log_probs))
    run = write_run(tmp_path, samples, base=server.policy, version="0", temperature=0.9)
    diagnosis, _ = await diagnose_run(run, server.url)
    assert diagnosis.first is None, diagnosis.sentence
    assert max(diagnosis.parts.values()) < 1e-4


def test_a_run_without_weights_or_rollouts_is_one_sentence(bench: Bench, policy_dir: Path, tmp_path: Path):
    def refused(directory: Path, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            asyncio.run(diagnose_run(directory, "http://127.0.0.1:9"))

    refused(tmp_path, "not the directory of a run of the local trainer")
    run = write_run(tmp_path / "run", bench.samples, base=policy_dir, version="7")
    refused(run, "kept rollouts of versions 7 and weights of 0; train with")
    (run / "rollouts.jsonl").unlink()
    refused(run, "no kept rollouts")
