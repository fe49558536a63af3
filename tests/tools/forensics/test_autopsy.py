"""``agl-slime autopsy`` of an engine or of slime's dumps: planted faults are named first, and a clean one has none."""

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

pytest.importorskip("torch", reason='forward passes need torch: pip install "agl-slime[local]"')

import re

import pytest
import torch
import transformers

from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.engine import Engine
from agl_slime.errors import ConfigError
from agl_slime.report.files import IterationFile
from agl_slime.report.rollouts import describe_tokens
from agl_slime.tools.forensics.autopsy import AutopsyConfig, Case, Measured, autopsy, diagnose, main, with_engine
from agl_slime.tools.forensics.counterfactual import Conditions, Counterfactuals
from agl_slime.tools.forensics.gaps import Diagnosis, KeptSample, explain
from tests.harness.engine_servers import Server
from tests.harness.slime_dumps import write_dump
from tests.tools.forensics import autopsies


def test_a_clean_engine_has_no_cause(bench: autopsies.Bench, routed: autopsies.Bench):
    for diagnosis in (
        bench.diagnosis(bench.sampled()),
        bench.diagnosis(bench.scored()),
        routed.diagnosis(routed.sampled()),
    ):
        assert autopsies.is_clean(diagnosis)
        assert diagnosis.sentence.startswith("Sampler and model agree")


def without_marks(bench: autopsies.Bench, ids: np.ndarray) -> np.ndarray:
    return ids[(ids != bench.tokenizer.eos_token_id) | (np.arange(len(ids)) == len(ids) - 1)]


def without_line_ends(bench: autopsies.Bench, ids: np.ndarray) -> np.ndarray:
    """Messages that follow the end mark at once."""
    marks = np.r_[False, ids[:-1] == bench.tokenizer.eos_token_id]
    return ids[~(marks & (ids == bench.tokenizer.encode("\n")[0]))]


@given(number=st.integers(0, 3), token=st.integers(0, 5), nats=st.floats(1.0, 9.0), sign=st.sampled_from([-1, 1]))
def test_a_planted_token_is_the_worst_one(bench: autopsies.Bench, number: int, token: int, nats: float, sign: int):
    rng = np.random.default_rng(token)
    samples = [replace(sample, pieces=[f"p{n}" for n in range(len(sample.ids))]) for sample in bench.samples]
    recorded = [values.copy() for values in bench.sampled()]
    expected = [values + rng.uniform(-0.3, 0.3, len(values)).astype(np.float32) for values in recorded]
    recorded[number][token] = expected[number][token] + sign * nats
    worst = explain(samples, recorded, expected, ()).worst
    place = samples[number].places[token]
    assert (worst[0].rollout_id, worst[0].place, worst[0].piece) == (f"r{number}", place, f"p{place}")
    assert worst[0].log_probs[0] - worst[0].log_probs[1] == pytest.approx(sign * nats, abs=1e-5)
    gaps = [token.size for token in worst]
    assert gaps == sorted(gaps, reverse=True)


def another_rendering(bench: autopsies.Bench) -> Diagnosis:
    def rendered(sample: KeptSample) -> list[int]:
        text = bench.tokenizer.decode(sample.ids[: sample.prompt_length]).replace("Call lookup", "You may call lookup")
        return bench.tokenizer.encode(text, add_special_tokens=False)

    by_ids = {sample.ids.tobytes(): sample for sample in bench.samples}

    def edit(ids: np.ndarray) -> np.ndarray:
        sample = by_ids[ids.tobytes()]
        return np.concatenate([rendered(sample), ids[sample.prompt_length :]]).astype(np.int64)

    renderings = [("template", "the engine was asked with the prompt as the model's own template writes it", rendered)]
    return bench.diagnosis(bench.scored(edit), renderings=renderings)


def without_earlier_thinking(bench: autopsies.Bench) -> Diagnosis:
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
    recorded = [values[n:] for values, n in zip(recorded, firsts, strict=True)]
    return replace(bench, tokenizer=tokenizer, samples=second_turns).diagnosis(recorded)


