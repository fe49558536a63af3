"""Settings of the store, the agent and its tasks, from slime's ``args`` and the environment.

slime has no flags for these: a setting ``x`` is the attribute ``agl_x`` of ``args`` (``--custom-config-path FILE.yaml``
sets it), else the environment variable ``AGL_SLIME_X``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, StringConstraints, ValidationError

from agl_slime.data.credit import Credit
from agl_slime.data.policy import MinimumViableGroup
from agl_slime.errors import ConfigError, SettingError
from agl_slime.gateway.agl1.settings import ControllerSettings
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.loop.settings import LoopSettings
from agl_slime.runner.base import RunnerPlan, RunnerSettings
from agl_slime.support.net import PUBLIC_HOST_VARIABLE, http_url, shown_url
from agl_slime.tokens.tokenizer import check_template_kwargs
from agl_slime.train.slime.flags import evaluates, refused_keys
from agl_slime.train.slime.prompt_data import PromptData
from agl_slime.train.slime.replay import replay_sampling

# slime's sampling flags, without the prefix rollout_ or eval_, by SGLang's names.
_SAMPLING = {name: name for name in ("temperature", "top_p", "top_k", "min_new_tokens", "stop", "stop_token_ids")}
_SAMPLING |= {"max_new_tokens": "max_response_len", "context_length": "max_context_len"}
# keys of evaluation data sets alone
_SAMPLING_OF_SETS = {name: name for name in ("repetition_penalty", "skip_special_tokens", "no_stop_trim")}


_Seconds = Annotated[FiniteFloat, Field(gt=0)]
_Count = Annotated[int, Field(ge=0)]
# settings that are fields of another settings class
_PATHS = {name: f"controller.{name}" for name in ("env_map", "job_template")}
_PATHS |= {f"controller_{name}": f"controller.{name}" for name in ("python", "host", "port", "log")}
_PATHS |= {name: f"loop.{name}" for name in ("max_attempts", "rollout_timeout_s", "eval_rollouts", "task_sampling")}
_PATHS |= {f"group_{name}": f"group.{name}" for name in ("max_retries", "timeout_s")}
# fields that slime's flags decide
_FROM_FLAGS = {"prompt_data", "model", "sampling", "blocking"}
_FROM_FLAGS |= {f"eval_{name}" for name in ("sampling", "sets", "samples", "whole")}
_LOOP = {"max_attempts": 2, "rollout_timeout_s": 1800.0}
"""Defaults of slime's own loop, other than ours."""


def _split_words(value: Any) -> Any:
    """``NAME=input.path`` words from an environment variable, or from a mapping in a YAML file."""
    if isinstance(value, Mapping):
        return tuple(f"{name}={path}" for name, path in value.items())
    return tuple(value.split()) if isinstance(value, str) else value


class EvalSet(BaseModel):
    """An evaluation data set of slime: ``samples`` rollouts for each row of ``data``."""

    model_config = ConfigDict(frozen=True)

    name: str
    data: PromptData
    samples: Annotated[int, Field(ge=1)] = 1
    sampling: Mapping[str, Any]


