"""``agl-slime autopsy``: why the sampler's log-probs of kept rollouts, or of slime's dumps, are not the model's."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from agl_slime.data.credit import mask_of
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.engine.scoring import ScoreRequest, ScoreResult, ScoringClient
from agl_slime.errors import AglSlimeError, ConfigError, EngineError, missing_as_error
from agl_slime.loop.checkpoint import read_checkpoints
from agl_slime.report.files import RunDir, read_object
from agl_slime.report.rollouts import MOST_SAMPLES
from agl_slime.support.flags import parse_flags, split_at_dashes
from agl_slime.support.terminal import print_line
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.tokenizer import has_chat_template, render_chat
from agl_slime.tools.forensics.formulas import StepFlags
from agl_slime.tools.forensics.gaps import (
    TOLERANCE,
    Cause,
    Conditions,
    Diagnosis,
    KeptSample,
    explain,
    mean_gap,
    read_kept,
    split_by_version,
)
from agl_slime.tools.slime_dumps.runs import DumpedStep, SlimeRun, is_dump
from agl_slime.types import Sample

_Place = tuple[str, int]  # a rollout, and the number of its Sample
_MOST_OTHERS = 3  # versions that the weights are compared with
_ENGINE_CAUSES = {
    "cache": "the engine scores a token otherwise when its prefix comes from the cache",
    "batch": "the engine scores a token otherwise in a batch",
    "engine": "the engine's prefill is not what the model's own code computes",
    "decode": "sampling and prefill of the same engine differ",
}
_DIFFERENCES = {
    "cache": "engine with the prefix cache - without",
    "batch": "engine in a batch - alone",
    "engine": "engine's prefill - model's own code in float32, temperature 1",
    "decode": "sampled - engine's prefill",
    "sampler": "sampled - model's own code",
    "trainer": "trainer in its step - model's own code",
    "weights": "weights that sampled - newest weights",
}


@dataclass(frozen=True, kw_only=True)
class AutopsyConfig:
    """Score a few kept rollouts of a run again and split the gap between sampler and model by cause, with the worst
    tokens; the first line names the first cause. Needs weights that the run still has: the start model, its
    checkpoints, the last two pushes. Of slime's --dump-details, Samples of a step are scored; slime's flags of
    sampling follow after --."""

    run_dir: tyro.conf.Positional[Path]
    """The directory of a run of the local trainer, or of slime's --dump-details."""
    samples: int = 8
    """Samples that are scored."""
    sglang_url: str | None = None
    """A running SGLang with those weights; by default the embedded engine is started with them, of slime's none."""
    step: int | None = None
    """slime's rollout id."""
    model: Path | None = None
    """The policy that sampled a step of slime's, as a Hugging Face checkpoint."""
    others: tuple[Path, ...] = ()
    """Further checkpoints whose weights slime's engine may have had: earlier ones, or the base model."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Samples of one weight version, with the settings and weights of the run that sampled them."""

    samples: Sequence[KeptSample]
    version: str
    weights: Path
    """Of this version."""
    conditions: Conditions
    newest: Path | None = None
    """The run's newest weights, where these are others."""
    recomputed: bool = False
    """Whether the trainer's log-probs are of the policy before its step."""


def main(arguments: Sequence[str]) -> None:
    ours, slime_flags = split_at_dashes(arguments)
    config = parse_flags(AutopsyConfig, prog="agl-slime autopsy", arguments=ours)
    diagnosis, case = asyncio.run(autopsy(config, slime_flags=slime_flags))
    print_line(diagnosis.sentence)
    print_line(f"\nWeights of version {case.version or '?'} ({case.weights}); mean difference in nats per token:")
    for name, nats in diagnosis.differences.items():
        print_line(f"  {nats:10.2g}  {_DIFFERENCES[name]}")
    if diagnosis.causes:
        print_line("\nExplained by one cause alone, and left after it:")
        for cause in diagnosis.causes:
            print_line(f"  {cause.nats:10.3g} {cause.unexplained:10.2g}  {cause.cause}: {cause.text}")
    if diagnosis.worst:
        print_line("\nWorst tokens (recorded, expected log-prob):")
        for token in diagnosis.worst:
            print_line(str(token))