def stale_cache(bench: autopsies.Bench) -> list[np.ndarray]:
    """A real prefix cache that an update of the weights does not empty."""
    engine = Engine(bench.model(autopsies.OLD), bench.tokenizer)
    try:
        autopsies.serve(engine, [sample.ids[: sample.prompt_length] for sample in bench.samples], max_new_tokens=1)
        engine._slots.invalidate_cache = lambda: None  # type: ignore[method-assign]
        engine.update_weights(dict(bench.model().state_dict())).result(30)
        starts = [sample.prompt_length - 1 for sample in bench.samples]
        requests = autopsies.serve(engine, [sample.ids for sample in bench.samples], start=starts, max_new_tokens=0)
    finally:
        engine.close()
    assert all(request.cached_tokens > 0 for request in requests)
    return [
        autopsies.prompt_log_probs(request)[sample.places - sample.prompt_length + 1].astype(np.float32)
        for sample, request in zip(bench.samples, requests, strict=True)
    ]


def partial_update(bench: autopsies.Bench) -> list[np.ndarray]:
    mixed, old = bench.model(), bench.model(autopsies.OLD).state_dict()
    mixed.load_state_dict({k: old[k] if ".layers.1." in k else v for k, v in mixed.state_dict().items()})
    return bench.scored(model=mixed)


def linear_rope(bench: autopsies.Bench) -> list[np.ndarray]:
    config = bench.model().config
    config.rope_parameters = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(bench.model().state_dict())
    return bench.scored(model=model)


def in_half_precision(bench: autopsies.Bench, *, head_only: bool) -> Diagnosis:
    model, scores = bench.model(), []
    head = copy.deepcopy(model.lm_head).bfloat16()
    if not head_only:
        model.bfloat16()
    with torch.no_grad():
        for sample in bench.samples:
            hidden = model.base_model(torch.from_numpy(sample.ids)[None]).last_hidden_state[0, sample.places - 1]
            targets = torch.from_numpy(sample.ids[sample.places])[:, None]
            scores.append(head(hidden.bfloat16()).float().log_softmax(-1).gather(-1, targets)[:, 0].numpy())
    return bench.diagnosis(scores)


def padded_vocabulary(bench: autopsies.Bench) -> Diagnosis:
    """460 ids padded to 512 by rows of zeros, as Megatron's."""
    model, scores = bench.model(), []
    with torch.no_grad():
        for sample in bench.samples:
            logits = model(torch.from_numpy(sample.ids)[None]).logits[0, sample.places - 1]
            log_probs = torch.nn.functional.pad(logits, (0, 52)).log_softmax(-1)
            scores.append(log_probs.gather(-1, torch.from_numpy(sample.ids[sample.places])[:, None])[:, 0].numpy())
    return bench.diagnosis(scores)


Fault = Callable[[autopsies.Bench], Diagnosis]


def of_ids(edit: Callable[[autopsies.Bench, np.ndarray], np.ndarray]) -> Fault:
    return lambda bench: bench.diagnosis(bench.scored(lambda ids: edit(bench, ids)))


def of_weights(scored: Callable[[autopsies.Bench], list[np.ndarray]]) -> Fault:
    def diagnosis(bench: autopsies.Bench) -> Diagnosis:
        result = bench.diagnosis(scored(bench), without_adapter=bench.directory / autopsies.BASE)
        assert result.first is not None
        assert result.first.unexplained < 0.1 * result.gap
        return result

    return diagnosis


def of_sampling(sampling: dict[str, Any], **conditions: Any) -> Fault:
    """Log-probs by a convention of the engine or of the trainer alone."""

    def diagnosis(bench: autopsies.Bench) -> Diagnosis:
        skewed = replace(bench, samples=autopsies.sample_rollouts(bench.model(), bench.tokenizer, **sampling))
        return skewed.diagnosis(skewed.sampled(), **conditions)

    return diagnosis