class PluginSettings(BaseModel):
    """The source of rollouts when slime builds the data source."""

    model_config = ConfigDict(frozen=True)

    store_url: Annotated[str, StringConstraints(pattern="^https?://")] | None = None
    """A store served by ``StoreService``, whose rollouts run elsewhere; instead of ``agent``."""
    store_token: str | None = None
    agent: str | None = None
    """``module:Class`` of the agent to run."""
    runners: str | None = None
    """The runners of ``agent``, as for ``RunnerPlan``: ``inproc`` (a thread of the manager's process), ``process:N``,
    ``ray:N`` or ``controller``."""
    max_concurrent: Annotated[int, Field(ge=1)] | None = None
    """Rollouts in flight of each runner; by default the limits of ``RunnerSettings``."""
    controller: ControllerSettings = Field(default_factory=ControllerSettings)
    """The controller, from ``agl_env_map``, ``agl_job_template`` and ``agl_controller_…``."""
    store_host: str = "127.0.0.1"
    """Address of the store for ``runners`` in other processes; Ray on several hosts needs one that they can reach."""
    gateway_host: str = "127.0.0.1"
    """Address that the gateway binds; with ``ADAPTER_PUBLIC_HOST`` every address. Agents in containers or on other
    hosts need one that they can reach."""
    gateway_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    gateway_public_url: Annotated[str, StringConstraints(pattern="^https?://")] | None = None
    """URL at which agents reach ``gateway_port``, and a controller the port of its API."""
    tasks: Path | None = None
    """A file of tasks (``agl_slime.loop.tasks``); else ``prompt_data``, else the agent's ``make_task``."""
    prompt_data: PromptData | None = None
    """slime's ``--prompt-data`` with its keys."""
    eval_tasks: Path | None = None
    """A file of tasks of evaluations; else slime's ``--eval-prompt-data`` or ``--eval-config``, else the agent's
    ``make_task`` with another seed."""
    loop: LoopSettings = Field(default_factory=partial(LoopSettings, **_LOOP))
    """Attempts and time limit of a rollout, rollouts of an evaluation without slime's data sets, and as the seed
    slime's ``--rollout-seed``: the order of the tasks."""
    group: MinimumViableGroup = Field(default_factory=MinimumViableGroup)
    """Retries of failed rollouts, and the time limit, of a group; all of it must succeed."""
    replay_files: Path | None = None
    """Directory for routed experts and nuclei of large turns, shared by runners and manager; by default they are in
    spans (with ``agent``: in a temporary directory)."""
    llm_url: str | None = None
    """The model's URL for agents; else slime's router."""
    get_timeout_s: _Seconds = 1800.0
    """Longest wait for a group, or for an evaluation."""
    max_staleness: _Count | None = None
    """Most weight versions that tokens may be behind the policy trained on them; groups are enqueued that far ahead of
    training. By default only groups that slime requests are enqueued."""
    credit: Credit = "group"
    """Credit of a token (``agl_slime.data.credit``); others than group need slime's advantage function."""
    drop_zero_variance: bool = False
    """Replace groups whose rewards are all equal."""
    teacher_url: Annotated[tuple[str, ...], BeforeValidator(_split_words)] = ()
    """Teachers for slime's ``--use-opd --opd-type sglang``, as for ``--teacher-url``."""
    model: str | None = None
    """slime's ``--hf-checkpoint``."""
    sampling: Mapping[str, Any] | None = None
    """SGLang's sampling parameters, by slime's ``--rollout-…``."""
    eval_sampling: Mapping[str, Any] | None = None
    """The same of evaluations, with slime's ``--eval-…``."""
    eval_sets: tuple[EvalSet, ...] = ()
    """slime's evaluation data sets, unless ``eval_tasks`` is given."""
    eval_samples: Annotated[int, Field(ge=1)] = 1
    """Rollouts of each other task of evaluations: slime's ``--n-samples-per-eval-prompt``."""
    eval_whole: bool = False
    """Whether a failed rollout of an evaluation leaves out its task: slime's ``--log-passrate`` needs full groups."""
    blocking: bool = True
    """Whether ``get_samples`` waits for groups; False under slime's fully-async rollout function, which calls it on its
    event loop and polls again after an empty list."""

    @property
    def connected(self) -> bool:
        """Whether a store or an agent is configured."""
        return not (self.store_url is None and self.agent is None and self.controller.job_template is None)

    def plan(self) -> RunnerPlan:
        """The runners that the manager's process starts. Raises ``ConfigError``."""
        plan = RunnerPlan.parse(self.runners or "inproc", named="agl_runners")
        port = self.controller.port if plan.kind == "controller" else self.gateway_port
        if self.gateway_public_url is not None and not port:
            name = "agl_controller_port" if plan.kind == "controller" else "agl_gateway_port"
            url = shown_url(self.gateway_public_url)
            raise ConfigError(f"agl_gateway_public_url {url} leads to one port: set {name}")
        if self.gateway_port and plan.kind in ("process", "ray"):
            raise ConfigError(f"agl_gateway_port {port}: each runner of {plan} has a gateway; leave the port out")
        gateway = GatewaySettings(host=self.gateway_host, port=port, public_url=self.gateway_public_url)
        limits = {} if (most := self.max_concurrent) is None else {"max_concurrent": most, "max_sync_threads": most}
        settings = RunnerSettings(gateway=gateway, **limits)
        plan = replace(plan, settings=settings, store_host=self.store_host, store_setting="agl_store_host")
        if plan.kind != "controller":
            return plan
        return replace(plan, controller=self.controller.complete(agent=self.agent))

    def check_single(self) -> None:
        """Raise ``ConfigError`` for a setting without effect on single rollouts, whose prompts slime groups."""
        defaults = PluginSettings()
        for name in ("tasks", "teacher_url", "max_staleness", "drop_zero_variance", *_PATHS):
            path = _PATHS.get(name, name)
            value, default = (attrgetter(path)(each) for each in (self, defaults))
            has_effect = path.partition(".")[0] in ("controller", "loop") and name != "task_sampling"
            if value != default and not has_effect:
                reason = "slime draws and groups the prompts; leave it out, or use generate_rollout"
                raise ConfigError(f"agl_{name} has no effect with agl_slime.slime_hooks.generate: {reason}")

    def _check_runners(self) -> None:
        for name in ("runners", "max_concurrent"):
            if (value := getattr(self, name)) is not None and self.store_url is not None:
                reason = f"the runners of the store at agl_store_url {shown_url(self.store_url)} are elsewhere"
                raise ConfigError(f"agl_{name} {value}: {reason}; leave one out")
        if self.plan().kind == "controller":
            if self.max_concurrent is not None:
                reason = "a controller runs the agents; leave it out"
                raise ConfigError(f"agl_max_concurrent {self.max_concurrent}: {reason}")
            if self.loop.max_attempts != 1:
                fix = "agl_group_max_retries runs failed members of a group again"
                raise ConfigError(f"agl_max_attempts {self.loop.max_attempts}: a controller runs one attempt; {fix}")
            return
        for name, path in _PATHS.items():
            section, _, field = path.partition(".")
            if section == "controller" and getattr(self.controller, field) != getattr(ControllerSettings(), field):
                raise ConfigError(f"agl_{name} is for a controller only; set agl_runners: controller, or leave it out")

    @classmethod
    def from_args(cls, args: Any, environ: Mapping[str, str] = os.environ) -> PluginSettings:
        """Read the settings. Raises ``ConfigError`` naming an invalid one."""
        runners = getattr(args, "agl_runners", None) or environ.get("AGL_SLIME_RUNNERS")
        loop = {**_LOOP, "max_attempts": 1} if runners == "controller" else {**_LOOP}
        values: dict[str, Any] = {"controller": {}, "group": {}, "loop": loop}
        for name in (*(cls.model_fields.keys() - values.keys()), *_PATHS):
            value = getattr(args, f"agl_{name}", None)
            if value is not None or (value := environ.get(f"AGL_SLIME_{name.upper()}")):
                section, _, field = _PATHS.get(name, name).rpartition(".")
                target = values[section] if section else values
                target[field] = _split_words(value) if name == "env_map" else value
        values["loop"]["rollout_batch_size"] = getattr(args, "rollout_batch_size", None) or 1
        values["loop"]["seed"] = getattr(args, "rollout_seed", None) or 0
        if values.get("store_url") is not None and values.get("agent") is not None:
            both = f"agl_store_url {shown_url(values['store_url'])!r} and agl_agent {values['agent']!r}"
            raise ConfigError(f"{both} are both set: the agent runs here, or elsewhere on a store; leave one out")
        host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
        if host is not None and port is not None:
            values.setdefault("llm_url", http_url(host, port))
        sampling, sets = _sampling(args, "rollout") | _template_kwargs(args), _eval_sets(args, values)
        values |= {
            # main has no such switch, and always a data set
            "prompt_data": prompt_data(args)
            if getattr(args, "rollout_global_dataset", True) and values.get("tasks") is None
            else None,
            "model": getattr(args, "hf_checkpoint", None),
            "sampling": sampling | replay_sampling(args),
            "eval_sampling": sampling | _sampling(args, "eval"),
            "eval_sets": sets,
            "eval_samples": _eval_samples(args),
            "eval_whole": bool(getattr(args, "log_passrate", False)),
            "blocking": "fully_async" not in (getattr(args, "rollout_function_path", None) or ""),
        }
        if environ.get(PUBLIC_HOST_VARIABLE):
            values.setdefault("gateway_host", "0.0.0.0")
        try:
            settings = cls(**values)
        except ValidationError as error:
            raise _named_error(error) from error
        settings._check_runners()
        return settings


