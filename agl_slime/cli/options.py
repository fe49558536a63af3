"""The settings of a run in groups. A field is a flag of ``python train.py``, its docstring the help text, a group a
titled section of ``--help``; ``agl_slime.cli.settings.TrainConfig`` has the fields of all groups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from agl_slime.agent.loading import DEFAULT_AGENT
from agl_slime.gateway.settings import Branches, Constraints
from agl_slime.report.console import View
from agl_slime.report.rollouts import Keep
from agl_slime.report.trackers import Tracker
from agl_slime.tokens.images import ImageSettings
from agl_slime.tokens.systems import LaterSystems


@dataclass(frozen=True, kw_only=True)
class FirstSettings:
    """Settings of a first run."""

    agent: str = DEFAULT_AGENT
    """The agent to train, as module:Class or path/to/file.py:Class."""
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
    num_iterations: int = 40
    """Total training iterations (collect, train, sync)."""
    rollout_batch_size: int = 16
    """Prompts per iteration."""
    n_samples_per_prompt: int = 4
    """Rollouts per prompt: the group within which advantages are computed."""
    max_new_tokens: int = 48
    """Most tokens of one answer."""
    output_dir: Path | None = None
    """Directory of metrics, rollouts, checkpoints and model; by default a new one under runs/."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Resume, reproduce and watch a run."""

    resume: bool = False
    """Resume the run in the output directory from its newest checkpoint."""
    overwrite: bool = False
    """Replace the run in the output directory, with its checkpoints and model."""
    save_interval: int = 10
    """Iterations between checkpoints; the last iteration writes one, too."""
    seed: int = 0
    """Seed of tasks, policy and trainer."""
    view: View = "auto"
    """Live progress or one line per iteration; auto is live on a terminal, web opens the run's page, too."""
    track: tuple[Tracker, ...] = ()
    """Further trackers of metrics: wandb, mlflow; their environment variables name the server."""
    keep_rollouts: Keep = "sampled"
    """Rollouts written whole to rollouts.jsonl, for the report: all, sampled (per iteration the best, the worst, a
    random and a failed one), or none."""