async def autopsy(config: AutopsyConfig, *, slime_flags: Sequence[str] = ()) -> tuple[Diagnosis, Case]:
    """The diagnosis of ``config.samples`` kept Samples. Raises ``ConfigError`` for files that lack them."""
    dumped = is_dump(config.run_dir)
    if not dumped and (slime_flags or config.step is not None or config.model or config.others):
        raise ConfigError(f"--step, --model, --others and flags after -- are for slime's dumps, not {config.run_dir}")
    case = await (run_in_thread(_case_of_dump, config, slime_flags) if dumped else run_in_thread(_case_of_run, config))
    diagnosis = await run_in_thread(diagnose, case)
    if any(sample.images for sample in case.samples) or (dumped and config.sglang_url is None):
        return diagnosis, case
    async with AsyncExitStack() as stack:
        url = config.sglang_url
        if url is None:
            engine = EmbeddedEngine(case.weights)
            await run_in_thread(engine.start)
            stack.push_async_callback(run_in_thread, engine.stop)
            url = engine.url
        measured = await measure(await stack.enter_async_context(ScoringClient(base_url=url)), case.samples)
    return await run_in_thread(with_engine, diagnosis, measured, case), case


def _case_of_run(config: AutopsyConfig) -> Case:
    run = RunDir(config.run_dir)
    settings = run.settings()
    if settings is None or settings.get("trainer") != "local":
        raise ConfigError(f"{run.path} is not the directory of a run of the local trainer (config.json)")
    weights = weights_of(run)
    samples, version = choose_samples(run, weights, n=config.samples)
    return case_of(settings, weights, samples, version)


def _case_of_dump(config: AutopsyConfig, slime_flags: Sequence[str]) -> Case:
    """``config.samples`` random Samples of a dumped step, of the weight version that most are of. Raises
    ``ConfigError`` for files that lack them."""
    if config.step is None or config.model is None:
        raise ConfigError(f"{config.run_dir} has slime's dumps: give --step, a rollout id, and --model, its checkpoint")
    flags, run = StepFlags.parse(slime_flags), SlimeRun(config.run_dir, config.model)
    step = run.step(config.step)
    by_version: dict[str, dict[_Place, Sample]] = defaultdict(dict)
    for place, sample in _scored_samples(step):
        spans = sample.metadata.get("weight_spans", ())
        versions = {str(version) for version, *_ in spans} or {*sample.weight_versions}
        if len(versions) <= 1:
            by_version[next(iter(versions), "")][place] = sample
    if not by_version:
        why = "no Sample of one weight version has rollout_log_probs and tokens to train on"
        raise ConfigError(f"--step {config.step}: {why}")
    version = max(by_version, key=lambda version: len(by_version[version]))
    places = random.Random(0).sample([*by_version[version]], min(config.samples, len(by_version[version])))
    return Case(
        samples=[*_described(run, step, {place: by_version[version][place] for place in places}, version)],
        version=version,
        weights=config.model,
        conditions=Conditions(
            temperature=flags.rollout_temperature or 1.0,
            top_p=flags.rollout_top_p or 1.0,
            top_k=int(flags.rollout_top_k) or -1,
            other_weights={f"the weights in {path}": path for path in config.others},
        ),
        recomputed=True,
    )


def _scored_samples(step: DumpedStep) -> Iterator[tuple[_Place, Sample]]:
    """The Samples with sampled tokens."""
    for group in step.groups:
        for member in group.members:
            for number, sample in enumerate(member.samples[:MOST_SAMPLES]):
                if sample.rollout_log_probs is not None and mask_of(sample).any():
                    yield (member.rollout_id, number), sample


def _described(run: SlimeRun, step: DumpedStep, samples: dict[_Place, Sample], version: str) -> Iterator[KeptSample]:
    lines = run.describe(step, [rollout_id for rollout_id, _ in samples])
    for (rollout_id, number), sample in samples.items():
        line = lines[rollout_id]
        described = {**line["samples"][number], "weight_versions": [[version, 0, sample.response_length]]}
        inputs = {"experts": sample.rollout_routed_experts, "images": sample.multimodal_train_inputs}
        yield from split_by_version(described, rollout_id=rollout_id, messages=line["messages"], **inputs)