def setting_names() -> set[str]:
    """The names of all settings, ``agl_…``."""
    sections = {path.partition(".")[0] for path in _PATHS.values()}
    return {f"agl_{name}" for name in {*PluginSettings.model_fields, *_PATHS} - _FROM_FLAGS - sections}


def prompt_data(args: Any) -> PromptData | None:
    """slime's ``--prompt-data`` and the flags that say how it is read; ``None`` without it."""
    if (path := getattr(args, "prompt_data", None)) is None:
        return None
    shuffle = bool(getattr(args, "rollout_shuffle", False))
    return _data(args, path, shuffle=shuffle, max_prompt_len=getattr(args, "rollout_max_prompt_len", None))


def _data(keys: Any, path: Any, **options: Any) -> PromptData:
    names = ("input_key", "label_key", "metadata_key", "tool_key", "multimodal_keys")
    values = {name: getattr(keys, name) for name in names if hasattr(keys, name)}
    return PromptData(path=str(path), **values, **options)


def _named_error(error: ValidationError) -> ConfigError:
    """The first error, with the name of the setting as it is given in ``args``."""
    first = error.errors()[0]
    refused, path = first.get("ctx", {}).get("error"), ".".join(map(str, first["loc"]))
    if isinstance(refused, SettingError):
        path = f"{path}.{refused.name}"
    elif isinstance(refused, ConfigError):
        return refused
    names = [f"agl_{name}" for name, target in _PATHS.items() if target == path] or [f"agl_{first['loc'][0]}"]
    if isinstance(refused, SettingError):
        return SettingError(names[0], refused.problem)
    value = "***" if names[0] == "agl_store_token" else shown_url(repr(first["input"]))
    return ConfigError(f"{names[0]} is {value}: {first['msg'][0].lower()}{first['msg'][1:]}")