FAULTS: dict[str, Fault] = {
    "end_mark": of_ids(without_marks),
    "template": another_rendering,
    "padded_vocabulary": padded_vocabulary,
    "stale_cache": of_weights(stale_cache),
    "nucleus": of_sampling({"top_p": 0.8, "nucleus": True}),
    "shift": lambda bench: bench.diagnosis([np.roll(values, 1) for values in bench.sampled()]),
}
MORE_FAULTS: dict[str, Fault] = {
    "double_bos": of_ids(lambda bench, ids: np.insert(ids, 0, ids[0])),
    "missing_bos": of_ids(lambda bench, ids: ids[1:]),
    "newline": of_ids(without_line_ends),
    "token_removed": of_ids(lambda bench, ids: np.delete(ids, 9)),
    "token_inserted": of_ids(lambda bench, ids: np.insert(ids, 3, bench.tokenizer.encode("\n")[0])),
    "thinking": without_earlier_thinking,
    "late_weights": of_weights(lambda bench: bench.scored(model=bench.model(autopsies.OLD))),
    "adapter": of_weights(lambda bench: bench.scored(model=bench.model(autopsies.BASE))),
    "partial_weights": of_weights(partial_update),
    "rope": of_weights(linear_rope),
    "bf16_head": lambda bench: in_half_precision(bench, head_only=True),
    "bf16": lambda bench: in_half_precision(bench, head_only=False),
    "temperature of the engine": of_sampling({"temperature": 0.7}),
    "temperature of the trainer": of_sampling({}, temperature=0.7),
    "nucleus of the trainer": of_sampling({}, top_p=0.8),
}


@pytest.mark.parametrize("fault", [*FAULTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_FAULTS)])
def test_a_planted_fault_is_named_first(bench: autopsies.Bench, fault: str):
    diagnosis = (FAULTS | MORE_FAULTS)[fault](bench)
    assert autopsies.cause(diagnosis) == fault.partition(" ")[0], diagnosis.sentence


def test_faults_that_only_a_measurement_finds_are_named_first(bench: autopsies.Bench):
    right, stale = bench.scored(), stale_cache(bench)
    wrong = [replace(sample, sampler=values) for sample, values in zip(bench.samples, stale, strict=True)]
    about: dict[str, Any] = {"version": "3", "weights": bench.directory / autopsies.NEW, "conditions": Conditions()}
    cases = [Case(samples=samples, **about) for samples in (bench.samples, wrong)]
    diagnoses = [diagnose(case) for case in cases]
    for fault, number, (fresh, cached, batch) in (
        ("cache", 0, (right, stale, stale)),
        ("batch", 0, (right, right, stale)),
        ("engine", 0, (stale, stale, stale)),
        ("decode", 1, (right, right, right)),
    ):
        measured = Measured(fresh=fresh, cached=cached, batch=batch, versions=frozenset("3"))
        diagnosis = with_engine(diagnoses[number], measured, cases[number])
        assert autopsies.cause(diagnosis) == fault, diagnosis.sentence


REPLAYS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the experts that are recorded for the token before": lambda experts: np.r_[experts[1:], experts[-1:]],
    "the experts that are recorded for the layer before": lambda experts: np.roll(experts, -1, axis=1),
    "the router's own choice and not the recorded experts": lambda experts: experts[::-1],
}


def test_a_wrong_replay_of_the_router_is_named_first(routed: autopsies.Bench):
    assert all(sample.experts is not None and len(sample.experts) == len(sample.ids) - 1 for sample in routed.samples)
    for fault, change in REPLAYS.items():
        wrong = [replace(sample, experts=change(sample.experts)) for sample in routed.samples]
        diagnosis = replace(routed, samples=wrong).diagnosis(routed.sampled())
        assert diagnosis.sentence.startswith(f"routing: the engine used {fault} (100 %"), diagnosis
        assert diagnosis.first is not None
        assert diagnosis.first.unexplained < 1e-4 < 0.01 < diagnosis.gap