def weights_of(run: RunDir, pushed: Path | None = None) -> dict[str, Path]:
    """The directories of the weights that a run still has, by version; ``pushed`` has the last pushes, by default in
    the run's directory."""
    weights: dict[str, Path] = {}
    if (model := (read_object(run.start) or {}).get("model")) and Path(model, "config.json").is_file():
        weights["0"] = Path(model)
    for path in sorted((pushed or run.weights).glob("v*")):
        if (path / "config.json").is_file():
            weights[str(int(path.name[1:]))] = path
    for checkpoint in read_checkpoints(run.checkpoints) if run.checkpoints.is_dir() else ():
        weights[checkpoint.loop.version] = checkpoint.trainer
    return weights


def choose_samples(run: RunDir, weights: Mapping[str, Path], *, n: int) -> tuple[list[KeptSample], str]:
    """``n`` random kept Samples of the version in ``weights`` that most are of, the newest of equals. Raises
    ``ConfigError`` without any."""
    if not run.rollouts.is_file():
        raise ConfigError(f"{run.path} has no kept rollouts; train with --keep-rollouts sampled or all")
    kept_samples = [*read_kept(run.rollouts)]
    counts = Counter(sample.version for sample in kept_samples if sample.version in weights)
    if not counts:
        versions = ", ".join(sorted({sample.version for sample in kept_samples})) or "none"
        why = f"it has kept rollouts of versions {versions} and weights of {', '.join(weights) or 'none'}"
        raise ConfigError(f"{run.path}: {why}; train with a lower --save-interval or --keep-rollouts all")
    version = max(counts, key=lambda version: (min(counts[version], n), int(version) if version.isdecimal() else -1))
    candidates = [sample for sample in kept_samples if sample.version == version]
    return random.Random(0).sample(candidates, min(n, len(candidates))), version


def case_of(
    settings: Mapping[str, Any], weights: Mapping[str, Path], samples: Sequence[KeptSample], version: str
) -> Case:
    """The case of ``samples`` by a run's settings and the ``weights`` that it still has."""
    local = settings.get("local") or {}
    lora, other_versions = int(local.get("lora_rank") or 0) > 0, [each for each in weights if each != version]
    other_versions.sort(key=lambda each: abs(int(each) - int(version)))
    newest = max(weights, key=int)
    epochs = int(local.get("n_minibatches") or 4) * int(local.get("epochs") or 1)
    return Case(
        samples=samples,
        version=version,
        weights=weights[version],
        conditions=Conditions(
            temperature=float(settings.get("temperature") or 1.0),
            top_p=float(settings.get("top_p") or 1.0),
            top_k=int(settings.get("top_k") or -1),
            other_weights={f"the weights of version {old}": weights[old] for old in other_versions[:_MOST_OTHERS]},
            without_adapter=weights.get("0") if lora and version != "0" else None,
        ),
        newest=weights[newest] if newest != version else None,
        recomputed=local.get("old_log_probs") == "recompute" or epochs == 1,
    )


def diagnose(case: Case) -> Diagnosis:
    """What files and forward passes say: of the sampler, or of a trainer that is twice as far from the model."""
    with missing_as_error('agl-slime autopsy needs torch: pip install "agl-slime[local]"'):
        from agl_slime.tools.forensics.counterfactual import Counterfactuals
    tokenizer = load_tokenizer(case.weights)
    conditions = replace(case.conditions, renderings=_renderings(tokenizer))
    samples = case.samples
    recorded, trained = [sample.sampler for sample in samples], [sample.trainer for sample in samples]
    model = Counterfactuals(case.weights, samples, conditions=conditions, tokenizer=tokenizer)
    differences = {"sampler": mean_gap(recorded, model.expected)}
    if case.recomputed:
        differences["trainer"] = mean_gap(trained, model.expected)
    if case.newest is not None:
        now = Counterfactuals(case.newest, samples, conditions=conditions)
        differences["weights"] = mean_gap(now.expected, model.expected)
    if differences.get("trainer", 0.0) <= max(TOLERANCE, 2 * differences["sampler"]):
        faults = model.faults(recorded)
        return replace(explain(samples, recorded, model.expected, faults), differences=differences)
    faults = (replace(fault, text=fault.text.replace("the engine", "the trainer")) for fault in model.faults(trained))
    return replace(explain(samples, trained, model.expected, faults), subject="trainer", differences=differences)


