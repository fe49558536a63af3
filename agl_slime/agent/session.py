"""``RolloutSession``: the conversation of one rollout with the engine, its turns, and a span for each turn.

An agent samples an answer (``ask``), appends tool results or user messages (``add``) and asks again. Prompt ids,
sampled ids and log-probs are recorded as the engine returned them.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agl_slime.agent.images import Images, prepare, take_images, trim_at_changed_image
from agl_slime.agent.scheduler import StopReason
from agl_slime.agent.tools import ToolManager, ToolResult
from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams
from agl_slime.engine.client.resumable import Progress
from agl_slime.errors import ConfigError, ContextOverflowError, RolloutError
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens import attributes as names
from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.codec import TokenArray, common_prefix, stored_bytes, token_array
from agl_slime.tokens.conversation import ChatContext, Message
from agl_slime.tokens.forks import ForkReason, refine_fork
from agl_slime.tokens.formats import ToolParser
from agl_slime.tokens.images import Image, ImageSettings
from agl_slime.tokens.reader import AnswerReader
from agl_slime.tokens.replay import FiledReplay, file_replay
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.turn import Turn

SpanWriter = Callable[[dict[str, Any], float], None]

_LONGEST_FAILURE = 300  # characters of a tool's error text
_STOP_REASONS = {"length": StopReason.LENGTH, "abort": StopReason.ABORTED}


class RolloutStopped(Exception):
    """Raised by ``RolloutSession.ask`` when a limit was reached before the model could answer. Not an error:
    ``SGLangLitAgent`` scores the answers so far, unless the agent catches this exception in ``run``."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class RolloutStats:
    """Counts of one rollout over all its branches."""

    stop_reason: StopReason | None = None
    tools: tuple[str, ...] = ()
    tool_calls: Counter[str] = field(default_factory=Counter)  # executed calls by tool
    calls: Counter[str] = field(default_factory=Counter)  # "malformed", "unknown", "errors", and of these "timeouts"
    failed: Counter[str] = field(default_factory=Counter)  # calls by tool that raised or timed out
    failures: dict[str, str] = field(default_factory=dict)  # the first error text of each tool
    example: str = ""  # the first malformed call
    open_boundaries: int = 0
    untrained_turns: tuple[int, ...] = ()  # turns that the loss scale leaves out
    infos: dict[str, Any] = field(default_factory=dict)  # the scheduler's rollout_infos
    rewards: dict[str, Any] = field(default_factory=dict)  # by role
    asking: int = 0  # answers in flight
    prompts: Counter[bytes] = field(default_factory=Counter)  # requests to the engine, by a digest of the prompt

    def count_prompt(self, ids: Sequence[int]) -> tuple[bytes, int]:
        """A digest of a request's prompt, and how many requests of the rollout had it so far, this one included."""
        digest = hashlib.sha256(stored_bytes(token_array(ids))).digest()
        self.prompts[digest] += 1
        return digest, self.prompts[digest]

    def count(self, results: Iterable[ToolResult]) -> None:
        for result in results:
            unknown = result.error == "unknown_tool"
            self.tool_calls[result.call.name] += not unknown
            self.calls.update(unknown=unknown, errors=bool(result.error) - unknown, timeouts=result.error == "timeout")
            if result.error in ("exception", "timeout"):  # the tool's fault; bad arguments are the model's
                self.failed[result.call.name] += 1
                self.failures.setdefault(result.call.name, str(result.content)[:_LONGEST_FAILURE])

    def count_malformed(self, texts: Sequence[str]) -> None:
        self.calls["malformed"] += len(texts)
        self.example = self.example or "".join(texts[:1])[:_LONGEST_FAILURE]

    def tool_counts(self) -> dict[str, Any]:
        """The counts in the form of ``Sample.metadata["tools"]``."""
        counts = {name: self.calls[name] for name in ("malformed", "unknown", "errors", "timeouts")}
        failed = {"failed": dict(self.failed), "failures": self.failures} if self.failed else {}
        failed |= {"example": self.example} if self.example else {}
        return {"offered": list(self.tools), "calls": dict(+self.tool_calls), **counts, **failed}

    def metadata(self) -> dict[str, Any]:
        """``Trajectory.metadata`` of an agent's ``score``."""
        infos = {"rollout_infos": self.infos} if self.infos else {}
        return infos | ({"tools": self.tool_counts()} if self.tools else {})

    def attributes(self) -> dict[str, Any]:
        """Span attributes; empty ones are left out."""
        attributes = {
            names.STOP_REASON: self.stop_reason.value if self.stop_reason is not None else None,
            names.TOOLS: json.dumps(self.tool_counts()) if self.tools else None,
            names.OPEN_BOUNDARIES: self.open_boundaries,
            names.UNTRAINED_TURNS: json.dumps(self.untrained_turns) if self.untrained_turns else None,
        }
        return {name: value for name, value in attributes.items() if value}


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer in one turn. ``text`` has no stop token. ``parsed`` is set when the server parsed the tool
    calls; ``cut``: ``ask`` was cancelled, and this is the part that its reader had received."""

    text: str
    finish_reason: FinishReason
    generation: Generation
    parsed: AnswerParts | None = None
    cut: bool = False

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(kw_only=True, eq=False)
class Session(ABC):
    """A conversation as the loop of turns needs it. ``RolloutSession`` works on tokens, ``ChatSession`` on messages."""

    messages: Any  # a list of chat messages
    tools: ToolManager | None = None
    parser: ToolParser | None = None
    rollout_id: str = ""
    max_turns: int | None = None
    turns: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stats = RolloutStats(tools=tuple(getattr(self.tools, "names", ())))

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Append messages of the user, a tool or the environment."""
        self.messages.extend(map(dict, messages))

    @property
    def reader(self) -> AnswerReader:
        """The reader that splits answers into thinking, content and calls."""
        return AnswerReader(self.parser)

    @abstractmethod
    async def ask(self) -> Answer:
        """Let the model answer, append the answer, and set ``stats.stop_reason`` from its finish reason."""

    @contextmanager
    def _one_more_turn(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Append ``messages`` and count an answer in flight. Raises ``RolloutStopped`` at a limit, and
        ``ContextOverflowError`` where the task itself does not fit."""
        self.add(*messages)
        if self.max_turns is not None and len(self.turns) + self.stats.asking >= self.max_turns:
            raise self._stopped(StopReason.MAX_TURNS, f"the rollout has had its {self.max_turns} turns")
        self.stats.asking += 1
        try:
            yield
        except ContextOverflowError as error:
            if not self.turns:
                raise
            raise self._stopped(StopReason.CONTEXT_OVERFLOW, str(error)) from error
        finally:
            self.stats.asking -= 1

    def _stopped(self, reason: StopReason, message: str) -> RolloutStopped:
        self.stats.stop_reason = reason
        return RolloutStopped(reason, message)


class RolloutSession(Session):
    """The conversation of one rollout with one engine. Concurrent ``ask`` calls need a ``branch`` each.

    ``tools`` are declared to the model; ``SGLangLitAgent.run`` executes the calls that ``parser`` reads from answers.
    ``max_turns`` limits the answers of the rollout over all branches; ``max_trajectory_tokens`` the tokens of one
    conversation, prompt and answers: each answer may use the rest. Unless ``traced`` is off each turn is written as a
    span, by ``write(attributes, started)`` or by Agent Lightning's active tracer. With ``keep_all`` off, turns have
    their messages and log-probs in their spans only, and the caller must not edit a message. ``seed`` and
    ``oldest_version`` are ``limits_of`` the rollout.
    """

    role = ""  # of a branch, whose turns are trained with the role's reward (``set_reward``)

    def __init__(
        self,
        *,
        client: Any,  # ``generate`` as ``SGLangClient`` has it
        template: ChatTemplate,
        sampling: SamplingParams,
        messages: Sequence[Mapping[str, Any]],
        model: str = "",
        max_trajectory_tokens: int | None = None,
        traced: bool = True,
        keep_all: bool = True,
        write: SpanWriter | None = None,
        keep_stop_token: bool = False,
        images: Images | None = None,
        image_settings: ImageSettings = ImageSettings(),  # noqa: B008 - frozen
        seed: str = "",
        oldest_version: int | None = None,
        **options: Any,
    ) -> None:
        context_options: Any = {"keep_stop_token": keep_stop_token, "copies": keep_all}
        if template.reader.parser is not None and (parser := options.get("parser")) is not None:
            context_options["reader"] = template.reader_with(parser)
        self.context = ChatContext(template=template, messages=messages, **context_options)
        super().__init__(messages=messages, **options)
        self.sampling = sampling
        self.max_trajectory_tokens = max_trajectory_tokens
        self.tokenizer = template.tokenizer
        self.images: Images = {} if images is None else images
        self._image_settings = image_settings
        self.rng = random.Random(seed or None)
        """For the agent's own draws, which a deterministic run repeats."""
        self._seed, self._limits = seed, {} if oldest_version is None else {"oldest_version": oldest_version}
        self._client = client
        self._encoder = TurnEncoder(model=model or None, copies=keep_all) if traced else None
        self._write = write or write_span
        self._keep_all = keep_all
        self.last_turn: int | None = None  # index of the turn with which the conversation's tokens end

    @property
    def stream(self) -> str:
        """The encoder's id, which distinguishes this session's spans from other encoders'; empty without spans."""
        return self._encoder.stream if self._encoder is not None else ""

    @property
    def messages(self) -> list[Message]:
        """The conversation so far. After an edit the next prompt forks; earlier turns are still trained as sampled."""
        return self.context.messages

    @messages.setter
    def messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.context.messages = [dict(message) for message in messages]

    @property
    def reader(self) -> AnswerReader:
        return self.context.template.reader_with(self.parser)

    async def ask(
        self,
        *messages: Mapping[str, Any],
        sampling: SamplingParams | None = None,
        fork: ForkReason | None = None,
        untrained: str = "",
        delivered: Callable[[], Progress | None] = lambda: None,
        **options: Any,
    ) -> Answer:
        """Append ``messages``, let the model answer, append the answer. A final assistant message is continued. Raises
        ``RolloutStopped`` when a limit leaves no room for an answer, and the client's typed errors.

        ``fork`` is the reason for leaving the previous conversation, where the caller knows more than a comparison of
        tokens; ``untrained`` the reason why the answer is context only; ``options`` go to the client's ``generate``. If
        ``ask`` is cancelled after a part of the answer was ``delivered`` to a reader, that part becomes the answer,
        with the finish reason "abort".
        """
        cut, limited = False, sampling or self.sampling
        prompt_ids: Sequence[int] = []
        prompt_images: tuple[Image, ...] = ()
        image_starts: list[int] = []
        filed: FiledReplay | None = None
        with self._one_more_turn(messages):
            context, started, history = self.context, time.time(), list(self.messages)
            try:
                if prompt_images := await take_images(context.messages, self.images, self._image_settings):
                    history = list(self.messages)
                    await prepare(self.tokenizer, prompt_images)
                prompt_ids = await context.prompt()
                limited = self._within_limits(limited, len(prompt_ids))
                if self._seed:
                    limited = limited.seeded(self._seed, *self.stats.count_prompt(prompt_ids))
                if prompt_images:
                    vision: Any = self.tokenizer  # a VisionTokenizer, as ``prepare`` has checked
                    located = await run_in_thread(vision.engine_input, prompt_ids, prompt_images)
                    options["images"], image_starts = located
                if limited.routed_experts is not None:
                    options["experts_start"] = self._experts_start(prompt_ids, prompt_images, image_starts)
                # one key per rollout: a router keeps its turns on the worker that has their prefix in its KV cache
                options |= {"routing_key": self.rollout_id or None, **self._limits}
                generation = await self._client.generate(prompt_ids, limited, **options)
                if self._encoder is not None and limited.replay_files is not None:
                    filed = await self._file_replay(limited.replay_files, generation)
            except asyncio.CancelledError:
                if (progress := delivered()) is None:
                    raise
                generation = progress.so_far()
                cut = True
        boundaries = context.open_boundaries
        context.add_answer(prompt_ids, generation)
        self.stats.open_boundaries += context.open_boundaries - boundaries
        prompt = context.token_ids[: len(prompt_ids)]
        base_turn, shared, fork = self._continuation(prompt, prompt_images, image_starts, fork)
        self.last_turn = len(self.turns)
        if generation.output_ids and not untrained:
            untrained = _lost_replay(limited, generation, len(prompt_ids))
        details: Any = {"base_turn": base_turn, "kept_tokens": shared, "fork": fork, "untrained": untrained}
        details |= {"messages": history, "images": prompt_images, "filed": filed}
        self.turns.append(Turn.from_generation(prompt, generation, **details))
        if self._encoder is not None:
            role = {names.ROLE: self.role} if self.role else {}
            self._write({**self._encoder.encode(self.turns[-1]), **role}, started)
            if not self._keep_all:
                self.turns[-1] = replace(self.turns[-1], messages=None, log_probs=None)
        self.stats.stop_reason = _STOP_REASONS.get(generation.finish_reason, StopReason.STOP)
        return Answer(generation.text, generation.finish_reason, generation, cut=cut)

    def _continuation(
        self, prompt: TokenArray, images: tuple[Image, ...], image_starts: Sequence[int], requested: ForkReason | None
    ) -> tuple[int | None, int, ForkReason | None]:
        """The turn that the next one continues, the number of tokens that it keeps of it, and the reason of a fork."""
        base_turn, shared, fork = self.last_turn, self.context.kept_tokens, self.context.fork
        if base_turn is None and self.turns:  # another conversation of the rollout, perhaps with the first one's prefix
            base_turn, first = 0, self.turns[0].token_ids
            shared = common_prefix(first, prompt)
            if shared < len(first):
                fork = ForkReason.BRANCH if shared == len(prompt) else ForkReason.NEW_CONTEXT
        if images and base_turn is not None:
            trimmed = trim_at_changed_image(shared, image_starts, images, self.turns[base_turn].images)
            shared, fork = trimmed, fork or (ForkReason.EDITED_HISTORY if trimmed < shared else None)
        return base_turn, shared, refine_fork(fork, requested)

    def branch(
        self, messages: Sequence[Mapping[str, Any]], *, template: ChatTemplate | None = None, role: str = ""
    ) -> RolloutSession:
        """Another conversation of the same rollout, whose turns count and are trained as well. It shares this one's
        tokens as far as the messages are equal; with another ``template`` none."""
        branch = copy.copy(self)
        branch.role = role or self.role
        if template is None:
            branch.context = self.context.branch(messages)
        else:
            branch.context = ChatContext(template=template, messages=messages, copies=self._keep_all)
            branch.last_turn = None
        return branch

    def set_reward(self, reward: Any) -> None:
        """Set the reward of this branch's role, a number or named numbers, which replaces the rollout's reward."""
        if not self.role:
            raise ConfigError("only a branch with a role has its own reward: session.branch(messages, role=...)")
        self.stats.rewards[self.role] = reward

    def _experts_start(self, prompt_ids: Sequence[int], images: Sequence[Image], image_starts: Sequence[int]) -> int:
        """The first position whose routed experts the engine returns: the continued turn has the earlier ones."""
        base = self.turns[self.last_turn or 0] if self.turns else None
        if base is None:
            return 0
        same = common_prefix(base.token_ids, token_array(prompt_ids, name="prompt_ids"))
        same = trim_at_changed_image(same, image_starts, images, base.images)
        return min(same, base.experts_end, len(prompt_ids) - 1)  # an answer of no rows at all is an error to slime

    async def _file_replay(self, directory: str, answer: Generation) -> FiledReplay | None:
        """Write an answer's replay data to the run's directory, if it has any."""
        if answer.experts is None and answer.nucleus is None:
            return None
        return await run_in_thread(file_replay, directory, self.rollout_id, self.stream, answer.experts, answer.nucleus)

    def _within_limits(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        limit = self.max_trajectory_tokens
        if limit is None:
            return sampling
        if prompt_tokens < limit:
            return replace(sampling, max_new_tokens=min(sampling.max_new_tokens, limit - prompt_tokens))
        stopped = self._stopped(StopReason.LENGTH, f"the trajectory has reached its {limit} tokens")
        if self.turns:
            raise stopped
        raise ContextOverflowError(f"the prompt has {prompt_tokens} tokens, max_trajectory_tokens is {limit}")


def _lost_replay(sampling: SamplingParams, generation: Generation, prompt_tokens: int) -> str:
    """The reason why a cut answer cannot be trained, if its replay data was lost with the stream; else empty."""
    end = prompt_tokens + len(generation.output_ids) - 1
    if sampling.routed_experts is not None and (generation.experts is None or generation.experts.end < end):
        return "no_routed_experts"
    return "no_nucleus" if sampling.nucleus and generation.nucleus is None else ""


def write_span(attributes: dict[str, Any], started: float) -> None:
    """Write the span of one model call by Agent Lightning's active tracer. Raises ``RolloutError`` without a tracer."""
    from agl_slime.support.agl import TraceStatus, get_active_tracer

    tracer = get_active_tracer()
    if tracer is None:
        raise RolloutError("no tracer is active: run the agent in an Agent Lightning runner", reason="no_tracer")
    status = TraceStatus(status_code="OK")
    tracer.create_span(names.GENERATE_SPAN, attributes=attributes, timestamp=started, status=status)
