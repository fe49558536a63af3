"""The JSON of Agent Lightning 1.0's API, as of version 1.0.2."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from agl_slime.errors import RewardError
from agl_slime.tokens.reward import posted_reward

State = Literal["queuing", "running", "succeeded", "failed"]
TERMINAL: frozenset[State] = frozenset({"succeeded", "failed"})
NEXT: dict[State, frozenset[State]] = {
    "queuing": frozenset({"running", "failed"}),
    "running": TERMINAL,
    "succeeded": frozenset(),
    "failed": frozenset(),
}
"""The states that may follow each state."""
CONFIG_KEY = "agl1.config"
"""Metadata key in the store of the configuration that a rollout was created with."""
MOST_CREATED = 10_000
"""Most rollouts that one request creates."""
ATTEMPT = "0"
"""Id of the one attempt of a rollout that 1.0 knows; in the store it is the latest."""


class LocalConfig(BaseModel):
    """The agent of the local controller: a class with ``run()``, and its environment variables by path in the input."""

    agent_class: str | None = None
    env_map: dict[str, str] = Field(default_factory=dict)


class K8sConfig(BaseModel):
    job_template: str | None = None


class Config(BaseModel):
    timeout_seconds: int = Field(default=3600, ge=0, le=10**9)
    local: LocalConfig | None = None
    k8s: K8sConfig | None = None


class Metadata(BaseModel):
    model_config = ConfigDict(extra="allow")

    batch_idx: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    sample_idx_in_batch: int | None = Field(default=None, ge=-(2**63), lt=2**63)


class Create(BaseModel):
    input: Any
    is_train: bool = True
    config: Config | None = None
    metadata: Metadata | None = None
    rollout_id: str | None = Field(default=None, min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._-]+$")

    @field_validator("metadata")
    @classmethod
    def _not_the_servers(cls, value: Metadata | None) -> Metadata | None:
        if value is not None and CONFIG_KEY in (value.model_extra or {}):
            raise ValueError(f"{CONFIG_KEY} is the server's own; give config beside metadata")
        return value


class StatusPatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    state: State | None = None
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None


class Patch(BaseModel):
    status: StatusPatch | None = None


class Status(BaseModel):
    state: State = "queuing"
    k8s_job_name: str | None = None
    last_attempt_id: str | None = None
    error_message: str | None = None
    version: int = 1
    created_at: float
    updated_at: float


class RolloutView(BaseModel):
    """A rollout in 1.0's form."""

    rollout_id: str
    input: Any
    is_train: bool
    config: Config
    metadata: Metadata
    status: Status


class EventCreate(BaseModel):
    event_type: str = Field(min_length=1, max_length=200)
    data: dict[str, Any] = Field(default_factory=dict)


class RewardData(BaseModel):
    """A reward: ``value`` is a number, or several by name, of which the first is trained on; it belongs to the rollout,
    the answer ``response_id``, or the answers of ``role``. Unlike here, 1.0 counts a value that is no number as 0.0."""

    model_config = ConfigDict(extra="allow")

    value: float | dict[str, Any]
    response_id: str | None = None
    role: str | None = None

    @field_validator("value", mode="before")
    @classmethod
    def _number(cls, value: Any) -> Any:
        posted_reward(value)
        return value

    @property
    def named(self) -> dict[str, float | RewardError]:
        return posted_reward(self.value)


class Model(BaseModel):
    model: str
    endpoint: str
    version: int = 0


class Pause(BaseModel):
    retry_after_seconds: int = Field(default=5, ge=0, le=86_400)
    reason: str | None = Field(default=None, max_length=2000)
