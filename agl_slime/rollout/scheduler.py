"""What happens after each answer: whether the rollout goes on, and with which messages.

A scheduler is written as for ms-swift: ``check_finished`` decides whether the rollout ends, ``step`` builds the next
request from the last, by a new message (``infer_request.messages.append({"role": "user", …})``) or in the answer, which
the model then goes on with (``infer_request.messages[-1]["content"] += " But wait,"``).

One scheduler object serves all rollouts of an agent, in flight at the same time: keep the state of a rollout in
``infer_request.data_dict``, or under its ``uuid``. Every method may be async; others run in threads, as rewards do.
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
    """The value is what stands in ``Sample.metadata["stop_reason"]``."""

    STOP = "stop"  # the model ended its answer and nothing asked for more
    LENGTH = "length"  # the last answer, or the whole trajectory, reached its limit of tokens
    MAX_TURNS = "max_turns"  # more turns were wanted than are allowed
    CONTEXT_OVERFLOW = "context_overflow"  # the conversation did not fit into the model's context; never retried
    TOOL_ERROR = "tool_error"  # a tool failed, and the agent is set to stop then
    ABORTED = "aborted"  # the engine broke the last answer off, and taking it up again did not help


@dataclass
class ChatMessage:
    """One answer. ``content`` is the text as the model wrote it, calls included; ``tool_calls`` are those that a parser
    found in it, in OpenAI's form."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None


@dataclass
class RolloutInferRequest:
    """The conversation that the next answer is asked for: ``messages``, the last answer included; ``images``,
    ``audios``, ``videos`` and ``objects`` of the task, for the scheduler (the model gets text); ``data_dict``, its
    other columns, in which a scheduler may keep things; ``uuid``, the rollout's id. ``check_finished`` sets
    ``stop_reason`` when something else than the model ended the rollout."""

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
    """The last answer. ``message`` has the text of this turn, of an answer that was continued what was added.
    ``token_ids`` were sampled, ``logprobs`` are natural logs, one per token. ``messages`` is set when the rollout ends:
    all of the conversation."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: list[float] | None = None
    messages: Messages | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass
class RequestConfig:
    """What an answer is sampled with, where ``run`` wants it otherwise than the agent; ``None``: as the agent says."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: list[str] | None = None
    n: int = 1
    logprobs: bool = True


@dataclass
class ChatCompletionResponse:
    choices: list[RolloutResponseChoice]


@dataclass
class RolloutOutput:
    """What ``run`` returns. Of its token ids, masks and log-probs nothing is needed: what was sampled is trained as it
    was sampled."""

    response: ChatCompletionResponse
    messages: Messages | None = None
    response_token_ids: list[Any] = field(default_factory=list)
    response_loss_mask: list[Any] = field(default_factory=list)
    rollout_infos: dict[str, Any] = field(default_factory=dict)
    rollout_logprobs: list[Any] = field(default_factory=list)


class MultiTurnScheduler:
    """Derive from it and implement ``step``, or ``run``. ``max_turns`` ends a rollout whatever ``check_finished``
    says."""

    tokenizer: Any = None  # the model's, once the first rollout has begun
    infer_engine: Any = None
    """Asks the model, for a ``run`` of one's own: ``response = await self.infer_engine.infer_async(infer_request,
    request_config)``. It serves the rollout that ``run`` was called for."""

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
        """The request for the next answer, the given one, changed, or a new one; or a dict with it as
        ``infer_request`` and perhaps ``rollout_infos``. ``current_turn`` counts from 1. ms-swift's token ids, masks and
        log-probs are not needed in it: what was sampled is trained as it was sampled, what was added is not."""
        raise NotImplementedError(f"{type(self).__name__} must implement step or run, or end rollouts in on_turn_end")

    def check_finished(self, infer_request: Any, result: RolloutResponseChoice, current_turn: int) -> Any:
        """Whether the rollout is over (a bool): by default when an answer was cut off or the turns are used up."""
        if result.finish_reason == "length":
            infer_request.stop_reason = StopReason.LENGTH
            return True
        if self.max_turns and current_turn >= self.max_turns:
            infer_request.stop_reason = StopReason.MAX_TURNS
            return True
        return False

    @staticmethod
    def _extract_logprobs_from_choice(result: RolloutResponseChoice) -> list[float]:
        return list(result.logprobs or [])

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> Any:
        """Called before the first answer, with a list of the one request: open what the rollout needs. (One whose
        parameter is named ``infer_request`` gets the request itself.)"""

    async def on_turn_end(self, infer_request: Any, result: RolloutResponseChoice, current_turn: int) -> Any:
        """Called after each answer. May return a dict: ``done`` (a bool) decides in the place of ``check_finished``,
        ``rollout_infos`` are what ``score`` finds in ``trajectory.metadata["rollout_infos"]``."""

    async def on_trajectory_end(self, requests: list[Any], error: BaseException | None = None) -> Any:
        """Called when the rollout has ended, whatever ended it (``error``, where it failed): close what was opened."""


schedulers: Registry[MultiTurnScheduler] = Registry("scheduler")
multi_turns = schedulers  # ms-swift's name: multi_turns["name"] = MyScheduler


def register_scheduler(name: str) -> Callable[[S], S]:
    """A decorator that makes a scheduler known as ``--multi-turn-scheduler name``."""
    return schedulers.register(name)
