"""``Attempt``: one attempt at a rollout at the gateway: its conversations, pending responses and spans."""

from __future__ import annotations

import asyncio
import json
import operator
import secrets
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agl_slime.agent.access import LLM_RESOURCE, EngineAccess, sampling_of, template_key
from agl_slime.agent.images import prepare
from agl_slime.agent.session import RolloutSession, RolloutStopped
from agl_slime.engine.client.resumable import Progress
from agl_slime.errors import ContextOverflowError, EngineProtocolError, GatewayRequestError
from agl_slime.gateway.bodies import Bodies
from agl_slime.gateway.calls import Call, CallResult, Choice
from agl_slime.gateway.declared import explain_once
from agl_slime.gateway.pending import PendingResponse, RecentResponses
from agl_slime.gateway.raw import RawTree
from agl_slime.gateway.reading import Reading, served_message
from agl_slime.gateway.sampling import sampling_for
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.gateway.tree import Match, Node, TimedAnswer, Tree, UntrainedTurns
from agl_slime.support.agl_types import LLM
from agl_slime.tokens import attributes as names
from agl_slime.tokens.codec import TokenArray
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.formats import parser_for
from agl_slime.tokens.images import Image
from agl_slime.tokens.reader import AnswerReader
from agl_slime.tokens.template import Message
from agl_slime.tokens.thinking import thinking_arguments
from agl_slime.tokens.tokenizer import RENDERER_ARGUMENTS, ChatTokenizer

SpanSink = Callable[[str, dict[str, Any], float], None]
"""Takes a span's name, attributes and start time; called on the gateway's thread."""

MAX_REQUESTS = 10_000
"""Most requests of a rollout in all; more get 429."""
_MAX_EMPTY_ANSWERS = 8  # after a limit; then requests are refused, as an agent that ignores answers would ask for ever
# Arguments of apply_chat_template that clients may not set: a template is a program, others change the result's type.
_RESERVED_KWARGS = RENDERER_ARGUMENTS | {"chat_template"}
_MAX_STRAY_PATHS = 16  # unserved paths that are counted by name


@dataclass(frozen=True, slots=True)
class _TemplateArguments:
    """The template arguments ``kwargs`` of a request's ``fields``, and the ``key`` of its tree. Fields about thinking
    are ``ineffective`` if no argument serves them."""

    fields: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: str
    ineffective: frozenset[str]


