"""Multi-turn schedulers decide after each answer whether the rollout continues, and with which messages.

A scheduler has ms-swift's interface: ``check_finished`` decides whether the rollout ends, ``step`` builds the next
request from the last one: by a new message (``infer_request.messages.append({"role": "user", …})``), or by text added
to the answer, which the model then continues (``infer_request.messages[-1]["content"] += " But wait,"``).

One scheduler object serves all concurrent rollouts of an agent: keep the state of a rollout in
``infer_request.data_dict``, or under its ``uuid``. Every method may be async; sync methods run in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from agl_slime.errors import ConfigError
from agl_slime.support.registry import Registry

Messages = list[dict[str, Any]]
S = TypeVar("S", bound=Callable[..., Any])


class StopReason(StrEnum):
    """The reason for a rollout's end; the value appears as ``Sample.metadata["stop_reason"]``."""

    STOP = "stop"  # the model ended its answer, and nothing continued the rollout
    LENGTH = "length"  # the last answer, or the whole trajectory, reached its token limit
    MAX_TURNS = "max_turns"  # the rollout would have continued past its limit of turns
    CONTEXT_OVERFLOW = "context_overflow"  # the conversation did not fit into the model's context; never retried
    TOOL_ERROR = "tool_error"  # a tool failed, and the agent has stop_on_tool_error
    ABORTED = "aborted"  # the engine aborted the last answer, and resuming it failed


@dataclass
class ChatMessage:
    """One answer: ``content`` is the model's text with its calls, ``tool_calls`` are these calls in OpenAI's form."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None


@dataclass
class RolloutInferRequest:
    """The request for the next answer: ``messages``, the last answer included; ``images``, ``audios``, ``videos`` and
    ``objects`` of the task, for the scheduler only; ``data_dict``, the task's other columns, where a scheduler may keep
    state; ``uuid``, the rollout's id. ``check_finished`` sets ``stop_reason`` when not the model ended the rollout."""

    messages: Messages
    images: list[Any] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    objects: dict[str, Any] = field(default_factory=dict)
    data_dict: dict[str, Any] = field(default_factory=dict)
    stop_reason: StopReason | None = None
    uuid: str = ""


@dataclass
class RolloutResponseChoice:
    """The last answer. ``message`` has the text of this turn; of a continued answer only the new text. ``token_ids``
    are the sampled ids; ``logprobs["content"]`` has one entry per token, whose ``"logprob"`` is a natural logarithm.
    ``messages``, the whole conversation, is set when the rollout ends."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: dict[str, list[dict[str, Any]]] | None = None
    messages: Messages | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass
class RequestConfig:
    """Sampling parameters with which ``run`` overrides the agent's; ``None`` keeps the agent's value. ``n`` answers are
    sampled; log-probs are always returned."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int = 1
    logprobs: bool = True


@dataclass
class ChatCompletionResponse:
    choices: list[RolloutResponseChoice]


@dataclass
class RolloutOutput:
    """The return value of ``run``. Its token ids, masks and log-probs are ignored: training uses the engine's."""

    response: ChatCompletionResponse
    messages: Messages | None = None
    response_token_ids: list[Any] = field(default_factory=list)
    response_loss_mask: list[Any] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[Any] = field(default_factory=list)


class MultiTurnScheduler:
    """Base class: implement ``step``, or ``run``. ``max_turns`` ends a rollout whatever ``check_finished`` returns."""

    tokenizer: Any = None  # the model's; set when the first rollout begins
    infer_engine: Any = None
    """Samples answers for an overridden ``run``: ``response = await self.infer_engine.infer_async(infer_request,
    request_config)``. It acts on the rollout for which ``run`` was called."""

    def __init__(self, max_turns: int | None = None, *args: Any, **kwargs: Any) -> None:
        if max_turns is None and args:  # ms-swift's order: infer_engine, max_turns
            max_turns = args[0]
        if max_turns is not None and max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self.max_turns = max_turns

    async def run(self, infer_request: RolloutInferRequest, request_config: RequestConfig, **kwargs: Any) -> Any:
        """One rollout, by the methods below; a ``RolloutOutput``, or a list of them."""
        return await self.infer_engine.run_turns(infer_request)

    def step(self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int) -> Any:
        """The request for the next answer (``infer_request`` changed, or a new one), or a dict with ``infer_request``
        and perhaps ``rollout_infos``. ``current_turn`` counts from 1. ms-swift's token ids, masks and log-probs may be
        left out: sampled tokens are trained as the engine sampled them, added text is not trained."""
        raise NotImplementedError(f"{type(self).__name__} must implement step or run, or end rollouts in on_turn_end")

    def check_finished(self, infer_request: Any, result: RolloutResponseChoice, current_turn: int) -> Any:
        """Whether the rollout is over: by default when an answer reached its token limit, or at ``max_turns``."""
        if result.finish_reason == "length":
            infer_request.stop_reason = StopReason.LENGTH
            return True
        if self.max_turns and current_turn >= self.max_turns:
            infer_request.stop_reason = StopReason.MAX_TURNS
            return True
        return False

    @staticmethod
    def _extract_logprobs_from_choice(result: RolloutResponseChoice) -> list[float]:
        return [entry["logprob"] for entry in (result.logprobs or {}).get("content", ())]

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Called before the first answer, with a list of the one request: open the rollout's resources here. (An
        override whose parameter is named ``infer_request`` gets the request itself.)"""

    async def on_turn_end(self, infer_request: Any, result: RolloutResponseChoice, current_turn: int) -> Any:
        """Called after each answer. May return a dict: ``done`` (a bool) replaces ``check_finished``'s decision,
        ``rollout_infos`` reach ``score`` as ``trajectory.metadata["rollout_infos"]``."""

    async def on_trajectory_end(self, requests: list[Any], error: BaseException | None = None) -> Any:
        """Called when the rollout has ended, with the ``error`` of a failed one: close the rollout's resources here."""


schedulers: Registry[MultiTurnScheduler] = Registry("scheduler")
multi_turns = schedulers  # ms-swift's name: multi_turns["name"] = MyScheduler


def register_scheduler(name: str) -> Callable[[S], S]:
    """A decorator that registers a scheduler for ``--multi-turn-scheduler name``."""
    return schedulers.register(name)
