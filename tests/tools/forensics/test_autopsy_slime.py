"""``agl-slime autopsy`` of slime's dumps: planted faults of a real (embedded) engine, and of a trainer, are named."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason='forward passes need torch: pip install "agl-slime[local]"')

from agl_slime.errors import ConfigError
from agl_slime.tools.forensics.autopsy import AutopsyConfig, autopsy, main
from agl_slime.tools.forensics.counterfactual import Conditions, Counterfactuals
from agl_slime.tools.forensics.gaps import Diagnosis, KeptSample
from tests.harness.slime_dumps import write_dump
from tests.tools.forensics.autopsies import (
    BASE,
    NEW,
    OLD,
    Bench,
    cause,
    is_clean,
    on_response,
    sample_rollouts,
    slime_sample,
)


def diagnosis_of_dump(
    directory: Path,
    bench: Bench,
    samples: Sequence[KeptSample],
    *flags: str,
    trainer: Sequence[np.ndarray] | None = None,
    **config: Any,
) -> Diagnosis:
    """Of slime's dump of a step, with the bench's Samples and the trainer's log-probs."""
    columns = None
    if trainer is not None:
        columns = {"log_probs": [on_response(*pair) for pair in zip(samples, trainer, strict=True)]}
    write_dump(directory, 7, [slime_sample(sample) for sample in samples], columns)
    settings = AutopsyConfig(**{"run_dir": directory, "step": 7, "model": bench.directory / NEW, **config})
    diagnosis, case = asyncio.run(autopsy(settings, slime_flags=flags))
    assert (case.version, len(case.samples)) == ("3", len(samples))
    return diagnosis


def test_a_clean_dump_of_slimes_has_no_cause(bench: Bench, routed: Bench, tmp_path: Path):
    for number, clean in enumerate((bench, routed)):
        diagnosis = diagnosis_of_dump(tmp_path / str(number), clean, clean.samples, trainer=clean.sampled())
        assert is_clean(diagnosis)
        assert {name: nats < 1e-4 for name, nats in diagnosis.differences.items()} == {"sampler": True, "trainer": True}


def test_faults_in_slimes_dumps_are_named_first(bench, tmp_path, capsys):
    cooler = sample_rollouts(bench.model(), bench.tokenizer, temperature=0.7)
    late = sample_rollouts(bench.model(OLD), bench.tokenizer)
    for samples, fault, config in (
        (cooler, "temperature", {}),
        (late, "late_weights", {"others": (bench.directory / OLD,)}),
    ):
        diagnosis = diagnosis_of_dump(tmp_path / fault, bench, samples, **config)
        assert (cause(diagnosis), diagnosis.subject) == (fault, "sampler"), diagnosis.sentence
    main([str(tmp_path / "temperature"), "--step", "7", "--model", str(bench.directory / NEW)])
    assert re.search(r"left after it:\n +[\d.e-]+ +[\d.e-]+  temperature: the log-probs are", capsys.readouterr().out)
    flags = ["--rollout-temperature", "0.7", "--lr", "1e-6"]
    assert is_clean(diagnosis_of_dump(tmp_path / "flags", bench, cooler, *flags))


def test_a_fault_of_slimes_trainer_is_named_as_the_trainers(routed: Bench, tmp_path: Path):
    """The engine's log-probs and experts are right, and the trainer replayed the experts of the previous token."""
    experts = [np.r_[sample.experts[:1], sample.experts[:-1]] for sample in routed.samples]  # type: ignore[index]
    wrong = [replace(sample, experts=rows) for sample, rows in zip(routed.samples, experts, strict=True)]
    passes = Counterfactuals(routed.directory / NEW, wrong, conditions=Conditions())
    diagnosis = diagnosis_of_dump(tmp_path, routed, routed.samples, trainer=passes.expected)
    assert diagnosis.differences["sampler"] < 1e-4 < 0.01 < diagnosis.differences["trainer"]
    sentence = "routing: the trainer used the experts that are recorded for the token before"
    assert diagnosis.sentence.startswith(sentence), diagnosis


def test_a_dump_is_measured_on_a_running_engine(bench, policy_dir, embedded_engine, tmp_path, capsys):
    samples = sample_rollouts(bench.model(BASE), bench.tokenizer)
    write_dump(tmp_path, 7, [slime_sample(sample) for sample in samples])
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
