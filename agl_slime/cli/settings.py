"""``TrainConfig``: the settings of a training run, and their checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agl_slime.agent.loading import split_agent
from agl_slime.cli.flags import flag
from agl_slime.cli.models import check_model
from agl_slime.cli.options import (
    AsyncSettings,
    ControllerFlags,
    EngineSettings,
    EnvironmentFlags,
    FirstSettings,
    GatewayFlags,
    GroupSettings,
    RolloutSettings,
    RunSettings,
    SamplingSettings,
    SlimeFlags,
    TeacherSettings,
    ValidationSettings,
)
from agl_slime.data.teacher import Teacher
from agl_slime.engine.sglang_process import find_sglang
from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.loop.tasks import read_tasks
from agl_slime.report.trackers import need_trackers
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller_process import check_python
from agl_slime.support.net import shown_url
from agl_slime.support.ranges import check_ranges
from agl_slime.tokens.images import ImageSettings
from agl_slime.tokens.tokenizer import read_template_kwargs
from agl_slime.train.local.settings import LocalTrainerSettings

_COUNTS = """num_iterations rollout_batch_size n_samples_per_prompt max_new_tokens max_attempts save_interval
    eval_rollouts actor_num_nodes actor_num_gpus_per_node env_workers max_images"""
_MOST = 100_000  # more prompts or rollouts would take hours to enqueue


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    SlimeFlags,
    ControllerFlags,
    EnvironmentFlags,
    GatewayFlags,
    EngineSettings,
    TeacherSettings,
    AsyncSettings,
    GroupSettings,
    RolloutSettings,
    SamplingSettings,
    ValidationSettings,
    RunSettings,
    FirstSettings,
):
    """Train an agent online: rollouts through Agent Lightning, a policy on SGLang, weights updated after every
    iteration."""

    local: LocalTrainerSettings = field(default_factory=LocalTrainerSettings)
    """Settings of the local trainer."""

    def __post_init__(self) -> None:
        RunnerPlan.parse(self.runners)
        split_agent(self.agent)
        if self.max_concurrent == "auto" and self.runners != "inproc":
            raise ConfigError(f"--max-concurrent auto with --runners {self.runners}: give a number, for each runner")
        check_ranges(
            self,
            (_COUNTS, lambda value: value >= 1, "at least 1"),
            ("rollout_batch_size n_samples_per_prompt", lambda value: value <= _MOST, f"at most {_MOST}"),
            ("max_concurrent", lambda value: value == "auto" or value >= 1, "auto, or at least 1"),
            ("env_tasks", lambda value: value is None or value >= 2, "at least 2"),
            ("seed rollout_num_gpus", lambda value: value >= 0, "0 or more"),
            ("group_max_retries max_staleness", lambda value: value >= 0, "0 or more"),
            ("eval_interval", lambda value: value >= 0, "0 (never) or more"),
            ("teacher_coef", lambda value: 0 < value < math.inf, "above 0"),
            ("group_min_ratio", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("group_timeout rollout_timeout", lambda value: value > 0, "above 0 seconds"),
            ("top_p", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("top_k", lambda value: value == -1 or 1 <= value < 2**31, "-1 (all tokens) or at least 1"),
            ("temperature", lambda value: 0 < value < math.inf, "above 0: training needs samples that differ"),
            named=flag,
        )
        read_template_kwargs(self.chat_template_kwargs, flag("chat_template_kwargs"))
        if self.env is not None:
            self._check_env()
        else:
            for name in (name for name in vars(self) if name.startswith("env_") and name != "env_map"):
                if getattr(self, name) != getattr(TrainConfig, name):
                    raise ConfigError(f"{flag(name)}: there is no environment; add --env NAME, or leave it out")
        if self.runners == "controller":
            self._check_controller()
        else:
            only = ("env_map", "job_template", "controller_python")
            for name in (*only, *(() if self.env else ("controller_host", "controller_port"))):
                self._refuse(name, "only a controller uses it; add --runners controller, or leave it out", "runners")
        if self.resume and self.output_dir is None:
            raise ConfigError("--resume needs --output-dir: the directory of the run to resume")
        if self.resume and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite replaces it; give one of them")
        if not self.eval_interval:
            for name in ("eval_rollouts", "eval_tasks", "keep_best"):
                self._refuse(name, "there are no validations with --eval-interval 0; leave it out")
        if not self.teacher_url:
            for name in ("teacher_coef", "teacher_alone"):
                if getattr(self, name) != getattr(TrainConfig, name):
                    raise ConfigError(f"{flag(name)}: there is no teacher; add --teacher-url URL, or leave it out")
        _ = self.teachers
        if self.trainer == "slime":
            self._check_slime()
        else:
            self._check_local()

    def _check_env(self) -> None:
        for name in ("agent", "tasks", "eval_tasks"):
            if getattr(self, name) != getattr(TrainConfig, name):
                raise ConfigError(f"{flag(name)} with --env {self.env}: the environment has its own; leave it out")
        for name in ("runners", "multi_turn_scheduler", "external_plugins", "max_attempts"):
            self._refuse(name, "the environment's worker plays its episodes; leave it out", "env")
        if self.max_concurrent == "auto":
            raise ConfigError(f"--max-concurrent auto with --env {self.env}: give a number, for each worker")
        if self.trainer != "local":
            raise ConfigError(f"--env {self.env} with --trainer slime: slime plays none; take --trainer local")

    @property
    def title(self) -> str:
        """A short name of the run: its environment or agent."""
        return self.env or self.agent

    def _check_controller(self) -> None:
        if self.tasks is None:
            raise ConfigError("--runners controller: give --tasks FILE.jsonl; a controller's agent makes none")
        if self.max_attempts != 1:
            fix = "--group-max-retries runs failed members of a group again"
            raise ConfigError(f"--max-attempts {self.max_attempts}: a controller makes one attempt; {fix}")
        for name in ("multi_turn_scheduler", "external_plugins"):
            self._refuse(name, "a controller's agent has its own turns; leave it out", "runners")
        self.controller(log=None)

    def controller(self, *, log: Path | None) -> ControllerSettings | None:
        """Settings of the controller, with ``--runners controller``."""
        if self.runners != "controller":
            return None
        return ControllerSettings.given(
            agent=self.agent if self.job_template is None else None,
            job_template=self.job_template,
            python=self.controller_python,
            env_map=self.env_map,
            host=self.controller_host,
            port=self.controller_port,
            log=log,
        )

    def _check_local(self) -> None:
        if self.engine == "sglang" and self.sglang_url is not None:
            why = f"the server at --sglang-url {shown_url(self.sglang_url)} already runs; give one of them"
            raise ConfigError(f"--engine sglang: {why}")
        if self.sglang_python is not None and self.engine != "sglang":
            raise ConfigError(f"--sglang-python {self.sglang_python}: add --engine sglang, or leave it out")
        if self.eval_sglang_url is not None and not (self.max_staleness and self.eval_interval):
            fix = "give --max-staleness 1 or more and an --eval-interval, or leave it out"
            url = shown_url(self.eval_sglang_url)
            raise ConfigError(f"--eval-sglang-url {url}: only asynchronous training uses it; {fix}")
        if self.keep_best and self.max_staleness:
            why = "weights may be gone when their validation has ended; use --max-staleness 0, or leave it out"
            raise ConfigError(f"--keep-best with --max-staleness {self.max_staleness}: {why}")
        if not self.max_staleness:
            self._refuse("weight_pause", "nothing is sampled while the weights change; give --max-staleness 1 or more")
        if self.runners == "inproc":
            self._refuse("store_host", "the runners are in this process; leave it out, or give other --runners")
        if not (self.local.std_normalization or self.local.rewards_normalization):
            why = "with --local.no-rewards-normalization there is nothing to divide; leave it out"
            raise ConfigError(f"--local.no-std-normalization: {why}")
        for name in ("actor_num_nodes", "actor_num_gpus_per_node", "rollout_num_gpus"):
            self._refuse(name, "only slime uses it; add --trainer slime, or leave it out")
        if self.n_samples_per_prompt == 1 and self.local.rewards_normalization and not self.teacher_alone:
            fix = "use 2 or more, or --local.no-rewards-normalization"
            raise ConfigError(f"--n-samples-per-prompt 1: there is nothing to compare a reward with; {fix}")

    def _check_slime(self) -> None:
        """Refuse settings that slime has flags or ways of its own for."""
        for name in ("engine", "sglang_python"):
            self._refuse(name, "slime starts its own engines, with --rollout-num-gpus; leave it out")
        self._refuse("eval_sglang_url", "validations run on the engines of training; leave it out")
        for name in ("top_p", "top_k"):
            self._refuse(name, f"give slime's own flag, -- --rollout-{name.replace('_', '-')}")
        self._refuse("routed_experts", "give slime's own flag, -- --use-rollout-routing-replay")
        self._refuse("resume", "slime keeps its own checkpoints; give -- --load DIR --save DIR instead")
        for name in ("group_min_ratio", "group_max_retries", "group_timeout", "drop_zero_variance"):
            self._refuse(name, "both processes must agree on groups, which slime wants complete; leave it out")
        self._refuse("weight_pause", "slime updates the weights itself; leave it out")
        self._refuse("teacher_alone", "let the agent's reward be 0 for all rollouts")
        self._refuse("keep_best", "slime keeps its own checkpoints; see docs/after-the-run.md")

        self._refuse("save_interval", "slime keeps its own checkpoints; give -- --save DIR --save-interval N instead")
        for setting in fields(self.local):
            if (value := getattr(self.local, setting.name)) != setting.default:
                raise ConfigError(f"{flag(f'local.{setting.name}')} {value} with --trainer slime: leave it out")

    def _refuse(self, name: str, why: str, beside: str = "trainer") -> None:
        if getattr(self, name) != getattr(TrainConfig, name):
            raise ConfigError(f"{flag(name)} with {flag(beside)} {getattr(self, beside)}: {why}")

    @property
    def template(self) -> dict[str, Any]:
        """The settings of the chat template, as sampling parameters."""
        kwargs = read_template_kwargs(self.chat_template_kwargs, flag("chat_template_kwargs"))
        later = self.later_systems if self.later_systems != TrainConfig.later_systems else None
        values = {"chat_template_kwargs": kwargs, "later_systems": later}
        return {name: value for name, value in values.items() if value}

    @property
    def teachers(self) -> list[Teacher]:
        return [Teacher.parse(text) for text in self.teacher_url]

    @property
    def images(self) -> ImageSettings:
        return ImageSettings(max_images=self.max_images, image_hosts=self.image_hosts)

    @property
    def gateway(self) -> GatewaySettings:
        return GatewaySettings(
            branches=self.branches,
            constraints=self.constraints,
            untrained_models=self.untrained_models,
            trained_models=self.trained_models,
            max_turns=self.max_turns,
            images=self.images,
        )

    def check_files(self) -> None:
        """Raise ``ConfigError`` when a file that the settings name cannot be used; loads nothing."""
        need_trackers(self.track)
        for name, path in (("--tasks", self.tasks), ("--eval-tasks", self.eval_tasks)):
            if path is not None:
                read_tasks(path, flag=name)
        if self.model_path is not None:
            check_model(self.model_path)
        if self.job_template is not None and not self.job_template.is_file():
            raise ConfigError(f"--job-template {self.job_template}: there is no such file")
        if (controller := self.controller(log=None)) is not None and controller.python is not None:
            check_python(controller.python)
        if self.env_config is not None and not self.env_config.is_file():
            raise ConfigError(f"--env-config {self.env_config}: there is no such file")
        if self.engine == "sglang":
            find_sglang(self.sglang_python)
