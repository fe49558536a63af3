"""``agl-slime replay`` of a step that slime dumped: its rewards, advantages and loss computed again without Megatron,
and the step as it would have been with changes. The gradient needs a checkpoint of the policy before the step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.data.credit import mask_of
from agl_slime.errors import ConfigError
from agl_slime.support.terminal import print_line
from agl_slime.tools.forensics.formulas import (
    RewardRule,
    StepFlags,
    TokenAdvantages,
    approximate_kl,
    difference,
    find_rule,
    reward_rules,
    token_advantages,
    unknown_figures,
)
from agl_slime.tools.forensics.gaps import TokenGap
from agl_slime.tools.forensics.steps import (
    Replay,
    ReplayConfig,
    load_reward,
    moved_tokens,
    print_columns,
    print_influences,
    take_step,
    trainer_class,
)
from agl_slime.tools.slime_dumps.files import DumpedSample, TrainedRow
from agl_slime.tools.slime_dumps.runs import DumpedStep, SlimeRun
from agl_slime.train.local.settings import LocalTrainerSettings
from agl_slime.types import Sample, sample_from_fields

if TYPE_CHECKING:
    from agl_slime.train.local.trainer import LocalTrainer

TOLERANCE = 1e-4
"""The largest difference at which a rule counts as the run's; float32 rounds by less."""
_SHOWN = 5
_NO_SETTINGS = "slime's dumps have no settings: its defaults and the nearest rule of rewards are assumed; give the"
_NO_SETTINGS += " run's flags after --."
_NO_LOSS = "slime's dumps have neither loss nor gradient norm: compare with its log, under the same names."
_NO_WEIGHTS = "slime's dumps have no weights: gradient norm, entropy and influences need --model."
_NO_MOMENTS = "slime's dumps have no optimizer state: changes of log-probs are of a first step of AdamW."
_NO_TRAIN_DATA = "There is no train data (--dump-details writes it): nothing of the trainer's is recorded, and without"
_NO_TRAIN_DATA += " --model its log-probs are taken to be the engine's."
_NOT_FINITE = "Advantages are not finite, so that the step has no figures; so are slime's of a group of one Sample."
_ONE_GROUP = "The baseline is the whole batch's, not each prompt's; --advantages std shows the step with the latter."
_WHITENED = "The recorded advantages are nearer to whitened ones (--normalize-advantages)."
_TURNS = "Samples have rewards of turns: the advantages are computed from the rollouts' rewards."
_ON_POLICY = "Each ratio is 1 before the first update: --clip makes no difference without --use-rollout-logprobs."
Arrays = list[NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Recorded figures beside computed ones: how many, and the largest difference; ``None``: not in the dump."""

    name: str
    count: int
    difference: float | None


@dataclass(frozen=True, kw_only=True)
class SampleFigures:
    """A trained Sample: means over its tokens under the mask; ``None``: unknown."""

    rollout_id: str
    reward: float
    recorded_advantage: float | None
    advantage: float
    engine_kl: float | None
    """KL divergence of the engine's policy from the trainer's, k3."""
    logprob_diff_max: float | None


@dataclass(frozen=True, kw_only=True)
class SlimeReplay(Replay):
    """The replay of a dumped step; metrics have slime's names, as in its log."""

    rule: RewardRule
    comparisons: Sequence[Comparison]
    samples: Sequence[SampleFigures]
    """The largest difference of log-probs first."""
    tokens: Sequence[TokenGap]
    """The engine's log-prob and the trainer's, the largest differences first."""
    unknown: Sequence[str]
    """Sentences about missing data of the dump."""


def print_replay(config: ReplayConfig, result: SlimeReplay) -> None:
    print_line(f"Step {config.step} of slime's dump in {config.run_dir}. Rewards: {result.rule}.\n")
    for row in result.comparisons:
        text = "not in the dump"
        if row.difference is not None:
            text = f"{row.count:,}, largest difference {row.difference:.2g}"
        print_line(f"{row.name:<38}{text}")
    print_line()
    print_columns(result)
    most = config.influences or _SHOWN
    print_line("\nSamples by the difference of the trainer's and the engine's log-probs:")
    print_line(f"  {'reward':>9} {'advantage':>12} {'again':>12} {'KL':>10} {'difference':>10}  rollout")
    for sample in result.samples[:most]:
        advantages, gaps = (sample.recorded_advantage, sample.advantage), (sample.engine_kl, sample.logprob_diff_max)
        texts = [f"{'-' if value is None else format(value, '.5g'):>12}" for value in advantages]
        texts += [f"{'-' if value is None else format(value, '.2g'):>10}" for value in gaps]
        print_line(f"  {sample.reward:>9.4g} {' '.join(texts)}  {sample.rollout_id}")
    if result.tokens:
        print_line("\nTokens by the same difference (engine's log-prob, trainer's):")
        print_line("\n".join(map(str, result.tokens)))
    if result.influences is not None:
        print_influences(result.influences, most=most)
    print_line("\n" + "\n".join(result.unknown))


def replay_dump(config: ReplayConfig, *, slime_flags: Sequence[str] = ()) -> SlimeReplay:
    """Raises ``ConfigError`` when the files lack data of the step."""
    flags = StepFlags.parse(slime_flags)
    if config.influences and config.model is None:
        raise ConfigError("--influences needs --model: slime's dumps have no weights")
    run = SlimeRun(config.run_dir, config.model)
    return _Step(config, flags, run.step(config.step), run).replay()


class _Step:
    """A dumped step while it is computed again."""

    def __init__(self, config: ReplayConfig, flags: StepFlags, step: DumpedStep, run: SlimeRun) -> None:
        self.config, self.flags, self.step, self.run = config, flags, step, run
        self.rollouts = _rollouts(step)
        self.trained = {place: row for place, dumped in enumerate(step.samples) if (row := _trained(step, dumped))}
        """The trainer's rows, by the places of their Samples among the dumped ones."""
        self.rows, self.names = [*self.trained.values()], [self.rollouts[place] for place in self.trained]
        if not any(row.mask.any() for row in self.rows):
            raise ConfigError(f"--step {config.step}: no token of the dump was trained on")
        self.rewards = _rewards(step, flags.reward_key)
        # a Sample without a group is one by itself
        groups = (dumped.sample.group_index for dumped in step.samples)
        self.prompts: list[Any] = [f"alone {n}" if group is None else group for n, group in enumerate(groups)]
        if (flags.use_tis or flags.use_rollout_logprobs) and any(row.engine is None for row in self.rows):
            raise ConfigError(f"{config.run_dir} has no rollout_log_probs of this step, which its flags need")
        rows = map(self.trained.get, range(len(self.rewards)))
        recorded = [None if row is None else row.reward for row in rows]
        self.rule = find_rule([*reward_rules(flags, self.prompts)], self.rewards, recorded, **self.columns)
        self.flags = self._with_whitening()
        self.model_log_probs: Arrays | None = None

    def replay(self) -> SlimeReplay:
        config = self.config
        computed = self.advantages(self.rewards, self.rule)
        comparisons = self._comparisons(computed)
        batch = self.batch([figures.advantages for figures in computed])
        self.finite = _finite(batch)
        of_model, influences = dict[str, float](), None
        if config.model is not None and self.finite:
            trainer = self._trainer(self.settings(), batch)
            self.model_log_probs = trainer.score(batch)
            comparisons.append(self._compare("the checkpoint's log-probs", "log_probs", self.model_log_probs))
            lines = self.run.describe(self.step, self.rollouts if config.influences else ())
            metrics, influences = take_step(trainer, batch, lines, config)
            of_model = self._of_model(trainer, batch, metrics)
        recorded: dict[str, float] = {}
        if all(row.advantages is not None and row.log_probs is not None for row in self.rows):
            columns = [row.advantages for row in self.rows if row.advantages is not None]
            recorded = self.figures(self.batch(columns), self.recorded_log_probs)
        changed = self._changed() if config.changed else None
        return SlimeReplay(
            recorded=recorded,
            computed=self.figures(batch, self.log_probs) | of_model,
            changed=changed,
            influences=influences,
            rule=self.rule,
            comparisons=comparisons,
            samples=self._samples(computed),
            tokens=self._tokens(batch),
            unknown=self._unknown(comparisons),
        )

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of all dumped Samples by which rewards are normalised."""
        return {"prompts": self.prompts, "rollouts": self.rollouts, "use": [True] * len(self.step.samples)}

    @property
    def recorded_log_probs(self) -> Arrays:
        """The trainer's, else the engine's, of the tokens under the mask of each Sample."""
        columns = [row.log_probs if row.log_probs is not None else row.engine for row in self.rows]
        if any(column is None for column in columns):
            raise ConfigError(f"{self.config.run_dir} has no log-probs of this step: give --model")
        return [column[row.mask] for column, row in zip(columns, self.rows, strict=True) if column is not None]

    @property
    def log_probs(self) -> Arrays:
        return self.recorded_log_probs if self.model_log_probs is None else self.model_log_probs

    def advantages(
        self, rewards: Sequence[float], rule: RewardRule, flags: StepFlags | None = None, **columns: Any
    ) -> list[TokenAdvantages]:
        """The advantages of the trained Samples, from the ``rewards`` of all dumped ones."""
        flags = flags or self.flags
        if lacking := unknown_figures(self.rows, flags):
            raise ConfigError(f"{self.config.run_dir} has no {lacking[0]} of this step, which its flags need")
        normalized = rule.apply(rewards, **{**self.columns, **columns})
        return token_advantages([normalized[place] for place in self.trained], self.rows, flags)

    def batch(self, advantages: Arrays, without: Sequence[str] = ()) -> list[list[Sample]]:
        """The trained Samples, with these advantages as rewards of their tokens."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(self.rollouts))}
        samples = []
        for (place, row), values in zip(self.trained.items(), advantages, strict=True):
            sample, name = self.step.samples[place].sample, self.rollouts[place]
            rewarded = np.where(row.mask, values, 0.0)
            edges = np.flatnonzero(np.diff(rewarded, prepend=np.nan, append=np.nan)).tolist()
            runs = enumerate(pairwise(edges))
            spans = [[str(number), float(rewarded[start]), start, end] for number, (start, end) in runs]
            rebuilt = sample_from_fields(
                group_index=sample.group_index,
                rollout_id=numbers[name],
                tokens=sample.tokens,
                response_length=sample.response_length,
                loss_mask=row.mask.astype(int).tolist(),
                rollout_log_probs=None if row.engine is None else row.engine.tolist(),
                reward=0.0,
                remove_sample=name in without,
                status=Sample.Status.COMPLETED,
                metadata={"reward_spans": spans, "agl_rollout_id": name},
            )
            samples.append(rebuilt)
        return [samples]

    def figures(
        self, batch: list[list[Sample]], log_probs: Arrays, settings: LocalTrainerSettings | None = None
    ) -> dict[str, float]:
        from agl_slime.tools.forensics.figures import step_figures
        from agl_slime.train.local.batch import TrainBatch

        flags = self.flags
        if not _finite(batch):
            return {}
        used = [place for place, sample in enumerate(batch[0]) if not sample.remove_sample]
        used_log_probs, kl_loss = [log_probs[place] for place in used], None
        if (reference := self._reference(batch)) is not None:
            pairs = zip(used_log_probs, reference, strict=True)
            kl_loss = np.concatenate([approximate_kl(ours, theirs, flags.kl_loss_type) for ours, theirs in pairs])
        return step_figures(
            TrainBatch.from_samples(batch, rewards_normalization=False),
            used_log_probs,
            settings or self.settings(),
            kl_loss=kl_loss,
            kl_loss_coef=flags.kl_loss_coef,
        )

    def settings(self, **changes: Any) -> LocalTrainerSettings:
        """The local trainer's settings for a step by the flags."""
        flags = self.flags
        estimator: Any = flags.advantage_estimator
        bounds: dict[str, Any] = {"tis": {"tis_clip": flags.tis_clip}}
        bounds["icepop"] = {"icepop_range": (flags.tis_clip_low, flags.tis_clip)}
        settings: dict[str, Any] = {
            "lr": flags.lr,
            "grad_clip": flags.clip_grad or math.inf,
            "clip": flags.eps_clip,
            "clip_high": flags.eps_clip_high,
            "n_minibatches": 1,
            "loss": estimator if estimator in ("gspo", "cispo") else "ppo",
            "aggregation": "token" if flags.calculate_per_token_loss else "rollout",
            "old_log_probs": "engine" if flags.use_rollout_logprobs else "recompute",
            "off_policy": flags.off_policy,
            "rewards_normalization": False,
            **bounds.get(flags.off_policy, {}),
        }
        return LocalTrainerSettings(**settings | changes)

    def _changed(self) -> dict[str, float]:
        config, rewards, rule = self.config, self.rewards, self.rule
        if (reward := load_reward(config, self.names)) is not None:
            lines = self.run.describe(self.step, self.rollouts)
            rewards = [float(reward(lines[name])) for name in self.rollouts]
        if config.advantages is not None:
            groups = "none" if config.advantages == "reward" else "prompt"
            rule = RewardRule(groups=groups, std=config.advantages == "std")
        advantages = self.advantages(rewards, rule, use=[name not in config.without for name in self.rollouts])
        batch = self.batch([figures.advantages for figures in advantages], config.without)
        if not any(mask_of(sample).any() for sample in batch[0]):
            raise ConfigError("--without leaves no token of the step")
        changes: dict[str, Any] = {} if config.clip is None else {"clip": config.clip, "clip_high": None}
        settings = self.settings(**changes | ({} if config.loss is None else {"loss": config.loss}))
        figures = self.figures(batch, self.log_probs, settings)
        if config.model is None or not _finite(batch):
            return figures
        trainer = self._trainer(settings, batch)
        return figures | self._of_model(trainer, batch, trainer.train(batch, iteration=config.step))

    def _of_model(
        self, trainer: LocalTrainer, batch: list[list[Sample]], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """What only a model gives, after a step on ``batch``; slime's entropy is a mean as its losses are."""
        from agl_slime.train.local.batch import TrainBatch

        scores = trainer.scores
        assert scores is not None
        assert scores.entropy is not None
        checked = TrainBatch.from_samples(batch, rewards_normalization=False)
        counts = checked.token_rollout_mask_sums * checked.n_rollouts
        entropy = np.concatenate(scores.entropy)
        mean = entropy.mean() if self.flags.calculate_per_token_loss else (entropy / counts).sum()
        return {"train/grad_norm": metrics["train/grad_norm"], "train/entropy_loss": float(mean)}

    def _trainer(self, settings: LocalTrainerSettings, batch: list[list[Sample]]) -> LocalTrainer:
        import torch

        from agl_slime.train.local.loss import Reference

        assert self.config.model is not None
        options: dict[str, Any] = {"temperature": self.flags.rollout_temperature, "torch_threads": "auto"}
        trainer = trainer_class()(model_path=self.config.model, settings=settings, **options)
        if (reference := self._reference(batch)) is not None:
            log_probs, flags = torch.from_numpy(np.concatenate(reference)), self.flags
            trainer.reference = Reference(log_probs=log_probs, coef=flags.kl_loss_coef, kind=flags.kl_loss_type)
        return trainer

    def _reference(self, batch: list[list[Sample]]) -> Arrays | None:
        """The reference's log-probs under the mask of each Sample that is used, for a KL loss."""
        known = [row.ref_log_probs[row.mask] for row in self.rows if row.ref_log_probs is not None]
        if not self.flags.use_kl_loss or len(known) < len(self.rows):
            return None
        return [column for column, sample in zip(known, batch[0], strict=True) if not sample.remove_sample]

    def _with_whitening(self) -> StepFlags:
        """The flags, with whitening if none are given and the recorded advantages are nearer to whitened ones."""
        recorded = [row.advantages[row.mask] for row in self.rows if row.advantages is not None]
        if self.flags.specified or len(recorded) < len(self.rows):
            return self.flags
        differences = {}
        for flags in (self.flags, replace(self.flags, normalize_advantages=True)):
            ours = self.advantages(self.rewards, self.rule, flags)
            masked = [figures.advantages[row.mask] for figures, row in zip(ours, self.rows, strict=True)]
            differences[flags] = difference(np.concatenate(masked), np.concatenate(recorded))
        return min(differences, key=differences.__getitem__)

    def _comparisons(self, computed: Sequence[TokenAdvantages]) -> list[Comparison]:
        normalized = self.rule.apply(self.rewards, **self.columns)
        by_sample = [
            ("rewards", [self.rewards[place] for place in self.trained], [row.raw_reward for row in self.rows]),
            ("normalized rewards", [normalized[place] for place in self.trained], [row.reward for row in self.rows]),
        ]
        comparisons = [
            Comparison(name=name, count=len(ours), difference=None if None in recorded else difference(ours, recorded))
            for name, ours, recorded in by_sample
        ]
        for name in ("returns", "advantages", "kl"):
            ours = [getattr(figures, name)[row.mask] for figures, row in zip(computed, self.rows, strict=True)]
            comparisons.append(self._compare(name, name, ours))
        if self.step.has_train_data:
            samples = [self.step.samples[place].sample for place in self.trained]
            masks = np.concatenate([*map(mask_of, samples)]), np.concatenate([row.mask for row in self.rows])
            comparisons.append(Comparison(name="loss masks", count=len(samples), difference=difference(*masks)))
            if all(sample.rollout_log_probs is not None for sample in samples):
                ours = [np.asarray(s.rollout_log_probs)[r.mask] for s, r in zip(samples, self.rows, strict=True)]
                comparisons.append(self._compare("the engine's log-probs", "engine", ours))
        return comparisons

    def _compare(self, name: str, column: str, ours: Arrays) -> Comparison:
        """``ours`` of the tokens under the mask of each Sample, beside the column of the train data."""
        recorded = [getattr(row, column)[row.mask] for row in self.rows if getattr(row, column) is not None]
        complete = len(recorded) == len(ours)
        largest = difference(np.concatenate(ours), np.concatenate(recorded)) if complete else None
        return Comparison(name=name, count=sum(map(len, ours)), difference=largest)

    def _samples(self, computed: Sequence[TokenAdvantages]) -> list[SampleFigures]:
        samples = []
        for (place, row), advantages, log_probs in zip(self.trained.items(), computed, self.log_probs, strict=True):
            if not row.mask.any():
                continue
            engine = None if row.engine is None else row.engine[row.mask]
            recorded = None if row.advantages is None else float(row.advantages[row.mask].mean())
            samples.append(
                SampleFigures(
                    rollout_id=self.rollouts[place],
                    reward=self.rewards[place],
                    recorded_advantage=recorded,
                    advantage=float(advantages.advantages[row.mask].mean()),
                    engine_kl=None if engine is None else float(approximate_kl(engine, log_probs, "k3").mean()),
                    logprob_diff_max=None if engine is None else float(np.abs(log_probs - engine).max()),
                )
            )
        return sorted(samples, key=lambda sample: -(sample.logprob_diff_max or 0.0))

    def _tokens(self, batch: list[list[Sample]]) -> list[TokenGap]:
        engine = [row.engine[row.mask] for row in self.rows if row.engine is not None]
        if len(engine) < len(self.rows):
            return []
        pairs = zip(self.log_probs, engine, strict=True)
        largest = np.array([np.abs(trainer - engine).max(initial=0.0) for trainer, engine in pairs])
        most = self.config.influences or _SHOWN
        # the tokens that differ most are in the Samples that do; siblings are there for their order
        rollouts = {self.names[number] for number in np.argsort(-largest)[:most] if largest[number] > 0}
        places = [number for number, name in enumerate(self.names) if name in rollouts]
        columns = ([column[place] for place in places] for column in (engine, self.log_probs))
        samples = [batch[0][place] for place in places]
        return moved_tokens(samples, self.run.describe(self.step, rollouts), *columns)[:most]

    def _unknown(self, comparisons: Sequence[Comparison]) -> list[str]:
        config, flags = self.config, self.flags
        of_rewards = next(each.difference for each in comparisons if each.name == "normalized rewards")
        misfit = f"No rule of slime's gives the recorded rewards; the nearest is: {self.rule}."
        steps = f"slime took {self.step.optimizer_steps} optimizer steps on this batch; the figures are of the whole"
        sentences = {
            _NO_TRAIN_DATA: not self.step.has_train_data,
            _NO_SETTINGS: not flags.specified,
            misfit: of_rewards is not None and of_rewards > TOLERANCE,
            _NOT_FINITE: not self.finite,
            _ONE_GROUP: self.rule.groups == "batch" and len({*self.prompts}) > 1,
            _WHITENED: not flags.specified and flags.normalize_advantages,
            f"{steps} batch at the weights before the first.": self.step.optimizer_steps > 1,
            f"Not computed: {' '.join(flags.left_out)}.": bool(flags.left_out),
            "There are no ref_log_probs: the KL loss is not computed.": flags.use_kl_loss
            and any(row.ref_log_probs is None for row in self.rows),
            f"{flags.custom_tis} is not called: its weights here are slime's vanilla_tis_function's.": flags.custom_tis,
            "TIS has no lower bound here (--tis-clip-low).": flags.off_policy == "tis" and flags.tis_clip_low > 0,
            _ON_POLICY: config.clip is not None and not flags.use_rollout_logprobs,
            _TURNS: any((dumped.sample.metadata or {}).get("reward_spans") for dumped in self.step.samples),
            _NO_LOSS: True,
            _NO_WEIGHTS: config.model is None,
            _NO_MOMENTS: bool(config.influences),
        }
        return [text for text, applies in sentences.items() if applies]


def _finite(batch: Sequence[Sequence[Sample]]) -> bool:
    spans = (span for samples in batch for sample in samples for span in sample.metadata["reward_spans"])
    return all(math.isfinite(reward) for _, reward, _, _ in spans)


def _rollouts(step: DumpedStep) -> list[str]:
    """The rollout of each Sample."""
    names = {
        id(sample): member.rollout_id for group in step.groups for member in group.members for sample in member.samples
    }
    return [names[id(dumped.sample)] for dumped in step.samples]


def _trained(step: DumpedStep, dumped: DumpedSample) -> TrainedRow | None:
    """The Sample's row of train data; without train data, one of its tokens under the mask, if there are any."""
    row = step.rows.get(id(dumped.sample))
    if row is None and not step.has_train_data and (mask := mask_of(dumped.sample)).any():
        log_probs = dumped.sample.rollout_log_probs
        row = TrainedRow(mask=mask, engine=None if log_probs is None else np.asarray(log_probs, dtype="f4"))
    return row


def _rewards(step: DumpedStep, key: str) -> list[float]:
    """The reward of each Sample by ``--reward-key``; by default the one of several that the trainer recorded."""
    names = dict.fromkeys(name for dumped in step.samples for name in dumped.rewards)
    trained = [(dumped, step.rows[id(dumped.sample)]) for dumped in step.samples if id(dumped.sample) in step.rows]

    def fits(name: str) -> bool:
        return all(dumped.rewards.get(name) == row.raw_reward for dumped, row in trained)

    chosen = key or next(filter(fits, names), "")
    rewards = [dumped.rewards.get(chosen) if chosen in names else dumped.reward for dumped in step.samples]
    if None in rewards:
        raise ConfigError(f"Sample {rewards.index(None)} of the dump has no reward; --reward-key of slime's names one")
    return [reward for reward in rewards if reward is not None]