def _renderings(tokenizer: Any) -> list[tuple[str, str, Callable[[KeptSample], list[int] | None]]]:
    """Prompts as the model's own template writes the recorded messages."""
    if not has_chat_template(tokenizer):
        return []

    def render(sample: KeptSample, *, system: bool) -> list[int] | None:
        roles = [message.get("role") for message in sample.messages]
        # a dump may have a "prompt" that was rendered before
        if "assistant" not in roles or "prompt" in roles or (not system and "system" not in roles):
            return None
        prompt = [m for m in sample.messages[: roles.index("assistant")] if system or m.get("role") != "system"]
        try:
            return tokenizer.encode(render_chat(tokenizer, prompt, generation_prompt=True), add_special_tokens=False)
        except AglSlimeError:  # the template refuses these messages
            return None

    by_template = "the engine was asked with the prompt as the model's own template writes it"
    without_system = "the engine was asked without the system message"
    return [
        ("template", by_template, lambda sample: render(sample, system=True)),
        ("system_message", without_system, lambda sample: render(sample, system=False)),
    ]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """An engine's log-probs of each Sample's places: alone without the prefix cache, with it, and in a batch."""

    fresh: list[np.ndarray]
    cached: list[np.ndarray]
    batch: list[np.ndarray]
    versions: frozenset[str]
    """The weight versions that the engine named."""


def is_plain(sampling: Conditions | SamplingParams) -> bool:
    """Whether sampled log-probs are at temperature 1 over the whole vocabulary, as an engine scores tokens."""
    return (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, -1)


async def measure(client: ScoringClient, samples: Sequence[KeptSample]) -> Measured:
    """Score ``samples``. Raises ``EngineError``."""
    versions = set[str]()

    def log_probs(sample: KeptSample, answer: ScoreResult | EngineError, start: int) -> np.ndarray:
        if not isinstance(answer, ScoreResult):
            raise answer
        versions.add(answer.version)
        return answer.log_probs[sample.places - start]

    columns = [(sample, sample.ids.tolist(), int(sample.places[0])) for sample in samples]
    fresh = [log_probs(sample, await client.score_one(ids, 1), 1) for sample, ids, _ in columns]
    cached = [log_probs(sample, await client.score_one(ids, start), start) for sample, ids, start in columns]
    answers = await client.score([ScoreRequest(ids, start) for _, ids, start in columns])
    batch = [log_probs(sample, answer, start) for (sample, _, start), answer in zip(columns, answers, strict=True)]
    return Measured(fresh=fresh, cached=cached, batch=batch, versions=frozenset(versions))


def with_engine(diagnosis: Diagnosis, measured: Measured, case: Case) -> Diagnosis:
    """``diagnosis`` with the measurements on an engine, which are causes where no other explains the sampler's gap."""
    from agl_slime.tools.forensics.counterfactual import Counterfactuals

    plain = Conditions()  # an engine scores at temperature 1, over the whole vocabulary, with experts of its choice
    alone = [replace(sample, experts=None) for sample in case.samples]
    expected = Counterfactuals(case.weights, alone, conditions=plain).expected
    fresh, cached = measured.fresh, measured.cached
    differences = {"cache": mean_gap(cached, fresh), "batch": mean_gap(measured.batch, cached)}
    if is_plain(case.conditions):
        differences["decode"] = mean_gap([sample.sampler for sample in case.samples], fresh)
    differences["engine"] = mean_gap(fresh, expected)
    causes = [
        Cause(cause=name, text=text, nats=differences[name], unexplained=max(0.0, diagnosis.gap - differences[name]))
        for name, text in _ENGINE_CAUSES.items()
        if differences.get(name, 0.0) > TOLERANCE and diagnosis.subject == "sampler"
    ]
    causes = [*diagnosis.causes, *causes] if diagnosis.first is not None else [*causes, *diagnosis.causes]
    return replace(diagnosis, causes=causes, differences={**diagnosis.differences, **differences})