@dataclass(frozen=True, kw_only=True)
class ValidationSettings:
    """Validation on held-out tasks."""

    eval_interval: int = 10
    """Iterations between validations, which also run before the first iteration and after the last; 0 is never."""
    eval_rollouts: int = 32
    """Rollouts per validation."""
    eval_tasks: Path | None = None
    """Validation tasks as JSON lines; by default a tenth of --tasks is held out, or make_task(rng) is used with another
    seed."""
    keep_best: bool = False
    """Keep the weights of the best validation, too, in model-best beside model."""


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Sampling, and the chat template."""

    temperature: float = 1.0
    """Sampling temperature, in the engine and in the trainer."""
    top_p: float = 1.0
    """Nucleus sampling: the likeliest tokens with this much of the probability. Below 1 the trainer's log-probs are
    computed over the same tokens, which the engine must report: the embedded one does, and SGLang with slime's
    patch."""
    top_k: int = -1
    """Sample from this many of the likeliest tokens; -1 is all. Log-probs as with top_p."""
    routed_experts: bool = False
    """Replay the engine's routed experts when training a mixture of experts; an engine at --sglang-url must run with
    --enable-return-routed-experts."""
    chat_template_kwargs: str = ""
    """Arguments of the model's chat template, as a JSON object: {"preserve_thinking": true}. Agents, the gateway and
    traces of text alone use them."""
    later_systems: LaterSystems = "in_place"
    """System messages after the first, if the chat template refuses them: in_place (a user's message, or the end of the
    tool result before it), user (a user's message), or first (at the beginning, which forks)."""


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """Execution of the agent."""

    rollout_timeout: float = 600.0
    """Seconds after which a rollout is cancelled and counts as failed."""
    max_attempts: int = 1
    """Attempts of a rollout, including the first."""
    max_turns: int | None = None
    """Most answers of one rollout."""
    max_concurrent: int | Literal["auto"] = 1024
    """Rollouts in flight, in each runner; auto follows the engine's load, so that it is full and its queue short
    (--runners inproc)."""
    runners: str = "inproc"
    """Where the agent runs: inproc (a thread of this process), process:N (N processes), ray:N (N Ray actors), or
    controller (Agent Lightning 1.0's, which runs --agent module:Class as processes or --job-template as Jobs)."""
    store_host: str = "127.0.0.1"
    """Address of the store for runners in other processes; Ray on several hosts needs one that they can reach."""
    multi_turn_scheduler: str | None = None
    """Registered name of the scheduler that decides what follows each answer."""
    external_plugins: tuple[Path, ...] = ()
    """Python files to run at start; they register schedulers, tool parsers or loss masks."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Groups: rollouts of one prompt."""

    group_min_ratio: float = 0.7
    """Share of a group's rollouts that must succeed, but at least 2 rollouts; 1 is all of them."""
    group_max_retries: int = 0
    """Most failed rollouts of a group that are retried when the group would be dropped without them."""
    group_timeout: float | None = None
    """Seconds after a group's last ended rollout after which its stragglers are cancelled; by default never."""
    drop_zero_variance: bool = False
    """Replace groups whose rewards are all equal: their advantages are 0."""


@dataclass(frozen=True, kw_only=True)
class AsyncSettings:
    """Asynchronous training."""

    max_staleness: int = 0
    """Most weight versions that tokens may be behind the policy that trains on them. 0 is synchronous training; above 0
    it is asynchronous: rollouts continue while a batch is trained on, within that limit."""
    weight_pause: Literal["abort", "retract", "in_place"] = "abort"
    """Running requests at a weight update: abort (they return their tokens so far, and the client requests the rest),
    retract (they stay in the engine, which recomputes their KV cache) or in_place (they stay and keep the KV cache of
    the old weights)."""
    eval_sglang_url: str | None = None
    """URL of a second SGLang server for validations, which keeps the weights a validation started with; by default
    validations share the engine with training."""


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    """On-policy distillation: a teacher scores the tokens of rollouts."""

    teacher_url: tuple[str, ...] = ()
    """SGLang servers of teachers with the policy's vocabulary: URL, SOURCE=URL for tasks of one source_name, or
    SOURCE:WEIGHT=URL; AGL_SLIME_TEACHER_KEY has their key."""
    teacher_coef: float = 1.0
    """Coefficient of the reverse KL to the teacher in each token's advantage."""
    teacher_alone: bool = False
    """Train on the teacher alone; rewards are reported only."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The engine that a run of the local trainer starts and ends."""

    engine: Literal["embedded", "sglang"] = "embedded"
    """embedded (the package's own), or a real SGLang."""
    sglang_python: Path | None = None
    """A Python with SGLang, for --engine sglang, by default AGL_SLIME_SGLANG_PYTHON's. For a CPU
    `bash scripts/sglang_cpu.sh DIR` makes one: DIR/bin/python."""


@dataclass(frozen=True, kw_only=True)
class GatewayFlags:
    """The gateway, which serves the model to agents with their own client."""

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
    max_images: Annotated[int, tyro.conf.arg(aliases=["--images.max-images"])] = ImageSettings().max_images
    """Most images of a conversation, at the gateway and of SGLangLitAgent; --trainer slime trains on images."""
    image_hosts: Annotated[tuple[str, ...], tyro.conf.arg(aliases=["--images.image-hosts"])] = ()
    """The only hosts from which images are fetched, by http or https; by default images come as data."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentFlags:
    """An environment of verifiers. Its own settings are --env.KEY value."""

    env: str | None = None
    """The environment, instead of --agent and --tasks: a taskset's name, reasoning-gym:NAME, textarena:ID or
    bfcl:CATEGORY."""
    env_python: Path | None = None
    """A Python with verifiers, by default AGL_ENV_PYTHON's; `bash scripts/verifiers_env.sh DIR` makes one:
    DIR/bin/python."""
    env_config: Path | None = None
    """A TOML file for verifiers, with an [env] table."""
    env_arguments: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    env_tasks: int | None = None
    """Most tasks of the environment; by default all, or 1000 of an endless one."""
    env_eval_split: str | None = None
    """Split of the environment's tasks for validations, if its name is not a usual one (eval, test, ...)."""
    env_model: tuple[str, ...] = ()
    """Agents of the environment that another server answers, as ROLE=URL or ROLE=MODEL@URL; AGL_ENV_MODEL_KEY has the
    key."""
    env_workers: int = 1
    """Processes that play episodes, each at most --max-concurrent at once."""


@dataclass(frozen=True, kw_only=True)
class ControllerFlags:
    """Agent Lightning 1.0's controller (--runners controller)."""

    controller_python: Path | None = None
    """A Python with agentlightning 1.x, whose controller is started and ended with the run, by default
    AGL_CONTROLLER_PYTHON's; without one the run waits for a controller."""
    controller_host: str = "127.0.0.1"
    """Address at which a controller, or an environment's worker, reaches the run; other than loopback needs AGL_KEY."""
    controller_port: int = 0
    """Port on controller_host; 0 takes a free one."""
    env_map: tuple[str, ...] = ()
    """Environment variables of the agent, filled from its task, as NAME=input.path."""
    job_template: Path | None = None
    """Jinja template of a Job, for a controller on Kubernetes."""


@dataclass(frozen=True, kw_only=True)
class SlimeFlags:
    """slime (--trainer slime); further flags of slime follow after --."""

    actor_num_nodes: int = 1
    """Nodes for the actor."""
    actor_num_gpus_per_node: int = 1
    """GPUs per actor node."""
    rollout_num_gpus: int = 0
    """GPUs for rollout engines that slime launches; 0 uses the ones at --sglang-url."""


GROUPS: dict[str, type] = {
    "first run": FirstSettings,
    "run": RunSettings,
    "validation": ValidationSettings,
    "sampling": SamplingSettings,
    "rollout": RolloutSettings,
    "group": GroupSettings,
    "asynchronous": AsyncSettings,
    "teacher": TeacherSettings,
    "engine": EngineSettings,
    "gateway": GatewayFlags,
    "environment": EnvironmentFlags,
    "controller": ControllerFlags,
    "slime": SlimeFlags,
}
"""The groups by their titles in ``--help``, in its order."""
