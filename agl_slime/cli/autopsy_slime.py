"""``agl-slime autopsy`` of slime's dumps: Samples of a step, with the engine's log-probs and the trainer's."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

from agl_slime.cli.autopsy import AutopsyConfig, Case
from agl_slime.errors import ConfigError
from agl_slime.report.autopsy import KeptSample, by_version
from agl_slime.report.rollouts import MOST_SAMPLES, mask_of
from agl_slime.report.slime_runs import DumpedStep, SlimeRun
from agl_slime.train.slime.formulas import StepFlags
from agl_slime.types import Sample

_Place = tuple[str, int]  # a rollout, and the number of its Sample


def dumped_case(config: AutopsyConfig, slime_flags: Sequence[str]) -> Case:
    """``config.samples`` random Samples of a dumped step, of the weight version that most are of. Raises
    ``ConfigError`` for files that lack them."""
    if config.step is None or config.model is None:
        raise ConfigError(f"{config.run_dir} has slime's dumps: give --step, a rollout id, and --model, its checkpoint")
    flags, run = StepFlags.parse(slime_flags), SlimeRun(config.run_dir, config.model)
    step = run.step(config.step)
    by: dict[str, dict[_Place, Sample]] = defaultdict(dict)
    for place, sample in _scored(step):
        versions = {str(version) for version, *_ in sample.metadata.get("weight_spans", ())} or {
            *sample.weight_versions
        }
        if len(versions) <= 1:
            by[next(iter(versions), "")][place] = sample
    if not by:
        why = "no Sample of one weight version has rollout_log_probs and tokens to train on"
        raise ConfigError(f"--step {config.step}: {why}")
    version = max(by, key=lambda version: len(by[version]))
    places = random.Random(0).sample([*by[version]], min(config.samples, len(by[version])))
    return Case(
        samples=[*_kept(run, step, {place: by[version][place] for place in places}, version)],
        version=version,
        weights=config.model,
        sampling={
            "temperature": flags.rollout_temperature,
            "top_p": flags.rollout_top_p,
            "top_k": int(flags.rollout_top_k),
        },
        others={f"the weights in {path}": path for path in config.others},
        recomputed=True,
    )


def _scored(step: DumpedStep) -> Iterator[tuple[_Place, Sample]]:
    """The Samples with sampled tokens."""
    for group in step.groups:
        for member in group.members:
            for number, sample in enumerate(member.samples[:MOST_SAMPLES]):
                if sample.rollout_log_probs is not None and mask_of(sample).any():
                    yield (member.rollout_id, number), sample


def _kept(run: SlimeRun, step: DumpedStep, samples: dict[_Place, Sample], version: str) -> Iterator[KeptSample]:
    lines = run.describe(step, [rollout_id for rollout_id, _ in samples])
    for (rollout_id, number), sample in samples.items():
        line = lines[rollout_id]
        described = {**line["samples"][number], "weight_versions": [[version, 0, sample.response_length]]}
        yield from by_version(
            described,
            rollout_id=rollout_id,
            iteration=step.number,
            messages=line["messages"],
            experts=sample.rollout_routed_experts,
            images=sample.multimodal_train_inputs,
        )
