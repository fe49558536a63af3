"""The settings of a training run. The command line is derived from this class: a field is a flag, its docstring the
help text."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from agl_slime.agl1.settings import ControllerSettings
from agl_slime.engine.sglang_process import find_sglang
from agl_slime.errors import ConfigError
from agl_slime.gateway.settings import Branches, Constraints, GatewaySettings
from agl_slime.loop.tasks import read_tasks
from agl_slime.report.console import View
from agl_slime.report.rollouts import Keep
from agl_slime.report.trackers import Tracker, need_trackers
from agl_slime.rollout.loading import DEFAULT_AGENT, split_agent
from agl_slime.run.flags import flag
from agl_slime.run.models import check_model
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller_process import check_python
from agl_slime.support.net import shown_url
from agl_slime.support.ranges import check_ranges
from agl_slime.tokens.images import ImageSettings
from agl_slime.tokens.systems import LaterSystems
from agl_slime.tokens.tokenizer import read_template_kwargs
from agl_slime.trainers.local.settings import LocalTrainerSettings

_COUNTS = """num_iterations rollout_batch_size n_samples_per_prompt max_new_tokens max_attempts save_interval
    eval_rollouts keep_rollouts_mb actor_num_nodes actor_num_gpus_per_node env_workers"""
_MOST = 100_000  # prompts of an iteration, rollouts of a prompt: above, only enqueueing them takes hours


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Train an agent online: rollouts through Agent Lightning, a policy on SGLang, weights updated after every
    iteration."""

    agent: str = DEFAULT_AGENT
    """The agent to train, as module:Class or path/to/file.py:Class."""
    tasks: Path | None = None
    """Tasks as JSON lines, one object each. Without it the agent's own make_task(rng) is used."""
    model_path: Annotated[Path | None, tyro.conf.arg(aliases=["--model"])] = None
    """Model to start from: a Hugging Face directory, smollm2 (SmolLM2-135M-Instruct, Apache-2.0, 93 MB from the package
    registry), a name on the Hugging Face hub, or a run's directory. Without it agents of the lookup task start from the
    tiny policy of the first command."""
    sglang_url: str | None = None
    """URL of a running SGLang server or router. Without it an engine is started on this machine."""
    engine: Literal["embedded", "sglang"] = "embedded"
    """The engine that is started and ended with a run of the local trainer: the package's own, or a real SGLang."""
    sglang_python: Path | None = None
    """A Python that has SGLang, for --engine sglang, by default what AGL_SLIME_SGLANG_PYTHON names. For a CPU
    `bash scripts/sglang_cpu.sh DIR` makes one: DIR/bin/python."""
    trainer: Literal["local", "slime"] = "local"
    """The trainer: local (GRPO on this machine), or slime."""

    num_iterations: int = 40
    """Training iterations (collect, train, sync) in all."""
    rollout_batch_size: int = 16
    """Prompts per iteration."""
    n_samples_per_prompt: int = 4
    """Rollouts per prompt: the group within which advantages are computed."""
    max_new_tokens: int = 48
    """Most tokens that one answer may have."""
    temperature: float = 1.0
    """Sampling temperature, in the engine and in the trainer."""
    top_p: float = 1.0
    """Nucleus sampling: the likeliest tokens with this much of the probability. Below 1 the trainer's log-probs are
    computed over the same tokens, which the engine must report: the embedded one does, and SGLang with slime's
    patch."""
    top_k: int = -1
    """Sample from so many of the likeliest tokens; -1 is all. Log-probs as with top_p."""
    routed_experts: bool = False
    """Replay the engine's routed experts when training a mixture of experts; an engine at --sglang-url must run with
    --enable-return-routed-experts."""
    rollout_timeout: float = 600.0
    """Seconds after which a rollout is cancelled and counts as failed."""
    max_attempts: int = 1
    """Attempts of a rollout, the first included."""
    group_min_ratio: float = 0.7
    """Share of a group's rollouts that must succeed, and never fewer than 2; 1 is all of them."""
    group_max_retries: int = 0
    """Most failed rollouts of a group that are run again, where the group would be dropped without them."""
    group_timeout: float | None = None
    """Seconds after a group's last ended rollout after which its stragglers are cancelled; by default never."""
    drop_zero_variance: bool = False
    """Replace groups whose rewards are all the same: their advantages are 0."""
    max_replaced_groups: int | None = None
    """Most dropped groups that are replaced per iteration; by default rollout_batch_size."""
    failure_patience: float = 600.0
    """Seconds for which other tasks are tried, with pauses, while all rollouts fail after earlier ones succeeded (a
    judge that is down); 0 ends the run at once."""
    max_staleness: int = 0
    """Most weight versions that tokens may be behind the policy that trains on them. 0 is synchronous training; above 0
    it is asynchronous: rollouts continue while a batch is trained on, within that limit."""
    weight_pause: Literal["abort", "retract", "in_place"] = "abort"
    """Running requests at a weight update: abort (they return their tokens so far, and the client requests the rest),
    retract (they stay in the engine, which recomputes their KV cache) or in_place (they stay and keep the KV cache of
    the old weights)."""
    max_concurrent: int | Literal["auto"] = 1024
    """Rollouts in flight, in each runner; auto follows the engine's load, so that it is full and its queue short
    (--runners inproc)."""
    runners: str = "inproc"
    """Where the agent runs: inproc (a thread of this process), process:N (N processes), ray:N (N Ray actors), or
    controller (Agent Lightning 1.0's, which runs --agent module:Class as processes or --job-template as Jobs)."""
    store_host: str = "127.0.0.1"
    """Address of the store for runners outside of this process; Ray on several hosts needs one that they reach."""

    env: str | None = None
    """An environment of verifiers in place of --agent and --tasks: a taskset's name, reasoning-gym:NAME, textarena:ID,
    bfcl:CATEGORY. Its own settings are given as verifiers' programs take them: --env.KEY value."""
    env_python: Path | None = None
    """A Python that has verifiers, by default what AGL_ENV_PYTHON names; `bash scripts/verifiers_env.sh DIR` makes one:
    DIR/bin/python."""
    env_config: Path | None = None
    """A TOML file for verifiers, with an [env] table."""
    env_arguments: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    env_tasks: int | None = None
    """Most tasks of the environment; by default all, and 1000 where they do not end."""
    env_eval_split: str | None = None
    """The split of the environment's tasks that validations use, where its name is not plain (eval, test, ...)."""
    env_model: tuple[str, ...] = ()
    """Agents of the environment that another address answers, as ROLE=URL or ROLE=MODEL@URL; AGL_ENV_MODEL_KEY holds
    the key."""
    env_traces: bool = False
    """Keep verifiers' record of each episode, as environment/ROLLOUT.json of the run; the report names it."""
    env_workers: int = 1
    """Processes that play episodes, each at most --max-concurrent at once."""
    env_map: tuple[str, ...] = ()
    """Environment variables of a controller's agent, filled from its task, as NAME=input.path."""
    job_template: Path | None = None
    """Jinja template of a Job, for a controller on Kubernetes."""
    controller_python: Path | None = None
    """A Python that has agentlightning 1.x, whose controller is started and ended with the run, by default what
    AGL_CONTROLLER_PYTHON names; without one the run waits for a controller."""
    controller_host: str = "127.0.0.1"
    """Address on which a controller, or an environment's worker, reaches the run; but for loopback it needs AGL_KEY."""
    controller_port: int = 0
    """Port on controller_host; 0 takes a free one."""

    multi_turn_scheduler: str | None = None
    """Scheduler that decides what follows each answer, by the name it is registered under."""
    chat_template_kwargs: str = ""
    """Arguments of the model's chat template, as a JSON object: {"preserve_thinking": true}. Agents, the gateway and
    traces of text alone use them."""
    later_systems: LaterSystems = "in_place"
    """System messages after the first, where the chat template takes none: in_place (a user's message, or the end of
    the tool result before it), user (a user's message), or first (at the beginning, which forks)."""
    max_turns: int | None = None
    """Most answers of one rollout."""
    branches: Branches = "used"
    """Which answers of gateway agents are trained: used (skip answers that were requested again and never continued),
    all, or last (the conversation with the last answer)."""
    constraints: Constraints = "drop"
    """JSON schemas and forced tool calls: drop (sampled freely and trained), mask (obeyed and not trained) or
    refuse."""
    untrained_models: tuple[str, ...] = ()
    """Model names of requests that the policy answers and that are not trained: a judge, a user simulator."""
    trained_models: tuple[str, ...] = ()
    """Further roles that are trained: names of LLM resources beside main_llm, or model names of requests."""
    external_plugins: tuple[Path, ...] = ()
    """Python files to run at start; they register schedulers, tool parsers or loss masks."""

    eval_interval: int = 10
    """Validate before the first iteration, after every so many and at the end; 0 is never."""
    eval_rollouts: int = 32
    """Rollouts per validation."""
    eval_tasks: Path | None = None
    """Validation tasks as JSON lines. Without it a tenth of --tasks is held out, or the agent's make_task(rng) is used
    with another seed."""
    eval_sglang_url: str | None = None
    """URL of a second SGLang server for validations, which keeps the weights a validation started with; needs
    --max-staleness. Without it they share the engine with training."""

    output_dir: Path | None = None
    """Where metrics, rollouts and weights go; a new directory under runs/ by default."""
    weights_dir: Path | None = None
    """Directory from which the engine reads new weights. By default this machine's memory for large models with an
    engine started here, else the run's directory."""
    overwrite: bool = False
    """Replace the run in the output directory, with its checkpoints and model."""
    resume: bool = False
    """Resume the run in the output directory from its newest checkpoint."""
    save_interval: int = 10
    """Save a checkpoint after every so many iterations and at the end."""
    keep_best: bool = False
    """Keep the weights of the best validation as well, in model-best beside model."""
    seed: int = 0
    """Seed of tasks, policy and trainer."""
    keep_rollouts: Keep = "sampled"
    """Rollouts written whole to rollouts.jsonl, for the report: all, sampled (per iteration the best, the worst, a
    random and a failed one), or none."""
    keep_rollouts_mb: int = 256
    """Most MB of sampled rollouts; as they fill up, fewer iterations are kept."""
    track: tuple[Tracker, ...] = ()
    """Further trackers of metrics: wandb, mlflow; their own environment variables name the server, or none."""
    view: View = "auto"
    """Live progress or one line per iteration; auto is live on a terminal, web opens the run's page beside it."""

    actor_num_nodes: int = 1
    """slime: nodes for the actor."""
    actor_num_gpus_per_node: int = 1
    """slime: GPUs per actor node."""
    rollout_num_gpus: int = 0
    """slime: GPUs for rollout engines that slime launches; 0 uses the ones at --sglang-url."""

    images: ImageSettings = field(default_factory=ImageSettings)
    """Limits of images, which --trainer slime trains on: in requests to the gateway, and of SGLangLitAgent."""
    local: LocalTrainerSettings = field(default_factory=LocalTrainerSettings)
    """Settings of the local trainer; its temperature is --temperature, and its seed --seed where it is not set."""

    def __post_init__(self) -> None:
        RunnerPlan.parse(self.runners)
        split_agent(self.agent)
        if self.max_concurrent == "auto" and self.runners != "inproc":
            raise ConfigError(f"--max-concurrent auto with --runners {self.runners}: give a number, for each runner")
        check_ranges(
            self,
            (_COUNTS, lambda value: value >= 1, "at least 1"),
            ("rollout_batch_size n_samples_per_prompt", lambda value: value <= _MOST, f"at most {_MOST}"),
            ("failure_patience", lambda value: 0 <= value < math.inf, "0 (none) or more seconds"),
            ("max_concurrent", lambda value: value == "auto" or value >= 1, "auto, or at least 1"),
            ("env_tasks", lambda value: value is None or value >= 2, "at least 2"),
            ("seed rollout_num_gpus", lambda value: value >= 0, "0 or more"),
            ("group_max_retries max_replaced_groups max_staleness", lambda value: value >= 0, "0 or more"),
            ("eval_interval", lambda value: value >= 0, "0 (never) or more"),
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
            for name in (one for one in vars(self) if one.startswith("env_") and one != "env_map"):
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
        """What is trained, in a word."""
        return self.env or self.agent

    def _check_controller(self) -> None:
        if self.tasks is None:
            raise ConfigError("--runners controller: give --tasks FILE.jsonl; a controller's agent makes none")
        if self.max_attempts != 1:
            fix = "--group-max-retries runs failed members of a group again"
            raise ConfigError(f"--max-attempts {self.max_attempts}: a controller knows one attempt; {fix}")
        for name in ("multi_turn_scheduler", "external_plugins"):
            self._refuse(name, "a controller's agent has its own turns; leave it out", "runners")
        self.controller(log=None)

    def controller(self, *, log: Path | None) -> ControllerSettings | None:
        """What a controller runs, where it does."""
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
            why = f"the server at --sglang-url {shown_url(self.sglang_url)} runs already; give one of them"
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

        if self.n_samples_per_prompt == 1 and self.local.rewards_normalization:
            fix = "use 2 or more, or --local.no-rewards-normalization"
            raise ConfigError(f"--n-samples-per-prompt 1: there is nothing to compare a reward with; {fix}")

    def _check_slime(self) -> None:
        """What slime does in its own way."""
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
        self._refuse("keep_best", "slime keeps its own checkpoints; see docs/after-the-run.md")
        self._refuse("weights_dir", "slime brings its weights to the engines itself; leave it out")
        self._refuse("save_interval", "slime keeps its own checkpoints; give -- --save DIR --save-interval N instead")
        for setting in fields(self.local):
            if (value := getattr(self.local, setting.name)) != setting.default:
                raise ConfigError(f"{flag(f'local.{setting.name}')} {value} with --trainer slime: leave it out")

    def _refuse(self, name: str, why: str, beside: str = "trainer") -> None:
        if getattr(self, name) != getattr(TrainConfig, name):
            raise ConfigError(f"{flag(name)} with {flag(beside)} {getattr(self, beside)}: {why}")

    @property
    def template(self) -> dict[str, Any]:
        """The template settings, as sampling parameters have them."""
        kwargs = read_template_kwargs(self.chat_template_kwargs, flag("chat_template_kwargs"))
        later = self.later_systems if self.later_systems != TrainConfig.later_systems else None
        given = {"chat_template_kwargs": kwargs, "later_systems": later}
        return {name: value for name, value in given.items() if value}

    @property
    def gateway(self) -> GatewaySettings:
        """How agents are treated that talk to the gateway."""
        return GatewaySettings(
            branches=self.branches,
            constraints=self.constraints,
            untrained_models=self.untrained_models,
            trained_models=self.trained_models,
            max_turns=self.max_turns,
            images=self.images,
        )

    def check_files(self) -> None:
        """Raise ``ConfigError`` when a file that the settings name cannot be used, before anything is loaded."""
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
        if self.weights_dir is not None and self.weights_dir.exists() and not self.weights_dir.is_dir():
            raise ConfigError(f"--weights-dir {self.weights_dir}: is not a directory; name another")