def test_an_unknown_cause_has_no_name(bench: autopsies.Bench):
    for nats, end in ((3.0, "half of it."), (0.02, "; rounding to bfloat16 alone gives up to 0.05.")):
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
        tokens = describe_tokens(autopsies.slime_sample(sample, version), lambda ids: [], scores=scores)  # type: ignore[arg-type]
        lines.append({"rollout_id": sample.rollout_id, "messages": [*sample.messages], "samples": [tokens]})
    file.append(1, lines)
    file.close()
    return directory


async def diagnose_run(run: Path, url: str) -> tuple[Diagnosis, str]:
    diagnosis, case = await autopsy(AutopsyConfig(run_dir=run, sglang_url=url, samples=4))
    return diagnosis, case.version


@pytest.mark.slow
async def test_a_run_is_diagnosed_from_its_files_and_its_engine(bench, policy_dir, embedded_engine, tmp_path):
    """Without the system message, its end mark and line end; and with later weights than the engine's."""
    samples, mark = (
        autopsies.sample_rollouts(bench.model(autopsies.BASE), bench.tokenizer),
        bench.tokenizer.eos_token_id,
    )
    bare = replace(bench, samples=samples).scored(
        lambda ids: ids[np.flatnonzero(ids == mark)[0] + 2 :], model=bench.model(autopsies.BASE)
    )
    planted = [replace(sample, sampler=values) for sample, values in zip(samples, bare, strict=True)]
    run = write_run(tmp_path / "bare", planted, base=policy_dir, version="0")
    diagnosis, _ = await diagnose_run(run, embedded_engine)
    assert diagnosis.sentence.startswith("system_message: the engine was asked without the system message"), diagnosis
    assert diagnosis.differences["engine"] < 1e-4 < diagnosis.differences["decode"]

    run = write_run(tmp_path / "late", bench.samples, base=policy_dir, version="3")
    shutil.copytree(bench.directory / autopsies.NEW, run / "weights" / autopsies.NEW)
    diagnosis, version = await diagnose_run(run, embedded_engine)  # it serves the start model
    assert (version, diagnosis.gap < 1e-4) == ("3", True)
    assert diagnosis.sentence.startswith("engine: the engine's prefill is not what the model's own code computes")


async def test_a_clean_server_has_no_cause_at_any_temperature(server: Server, bench: autopsies.Bench, tmp_path: Path):
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
    diagnosis, version = await diagnose_run(run, server.url)
    assert version == "0"
    assert diagnosis.first is None, diagnosis.sentence
    assert max(diagnosis.differences.values()) < 1e-4
    assert {"sampler", "cache", "batch", "engine"} <= {*diagnosis.differences}


def test_a_run_without_weights_or_rollouts_is_one_sentence(bench: autopsies.Bench, policy_dir: Path, tmp_path: Path):
    def refused(directory: Path, sentence: str) -> None:
        with pytest.raises(ConfigError, match=sentence):
            asyncio.run(diagnose_run(directory, "http://127.0.0.1:9"))

    refused(tmp_path, "not the directory of a run of the local trainer")
    run = write_run(tmp_path / "run", bench.samples, base=policy_dir, version="7")
    refused(run, "kept rollouts of versions 7 and weights of 0; train with")
    (run / "rollouts.jsonl").unlink()
    refused(run, "no kept rollouts")


def diagnosis_of_dump(
    directory: Path,
    bench: autopsies.Bench,
    samples: Sequence[KeptSample],
    *flags: str,
    trainer: Sequence[np.ndarray] | None = None,
    **config: Any,
) -> Diagnosis:
    """Of slime's dump of a step, with the bench's Samples and the trainer's log-probs."""
    columns = None
    if trainer is not None:
        columns = {"log_probs": [autopsies.on_response(*pair) for pair in zip(samples, trainer, strict=True)]}
    write_dump(directory, 7, [autopsies.slime_sample(sample) for sample in samples], columns)
    settings = AutopsyConfig(**{"run_dir": directory, "step": 7, "model": bench.directory / autopsies.NEW, **config})
    diagnosis, case = asyncio.run(autopsy(settings, slime_flags=flags))
    assert (case.version, len(case.samples)) == ("3", len(samples))
    return diagnosis


