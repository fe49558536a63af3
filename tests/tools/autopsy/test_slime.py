"""``agl-slime autopsy`` of slime's dumps: planted faults of a real (embedded) engine, and of a trainer, are named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason='forward passes need torch: pip install "agl-slime[local]"')

from agl_slime.cli.autopsy import AutopsyConfig, autopsy, main  # noqa: E402
from agl_slime.errors import ConfigError  # noqa: E402
from agl_slime.report.autopsy import Diagnosis, KeptSample  # noqa: E402
from agl_slime.train.local.counterfactual import Conditions, Counterfactuals  # noqa: E402
from agl_slime.types import Sample, sample_from_fields  # noqa: E402
from tests.harness.slime_dumps import write_dump  # noqa: E402
from tests.tools.autopsy.autopsies import BASE, BEFORE, NOW, Bench, sample_rollouts  # noqa: E402


@dataclass
class Dump:
    """slime's dump of a step, with Samples of a bench and the trainer's log-probs."""

    directory: Path
    bench: Bench

    def diagnosis(
        self,
        samples: Sequence[KeptSample],
        trainer: Sequence[np.ndarray] | None = None,
        *flags: str,
        **config: Any,
    ) -> Diagnosis:
        made = [slime_sample(one) for one in samples]
        columns = None
        if trainer is not None:
            columns = {"log_probs": [on_response(*pair) for pair in zip(samples, trainer, strict=True)]}
        write_dump(self.directory, 7, made, columns)
        given = {"run_dir": self.directory, "step": 7, "model": self.bench.directory / NOW, **config}
        diagnosis, case = asyncio.run(autopsy(AutopsyConfig(**given), slime_flags=flags))
        assert (case.version, len(case.samples)) == ("3", len(samples))
        return diagnosis


def on_response(sample: KeptSample, values: np.ndarray) -> list[float]:
    every = np.zeros(len(sample.ids))
    every[sample.places] = values
    return every[sample.prompt_length :].tolist()


def slime_sample(one: KeptSample) -> Sample:
    mask = np.isin(np.arange(one.prompt_length, len(one.ids)), one.places).astype(int)
    return sample_from_fields(
        index=int(one.rollout_id[1:]),
        group_index=0,
        prompt=[*one.messages[:2]],
        tokens=one.ids.tolist(),
        response_length=len(mask),
        loss_mask=mask.tolist(),
        rollout_log_probs=on_response(one, one.sampler),
        rollout_routed_experts=None if one.experts is None else torch.from_numpy(one.experts.astype(np.int32)),
        weight_versions=["3", "3"],
        status=Sample.Status.COMPLETED,
        reward=1.0,
    )


def test_a_clean_dump_of_slimes_has_no_cause(bench: Bench, routed: Bench, tmp_path: Path):
    for one in (bench, routed):
        found = Dump(tmp_path, one).diagnosis(one.samples, [sample.sampler for sample in one.samples])
        assert (found.causes, found.first) == ((), None)
        assert {name: nats < 1e-4 for name, nats in found.parts.items()} == {"sampler": True, "trainer": True}


def test_faults_in_slimes_dumps_are_named_first(bench: Bench, routed: Bench, tmp_path: Path):
    recorded = bench.scored(lambda ids: np.insert(ids, 0, ids[0]))
    double = [replace(one, sampler=values) for one, values in zip(bench.samples, recorded, strict=True)]
    cooler = sample_rollouts(bench.model(), bench.tokenizer, temperature=0.7)
    late = sample_rollouts(bench.model(BEFORE), bench.tokenizer)
    wrong = [replace(one, experts=np.roll(one.experts, 1, axis=0)) for one in routed.samples]  # type: ignore[arg-type]
    before = {"others": (bench.directory / BEFORE,)}
    for number, (of, samples, fault, config) in enumerate(
        [
            (bench, double, "double_bos", {}),
            (bench, cooler, "temperature", {}),
            (bench, late, "late_weights", before),
            (routed, wrong, "routing", {}),
        ]
    ):
        found = Dump(tmp_path / str(number), of).diagnosis(samples, **config)
        assert found.first is not None, found
        assert (found.first.cause, found.of) == (fault, "sampler"), found.sentence
    clean = Dump(tmp_path / "flags", bench).diagnosis(cooler, None, "--rollout-temperature", "0.7", "--lr", "1e-6")
    assert (clean.gap < 1e-4, clean.causes) == (True, ())


def test_a_fault_of_slimes_trainer_is_named_as_the_trainers(routed: Bench, tmp_path: Path):
    """The engine's log-probs and experts are right, and the trainer replayed those of the token before."""
    experts = [np.r_[one.experts[:1], one.experts[:-1]] for one in routed.samples]  # type: ignore[index]
    wrong = [replace(one, experts=rows) for one, rows in zip(routed.samples, experts, strict=True)]
    what = Counterfactuals(routed.directory / NOW, wrong, conditions=Conditions())
    found = Dump(tmp_path, routed).diagnosis(routed.samples, what.expected)
    assert found.parts["sampler"] < 1e-4 < 0.01 < found.parts["trainer"]
    assert found.sentence.startswith("routing: the trainer used the experts that are recorded for the token before"), (
        found
    )


def test_a_dump_is_measured_on_a_running_engine(
    bench: Bench, policy_dir: Path, embedded_engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    samples = sample_rollouts(bench.model(BASE), bench.tokenizer)
    write_dump(tmp_path, 7, [slime_sample(one) for one in samples])
    main([str(tmp_path), "--step", "7", "--model", str(policy_dir), "--sglang-url", embedded_engine, "--", "--lr", "1"])
    out = capsys.readouterr().out
    assert out.startswith("Sampler and model agree")
    assert "sampled - engine's prefill" in out
    for arguments, text in (
        ([], "give --step, a rollout id, and --model"),
        (["--step", "8", "--model", str(policy_dir)], "has no rollout id 8"),
    ):
        with pytest.raises(ConfigError, match=text):
            main([str(tmp_path), *arguments])
    with pytest.raises(ConfigError, match="are for slime's dumps"):
        main([str(policy_dir), "--step", "7"])
