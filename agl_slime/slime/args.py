"""What slime's ``args`` and the environment say about the store, the agent and its tasks.

slime has no flags for these; any attribute of ``args`` can be set by ``--custom-config-path FILE.yaml``, and each has
an environment variable, which counts where ``args`` says nothing:

====================  ==============================
================================================================================== in the YAML file      environment
meaning ====================  ==============================
================================================================================== ``agl_store_url``
``AGL_SLIME_STORE_URL``         store that runners write to, served by ``StoreService`` ``agl_store_token``
``AGL_SLIME_STORE_TOKEN``       its token, where it has one ``agl_agent``         ``AGL_SLIME_AGENT``
``module:Class`` of an agent to run in the manager's own process ``agl_tasks``         ``AGL_SLIME_TASKS``
tasks as JSON lines; else slime's ``--prompt-data``, else the agent's ``make_task`` ``agl_eval_tasks``
``AGL_SLIME_EVAL_TASKS``        tasks of evaluations as JSON lines ``agl_llm_url``       ``AGL_SLIME_LLM_URL``
where agents find the model; else slime's router ``agl_get_timeout_s`` ``AGL_SLIME_GET_TIMEOUT_S``     longest wait for
a group, in seconds ``agl_max_attempts``  ``AGL_SLIME_MAX_ATTEMPTS``      how often a rollout is tried, the first time
included ``agl_eval_rollouts`` ``AGL_SLIME_EVAL_ROLLOUTS``     rollouts of an evaluation ====================
==============================  ==================================================================================

and, named alike in the environment, ``agl_rollout_timeout_s`` (time limit of a rollout, in seconds),
``agl_group_max_retries`` (failed rollouts of a group that are run again, beside the tries of each),
``agl_group_timeout_s`` (a group is replaced when so long after its last rollout ended others are still out),
``agl_max_staleness`` (most weight versions that tokens may be behind the newest that was seen) and
``agl_drop_zero_variance`` (1: groups whose rewards are all the same are replaced).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError

_DEFAULT_GET_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSettings:
    """Where rollouts come from when slime builds the data source.

    ``blocking``: whether ``get_samples`` waits for groups. It must not under slime's fully-async rollout function,
    which calls it on its event loop and takes an empty list for "ask again in a second"; it must everywhere else.
    """

    store_url: str | None = None
    store_token: str | None = None
    agent: str | None = None
    tasks: Path | None = None
    eval_tasks: Path | None = None
    llm_url: str | None = None
    model: str | None = None
    sampling: Mapping[str, Any] | None = None
    get_timeout_s: float = _DEFAULT_GET_TIMEOUT_S
    max_attempts: int = 2
    rollout_timeout_s: float = 1800.0
    eval_rollouts: int = 32
    seed: int = 0
    blocking: bool = True
    group_max_retries: int = 0
    group_timeout_s: float | None = None
    max_staleness: int | None = None
    drop_zero_variance: bool = False

    def __post_init__(self) -> None:
        if self.store_url is not None and self.agent is not None:
            raise ConfigError(
                f"agl_store_url {self.store_url!r} and agl_agent {self.agent!r} are both set: either runners elsewhere write to a store, "
                "or the agent runs here; leave one out"
            )
        if self.store_url is not None and not self.store_url.startswith(("http://", "https://")):
            raise ConfigError(f"agl_store_url must begin with http:// or https://, got {self.store_url!r}")
        for name in ("get_timeout_s", "rollout_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"agl_{name} must be above 0 seconds, got {getattr(self, name)}")
        if self.group_timeout_s is not None and not self.group_timeout_s > 0:
            raise ConfigError(f"agl_group_timeout_s must be above 0 seconds, got {self.group_timeout_s}")
        for name in ("group_max_retries", "max_staleness"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"agl_{name} must be 0 or more, got {value}")
        for name in ("max_attempts", "eval_rollouts"):
            if getattr(self, name) < 1:
                raise ConfigError(f"agl_{name} must be at least 1, got {getattr(self, name)}")

    @property
    def connected(self) -> bool:
        """Whether there is a store or an agent at all."""
        return self.store_url is not None or self.agent is not None

    @classmethod
    def from_args(cls, args: Any, environ: Mapping[str, str] = os.environ) -> PluginSettings:
        """Read the settings. Raises ``ConfigError`` naming a setting that cannot be used."""

        def read(name: str, default: Any = None) -> Any:
            value = getattr(args, f"agl_{name}", None)
            return value if value is not None else environ.get(f"AGL_SLIME_{name.upper()}") or default

        def number(name: str, default: float | None, kind: type = float) -> Any:
            value = read(name, default)
            try:
                return None if value is None else kind(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"agl_{name} must be a number, got {value!r}") from error

        def path(value: Any) -> Path | None:
            return None if value is None else Path(str(value))

        tasks = read("tasks")
        if tasks is None and getattr(args, "rollout_global_dataset", False):
            tasks = getattr(args, "prompt_data", None)
        return cls(
            store_url=read("store_url"),
            store_token=read("store_token"),
            agent=read("agent"),
            tasks=path(tasks),
            eval_tasks=path(read("eval_tasks")),
            llm_url=read("llm_url") or _router_url(args),
            model=getattr(args, "hf_checkpoint", None),
            sampling=_sampling(args),
            get_timeout_s=number("get_timeout_s", _DEFAULT_GET_TIMEOUT_S),
            max_attempts=number("max_attempts", 2, int),
            rollout_timeout_s=number("rollout_timeout_s", 1800.0),
            eval_rollouts=number("eval_rollouts", 32, int),
            seed=int(getattr(args, "rollout_seed", None) or 0),
            group_max_retries=number("group_max_retries", 0, int),
            group_timeout_s=number("group_timeout_s", None),
            max_staleness=number("max_staleness", None, int),
            drop_zero_variance=str(read("drop_zero_variance", "")).lower() in ("1", "true", "yes"),
            blocking="fully_async" not in (getattr(args, "rollout_function_path", None) or ""),
        )


def _router_url(args: Any) -> str | None:
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    return None if host is None or port is None else f"http://{host}:{port}"


def _sampling(args: Any) -> dict[str, Any]:
    """slime's rollout flags as SGLang's sampling parameters."""
    names = {
        "rollout_temperature": "temperature",
        "rollout_top_p": "top_p",
        "rollout_top_k": "top_k",
        "rollout_max_response_len": "max_new_tokens",
        "rollout_stop": "stop",
        "rollout_stop_token_ids": "stop_token_ids",
    }
    return {name: value for flag, name in names.items() if (value := getattr(args, flag, None)) is not None}