@dataclass(eq=False, kw_only=True)
class Attempt:
    """One attempt. It lives on the gateway's loop; ``admit`` and ``end`` are safe in any thread.

    Args:
        roles: the models that the rollout may ask, by resource name; ``main_llm`` is trained.
        secret: the key that clients show.
        histories: messages that responses may continue, by the id of a response or conversation.
        counts: numbers of requests by path, answers, retries, overridden parameters, refusals by status.
        limits: ``limits_of`` the rollout.
    """

    rollout_id: str
    attempt_id: str
    roles: Mapping[str, LLM]
    settings: GatewaySettings
    access: EngineAccess
    write: SpanSink
    flush: Callable[[], Awaitable[None]] | None = None
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(18))
    closed: bool = False
    bodies: Bodies = field(default_factory=Bodies)
    histories: dict[str, list[Message]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    limits: Mapping[str, Any] = field(default_factory=dict)
    failure: EngineProtocolError | None = None
    """The engine's answer that cannot be right, which fails the rollout whatever its agent makes of it."""
    recent: RecentResponses = field(default_factory=RecentResponses)
    idle: threading.Event = field(default_factory=threading.Event)  # set when the attempt has ended and nothing is left
    _written_counts: Counter[str] = field(default_factory=Counter)  # ``counts`` on the last span
    running: int = 0  # requests in flight
    _pending: set[PendingResponse] = field(default_factory=set)
    _unserved_paths: int = 0
    _arguments: _TemplateArguments | None = None  # of the last request
    _trees: dict[tuple[str, str], Tree] = field(default_factory=dict)
    _first_session: RolloutSession | None = None
    _clock: int = 0
    _empty_answers: int = 0
    _reports_untrained: bool = False  # a span listed untrained turns
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _spans: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    _images: dict[str, Image] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._untrained = UntrainedTurns(self.settings.branches)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def admit(self, key: bytes) -> None:
        """Begin a request of digest ``key``; ``release`` ends it. Raises ``GatewayRequestError`` at the limit of
        concurrent requests and after the end."""
        self._check_open()
        if self.running >= self.settings.max_in_flight:
            self.recent.note_unanswered(key)
            message = f"rollout {self.rollout_id} has {self.running} requests in flight, the most it may have"
            raise GatewayRequestError(message, status=429, code="rate_limit_exceeded")
        self.running += 1

    def release(self) -> None:
        self.running -= 1

    def count_request(self, name: str, *, served: bool) -> None:
        """Count a request by its method and path; unserved paths by name only while there are few."""
        if not served and name not in self.counts:
            self._unserved_paths += 1
            name = name[:80] if self._unserved_paths <= _MAX_STRAY_PATHS else "other paths"
        self.counts[name] += 1

    def _check_open(self) -> None:
        if self.closed:
            message = f"rollout {self.rollout_id} has ended; requests are no longer answered"
            raise GatewayRequestError(message, status=410, code="rollout_ended")

    def end(self) -> bool:
        """Refuse further requests. Returns whether nothing is pending; else call ``cancel_pending``."""
        with self._lock:
            self.closed = True
            return not self._pending

    def cancel_pending(self) -> None:
        """Cancel pending responses. On the gateway's loop."""
        for response in self._pending:
            response.task.cancel()

    def _on_done(self, response: PendingResponse) -> None:
        error = None if response.task.cancelled() else response.task.exception()
        self.failure = error if isinstance(error, EngineProtocolError) else self.failure
        with self._lock:
            self._pending.discard(response)
            if not response.usable:
                self.recent.note_unanswered(response.key)
            if self.closed and not self._pending:
                self.idle.set()

    def write_summary(self) -> None:
        """Write a last span with the counts of requests, if they have changed since the last answer's span."""
        if self.counts != self._written_counts:
            self.write(names.GATEWAY_SPAN, self._rollout_attributes(), time.time())

    def forget(self) -> None:
        """Drop the conversations. Their reference cycles are broken, so that they are freed at once: the garbage
        collector took a seventh of the time with 1,024 rollouts in flight."""
        for tree in self._trees.values():
            tree.forget()
        self._trees.clear()
        self.recent = RecentResponses()
        self.bodies = Bodies()

    # -- requests -----------------------------------------------------------------------------------------------------

    def respond(self, call: Call, *, role: str, key: bytes, retry: bool, prefix: str = "") -> PendingResponse:
        """The response to a request; for a retry the response to the original request, if there is one."""
        if retry and (response := self.recent.find(key)) is not None:
            self.counts["retries_answered"] += 1
            return response
        if self.counts["requests"] >= MAX_REQUESTS:
            message = f"rollout {self.rollout_id} has made {MAX_REQUESTS} requests, the most it may make"
            raise GatewayRequestError(message, status=429, code="rate_limit_exceeded")
        with self._lock:
            self._check_open()
            response = PendingResponse(key=key, n=call.n, prefix=prefix, answer=partial(self._answer, call, role))
            self._pending.add(response)
        self.counts["requests"] += 1
        response.task.add_done_callback(lambda _: self._on_done(response))
        self.recent.add(response, len(self._pending))
        return response

    async def decoder(self) -> Callable[[list[int]], str]:
        """A function from token ids to text, for log-probs."""
        tokenizer = await self.access.tokenizer(self.roles[LLM_RESOURCE])
        texts: dict[tuple[int, ...], str] = {}  # the top tokens of positions repeat

        def decode(ids: list[int]) -> str:
            if (key := tuple(ids)) not in texts:
                texts[key] = tokenizer.decode(ids, skip_special_tokens=False)
            return texts[key]

        return decode

    async def _answer(self, call: Call, role: str, response: PendingResponse) -> CallResult:
        llm = self.roles.get(role) or self.roles[LLM_RESOURCE]
        tokenizer = await self.access.tokenizer(llm)
        for kind in call.server_tools:
            self.counts[f"left_out/{kind}"] += 1
            explain_once(kind)
        if call.compacts and not call.tools:
            call = replace(call, tools=self._tools_of(role, call.messages))
        tree = self._tree(role, call, tokenizer, llm)
        self.counts.update(f"overridden/{name}" for name in self._template_arguments(call, tokenizer, llm).ineffective)
        reader = self._reader(call, tree, tokenizer)
        trained = role in (LLM_RESOURCE, *self.settings.trained_models)
        sampling, untrained = sampling_for(
            call,
            sampling_of(llm),
            trained=trained,
            constraints=self.settings.constraints,
            parser=reader.parser,
            overridden=self.counts,
        )
        if not trained:
            untrained = f"role:{role}"
        if call.tool_choice == "none":
            reader = replace(reader, parser=None)
        reading = Reading(None if call.raw else reader, sampling.stop)
        self._images.update(call.images)
        match = tree.find(call.messages)
        self.recent.forget(match.node)
        requested_at = self._clock = self._clock + 1
        fork = self._fork_reason(call, role, tree, match)

        async def sample(index: int) -> tuple[Choice, TokenArray, int]:
            conversation = tree.acquire(match)
            session = conversation.session
            offered = (*session.stats.tools, *(tool["function"]["name"] for tool in call.offered))
            session.stats.tools = tuple(dict.fromkeys(offered))

            def on_progress(progress: Progress) -> None:
                response.update(index, reading.visible(progress.text), progress)

            options: dict[str, Any] = {"on_progress": on_progress} if call.stream else {}
            if call.top_log_probs:
                options["top_log_probs"] = call.top_log_probs
            options |= {"fork": fork, "untrained": untrained}
            try:
                answer = await session.ask(sampling=sampling, delivered=lambda: response.delivered[index], **options)
            except BaseException:
                conversation.busy = False
                raise
            generation = answer.generation
            choice, ids = reading.choice(generation, call, session)
            served, sampled = served_message(call.as_returned(choice), call.messages[-1]), session.messages[-1]
            node = tree.add_answer(match, conversation, sampled=sampled, served=served, ids=ids, cut=answer.cut)
            response.nodes.append(node)
            if call.store_from is not None and index == 0:
                self.histories[response.id] = [*call.messages[call.store_from :], served]
                if call.conversation:
                    self.histories[call.conversation] = self.histories[response.id]
            self._note_answer(node, match, (id(tree), node.parent_state), requested_at)
            self.counts["answers"] += 1
            self._write_spans({names.RESPONSE_ID: response.id, names.ROLE: role})
            if answer.cut:  # the client has left; the part that it got is written
                raise asyncio.CancelledError
            return choice, session.turns[-1].prompt_ids, generation.cached_tokens

        try:
            samples = await _gather_or_cancel([sample(index) for index in range(call.n)])
        except RolloutStopped as stopped:
            if isinstance(stopped.__cause__, ContextOverflowError):  # on this error clients may shorten the prompt
                raise stopped.__cause__ from stopped
            return self._stopped(call, response, stopped)
        finally:
            if self.flush is not None:
                await self.flush()
        return CallResult(
            id=response.id,
            created=response.created,
            model=call.model or llm.model,
            choices=tuple(choice for choice, _, _ in samples),
            prompt_ids=samples[0][1],
            cached_tokens=samples[0][2],
            compacted=call.messages if call.compacts else (),
        )

    def _fork_reason(self, call: Call, role: str, tree: Tree, match: Match) -> ForkReason | None:
        if call.summary_index is not None and match.length <= call.summary_index:
            return ForkReason.COMPACTION
        return match.fork or (self._tools_changed(role, tree, call.messages) if match.length == 0 else None)

    def _reader(self, call: Call, tree: Tree, tokenizer: Any) -> AnswerReader:
        reader = tree.template.reader
        if call.offered and reader.parser is None:  # parser_for warns if no parser fits
            reader = replace(reader, parser=parser_for(tokenizer, tree.template.kwargs))
        return reader

    def _stopped(self, call: Call, response: PendingResponse, stopped: RolloutStopped) -> CallResult:
        """The empty answer after a limit, as of a model that stops at once."""
        self._empty_answers += 1
        self.write(names.GATEWAY_SPAN, {names.RESPONSE_ID: response.id, **self._rollout_attributes()}, time.time())
        self.counts[f"stopped/{stopped.reason.value}"] += 1
        if self._empty_answers > _MAX_EMPTY_ANSWERS:
            message = f"{stopped}, and the agent continues to ask"
            raise GatewayRequestError(message, status=429, code="rate_limit_exceeded")
        finish = "stop" if stopped.reason.value == "max_turns" else "length"
        choices = (Choice(finish=finish),) * call.n
        return CallResult(id=response.id, created=response.created, model=call.model, choices=choices)

    async def prompt_ids(self, call: Call) -> list[int]:
        """The ids of a request's prompt, in which earlier answers have their sampled ids."""
        llm = self.roles[LLM_RESOURCE]
        tokenizer = await self.access.tokenizer(llm)
        tree = self._tree(LLM_RESOURCE, call, tokenizer, llm)
        match = tree.find([*call.messages])
        if match.conversation is None:
            context = ChatContext(template=tree.template, messages=call.messages, copies=False)
        else:
            context = match.conversation.session.branch(match.messages).context
        await prepare(tokenizer, [*call.images.values()])
        return [*await context.prompt()]

    # -- conversations ------------------------------------------------------------------------------------------------

    def _tree(self, role: str, call: Call, tokenizer: ChatTokenizer, llm: LLM) -> Tree:
        arguments = self._template_arguments(call, tokenizer, llm)
        key = role, "" if call.raw else arguments.key
        if (tree := self._trees.get(key)) is not None:
            return tree
        template = self.access.template(tokenizer, [*call.tools] or None, arguments.kwargs, llm=llm)
        spans = self._spans

        def open_session(messages: list[Message]) -> RolloutSession:
            if self._first_session is not None:
                return self._first_session.branch(messages, template=template)
            self._first_session = RolloutSession(
                client=self.access.client(llm, tokenizer),
                sampling=sampling_of(llm),
                messages=messages,
                template=template,
                rollout_id=self.rollout_id,
                model=llm.model,
                max_turns=self.settings.max_turns,
                max_trajectory_tokens=self.settings.max_trajectory_tokens,
                images=self._images,
                image_settings=self.settings.images,
                keep_all=False,
                **self.limits,
                write=lambda attributes, started: spans.append((attributes, started)),
            )
            return self._first_session

        tree = self._trees[key] = (RawTree if call.raw else Tree)(template, open_session)
        tree.tools = call.tools
        return tree

    def _template_arguments(self, call: Call, tokenizer: ChatTokenizer, llm: LLM) -> _TemplateArguments:
        fields = call.tools, call.template_kwargs, call.thinking, llm
        if self._arguments is not None and all(map(operator.is_, fields, self._arguments.fields)):
            return self._arguments
        tools, kwargs = [*call.tools] or None, dict(call.template_kwargs)
        if reserved := sorted(_RESERVED_KWARGS & kwargs.keys()):
            param = f"chat_template_kwargs.{reserved[0]}"
            raise GatewayRequestError(f"{param} is not a client's to set; the run decides on it", param=param)
        ineffective = call.thinking.fields
        if ineffective and not call.raw:
            template = self.access.template(tokenizer, tools, kwargs, llm=llm)
            arguments, ineffective = thinking_arguments(template, call.thinking)
            kwargs |= arguments
        self._arguments = _TemplateArguments(fields, kwargs, template_key(tools, kwargs), ineffective)
        return self._arguments

    def _tools_changed(self, role: str, tree: Tree, messages: list[Message]) -> ForkReason | None:
        """The reason for a fork when a conversation continues with other tools, which its prompt lists."""
        siblings = (sibling for (name, _), sibling in self._trees.items() if name == role and sibling is not tree)
        return ForkReason.EDITED_HISTORY if any(sibling.find([*messages]).node for sibling in siblings) else None

    def _tools_of(self, role: str, messages: list[Message]) -> tuple[dict[str, Any], ...]:
        """The tools of the conversation that ``messages`` continue."""
        trees = (tree for (name, _), tree in self._trees.items() if name == role)
        matches = ((tree.find([*messages]).length, tree.tools) for tree in trees)
        return max(matches, default=(0, ()), key=operator.itemgetter(0))[1]

    def _note_answer(self, node: Node, match: Match, place: tuple[int, int], requested_at: int) -> None:
        self._clock += 1
        self._untrained.add(TimedAnswer(node, match.node, place, requested_at, self._clock))
        assert self._first_session is not None
        self._first_session.stats.untrained_turns = self._untrained.turns

    # -- spans --------------------------------------------------------------------------------------------------------

    def _write_spans(self, attributes: Mapping[str, str]) -> None:
        spans = [*self._spans]
        self._spans.clear()
        for turn, started in spans:
            self.write(names.GENERATE_SPAN, {**turn, **attributes, **self._rollout_attributes()}, started)

    def _rollout_attributes(self) -> dict[str, Any]:
        """Attributes of the whole rollout; every span has them, and the last span's count."""
        self._written_counts = +self.counts
        attributes = {names.GATEWAY: json.dumps(self._written_counts)}
        roles = dict.fromkeys((*self.roles, *self.settings.trained_models, *self.settings.untrained_models))
        if len(roles) > 1:
            attributes[names.ROLES] = json.dumps([*roles])
        if self._first_session is None:
            return attributes
        untrained = self._first_session.stats.untrained_turns
        self._reports_untrained = self._reports_untrained or bool(untrained)
        if self._reports_untrained:  # also when none is left
            attributes |= {names.STREAM: self._first_session.stream, names.UNTRAINED_TURNS: json.dumps(untrained)}
        return self._first_session.stats.attributes() | attributes


async def _gather_or_cancel(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """The results; when one coroutine fails, the others are cancelled."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