def _eval_sets(args: Any, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The values of ``EvalSet`` of slime's data sets. Raises ``ConfigError`` for keys and settings without effect."""
    tasks, rollouts = values.get("eval_tasks"), values["loop"].get("eval_rollouts")
    if (setting := tasks or rollouts) is not None:
        named = f"agl_eval_{'tasks' if tasks else 'rollouts'} {setting} has no effect"
        if not evaluates(args):
            raise ConfigError(f"{named}: give --eval-function-path agl_slime.slime_hooks.generate_rollout")
        if getattr(args, "eval_interval", 1) is None:
            raise ConfigError(f"{named}, as slime evaluates nothing: set eval_interval beside it, or leave it out")
        if tasks is not None:
            return []
        if getattr(args, "eval_datasets", None):
            raise ConfigError(f"{named}, as slime's data sets are evaluated in full: leave one out")
    for refused in refused_keys(args):
        raise ConfigError(refused)
    if not evaluates(args):
        return []
    limit = getattr(args, "eval_max_prompt_len", None)
    shared = _sampling(args, "rollout") | _template_kwargs(args) | _sampling(args, "eval")
    names = _SAMPLING | _SAMPLING_OF_SETS
    return [
        {
            "name": data.name,
            "data": _data(
                data, data.path, max_prompt_len=limit, metadata_overrides=getattr(data, "metadata_overrides", {})
            ),
            "samples": _eval_samples(data),
            "sampling": shared | _sampling(data, "", names) | _template_kwargs(data),
        }
        for data in getattr(args, "eval_datasets", None) or ()
    ]


def _eval_samples(keys: Any) -> int:
    samples = getattr(keys, "n_samples_per_eval_prompt", None)
    if samples is not None and samples < 1:
        raise ConfigError(f"n_samples_per_eval_prompt must be at least 1, got {samples}")
    return samples or 1


def _template_kwargs(args: Any) -> dict[str, Any]:
    kwargs = getattr(args, "apply_chat_template_kwargs", None) or {}
    if not isinstance(kwargs, dict):
        raise ConfigError(f"apply_chat_template_kwargs must be an object, got {kwargs!r:.80}")
    check_template_kwargs(kwargs, "apply_chat_template_kwargs")
    return {"chat_template_kwargs": dict(kwargs)} if kwargs else {}


def context_length(args: Any, *, evaluation: bool = False) -> dict[str, Any]:
    """slime's limit of a prompt and its answer together, as a sampling parameter; empty without one."""
    length = _sampling(args, "eval" if evaluation else "rollout").get("context_length")
    return {} if length is None else {"context_length": length}


def _sampling(args: Any, prefix: str, names: Mapping[str, str] = _SAMPLING) -> dict[str, Any]:
    values = {name: getattr(args, f"{prefix}_{flag}".strip("_"), None) for name, flag in names.items()}
    return {name: value for name, value in values.items() if value is not None}