def test_a_clean_dump_of_slimes_has_no_cause(bench: autopsies.Bench, routed: autopsies.Bench, tmp_path: Path):
    for number, clean in enumerate((bench, routed)):
        diagnosis = diagnosis_of_dump(tmp_path / str(number), clean, clean.samples, trainer=clean.sampled())
        assert autopsies.is_clean(diagnosis)
        assert {name: nats < 1e-4 for name, nats in diagnosis.differences.items()} == {"sampler": True, "trainer": True}


def test_faults_in_slimes_dumps_are_named_first(bench, tmp_path, capsys):
    cooler = autopsies.sample_rollouts(bench.model(), bench.tokenizer, temperature=0.7)
    late = autopsies.sample_rollouts(bench.model(autopsies.OLD), bench.tokenizer)
    for samples, fault, config in (
        (cooler, "temperature", {}),
        (late, "late_weights", {"others": (bench.directory / autopsies.OLD,)}),
    ):
        diagnosis = diagnosis_of_dump(tmp_path / fault, bench, samples, **config)
        assert (autopsies.cause(diagnosis), diagnosis.subject) == (fault, "sampler"), diagnosis.sentence
    main([str(tmp_path / "temperature"), "--step", "7", "--model", str(bench.directory / autopsies.NEW)])
    assert re.search(r"left after it:\n +[\d.e-]+ +[\d.e-]+  temperature: the log-probs are", capsys.readouterr().out)
    flags = ["--rollout-temperature", "0.7", "--lr", "1e-6"]
    assert autopsies.is_clean(diagnosis_of_dump(tmp_path / "flags", bench, cooler, *flags))


def test_a_fault_of_slimes_trainer_is_named_as_the_trainers(routed: autopsies.Bench, tmp_path: Path):
    """The engine's log-probs and experts are right, and the trainer replayed the experts of the previous token."""
    experts = [np.r_[sample.experts[:1], sample.experts[:-1]] for sample in routed.samples]  # type: ignore[index]
    wrong = [replace(sample, experts=rows) for sample, rows in zip(routed.samples, experts, strict=True)]
    passes = Counterfactuals(routed.directory / autopsies.NEW, wrong, conditions=Conditions())
    diagnosis = diagnosis_of_dump(tmp_path, routed, routed.samples, trainer=passes.expected)
    assert diagnosis.differences["sampler"] < 1e-4 < 0.01 < diagnosis.differences["trainer"]
    sentence = "routing: the trainer used the experts that are recorded for the token before"
    assert diagnosis.sentence.startswith(sentence), diagnosis


def test_a_dump_is_measured_on_a_running_engine(bench, policy_dir, embedded_engine, tmp_path, capsys):
    samples = autopsies.sample_rollouts(bench.model(autopsies.BASE), bench.tokenizer)
    write_dump(tmp_path, 7, [autopsies.slime_sample(sample) for sample in samples])
    main([str(tmp_path), "--step", "7", "--model", str(policy_dir), "--sglang-url", embedded_engine, "--", "--lr", "1"])
    output = capsys.readouterr().out
    assert output.startswith("Sampler and model agree")
    assert "sampled - engine's prefill" in output
    for directory, arguments, sentence in (
        (tmp_path, [], "give --step, a rollout id, and --model"),
        (tmp_path, ["--step", "8", "--model", str(policy_dir)], "has no rollout id 8"),
        (policy_dir, ["--step", "7"], "are for slime's dumps"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            main([str(directory), *arguments])
