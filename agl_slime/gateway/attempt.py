"""One attempt at one rollout, as the gateway sees it: its conversations, what was asked, and what is written of it."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from agl_slime.errors import ContextOverflowError, GatewayRequestError
from agl_slime.gateway.bodies import Bodies
from agl_slime.gateway.branches import AnswerInTime, LeftOut
from agl_slime.gateway.calls import Answered, Call, Choice
from agl_slime.gateway.raw import RawTree
from agl_slime.gateway.reading import Reading, served_message
from agl_slime.gateway.sampling import sampling_for
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.gateway.tree import Match, Node, Tree
from agl_slime.gateway.work import Work
from agl_slime.rollout.access import LLM_RESOURCE, EngineAccess, sampling_of, template_key
from agl_slime.rollout.images import prepare
from agl_slime.rollout.session import RolloutSession, RolloutStopped
from agl_slime.sglang.resumable import Progress
from agl_slime.support.agl import LLM
from agl_slime.tokens.codec import TokenArray
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.formats import parser_for
from agl_slime.tokens.images import Image
from agl_slime.tokens.template import Message
from agl_slime.tokens.tokenizer import ChatTokenizer
from agl_slime.trace import attributes as names

SpanSink = Callable[[str, dict[str, Any], float], None]
"""Takes a span's name, attributes and time of start; from the gateway's thread."""

# Answers that are kept for a client that asks for the same again because it did not get them.
_KEPT_ANSWERS, _UNANSWERED_KEPT = 32, 256
# After a limit is reached, so many answers are empty before requests are refused: an agent that does not look at
# answers would ask for ever.
_EMPTY_ANSWERS = 8
# Arguments of apply_chat_template: a template of a client's own is a program, the others change what comes back.
_NOT_FOR_TEMPLATES = frozenset(("chat_template", "conversation", "messages", "tools", "tokenize", "tokenizer_kwargs"))
_NOT_FOR_TEMPLATES |= {"add_generation_prompt", "continue_final_message", "padding", "truncation", "max_length"}
_NOT_FOR_TEMPLATES |= {"return_tensors", "return_dict", "return_assistant_tokens_mask"}
# So many paths that nobody serves are counted by name.
_STRAY_PATHS = 16


@dataclass(eq=False, kw_only=True)
class Attempt:
    """``roles`` are the models that this rollout may ask, by the name of their resource; what ``main_llm`` says is
    trained. ``secret`` is what its clients show. Lives on the gateway's loop; ``begin`` and ``end`` are safe in any
    thread."""

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
    kept: dict[str, list[Message]] = field(default_factory=dict)
    """What responses may go on from, by their ids."""
    seen: Counter[str] = field(default_factory=Counter)
    """What came: requests by path, answers, retries, overridden settings, refusals by status."""
    _told: Counter[str] = field(default_factory=Counter)
    _running: int = 0
    _works: deque[Work] = field(default_factory=deque)
    _under_way: set[Work] = field(default_factory=set)
    _strays: int = 0
    _to_begin: Counter[bytes] = field(default_factory=Counter)  # requests without an answer that may be sent again
    _tools: tuple[Any, Any, str] = (None, None, "")  # and the arguments of the template, and their key
    _trees: dict[tuple[str, str], Tree] = field(default_factory=dict)
    _root: RolloutSession | None = None
    _clock: int = 0
    _empty: int = 0
    _says_left_out: bool = False  # it was said that turns are not trained
    _lock: threading.Lock = field(default_factory=threading.Lock)
    quiet: threading.Event = field(default_factory=threading.Event)
    _spans: list[tuple[dict[str, Any], float]] = field(default_factory=list)
    _images: dict[str, Image] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._left_out = LeftOut(self.settings.branches)

    # -- beginning and end --------------------------------------------------------------------------------------------

    def begin(self, key: bytes) -> None:
        """A request has come, ``key`` is what it asks. Raises ``GatewayRequestError`` when it is one too many, or too
        late."""
        self._check_open()
        if self._running >= self.settings.max_in_flight:
            self._unanswered(key)
            raise GatewayRequestError(
                f"rollout {self.rollout_id} has {self._running} requests under way, the most it may have",
                status=429,
                code="rate_limit_exceeded",
            )
        self._running += 1

    def done(self) -> None:
        """A request has been answered, or its client has hung up."""
        self._running -= 1

    def _unanswered(self, key: bytes) -> None:
        self._to_begin[key] += 1
        if len(self._to_begin) > _UNANSWERED_KEPT:
            del self._to_begin[next(iter(self._to_begin))]

    def came(self, what: str, *, served: bool) -> None:
        """Count a request by its method and path; paths that nobody serves by name only as long as they are few."""
        if not served and what not in self.seen:
            self._strays += 1
            what = what[:80] if self._strays <= _STRAY_PATHS else "other paths"
        self.seen[what] += 1

    def _check_open(self) -> None:
        if self.closed:
            told = f"rollout {self.rollout_id} has ended; nothing is answered any more"
            raise GatewayRequestError(told, status=410, code="rollout_ended")

    @property
    def running(self) -> int:
        """Requests under way."""
        return self._running

    def end(self) -> bool:
        """Nothing further is begun. Whether nothing is under way; else ``cut`` ends that."""
        with self._lock:
            self.closed = True
            return not self._under_way

    def cut(self) -> None:
        """Cancel what is under way; on the gateway's loop."""
        for work in self._under_way:
            work.task.cancel()

    def _ended(self, work: Work) -> None:
        with self._lock:
            self._under_way.discard(work)
            if not work.stands:
                self._unanswered(work.key)
            if self.closed and not self._under_way:
                self.quiet.set()

    def write_summary(self) -> None:
        """The last span: what came in all, where the last answer's does not say it already."""
        if self.seen != self._told:
            self.write(names.GATEWAY_SPAN, self._known(), time.time())

    def forget(self) -> None:
        """Let go of the conversations, which refer to this attempt and to each other: they are freed with it, and not
        when the garbage collector finds them, which took a seventh of the time with 1,024 in flight."""
        for tree in self._trees.values():
            tree.forget()
        self._trees.clear()
        self._works.clear()
        self.bodies = Bodies()

    # -- requests -----------------------------------------------------------------------------------------------------

    def work(self, call: Call, *, role: str, key: bytes, retry: bool, prefix: str = "") -> Work:
        """The work on a request; of one that its client sends again, what was begun the first time."""
        if retry and (begun := self._begun(key)) is not None:
            self.seen["retries_answered"] += 1
            return begun
        if self.seen["requests"] >= self.settings.max_requests:
            raise GatewayRequestError(
                f"rollout {self.rollout_id} has made {self.settings.max_requests} requests, the most it may make",
                status=429,
                code="rate_limit_exceeded",
            )
        with self._lock:
            self._check_open()
            work = Work(key=key, n=call.n, prefix=prefix, answer=partial(self._answer, call, role))
            self._under_way.add(work)
        self.seen["requests"] += 1
        work.task.add_done_callback(lambda _: self._ended(work))
        self._works.append(work)
        while len(self._works) > _KEPT_ANSWERS + len(self._under_way):
            self._works.popleft()
        return work

    def _got(self, node: Node | None) -> None:
        """A client goes on from an answer, so it will not ask for it again."""
        if node is not None:
            self._works = deque(work for work in self._works if not work.told or node not in work.nodes)

    def _begun(self, key: bytes) -> Work | None:
        """What was begun for a request that its client sends again, of several equal ones one that nobody has got;
        ``None`` where it was never begun, or could be several."""
        same = [work for work in self._works if work.key == key and work.stands]
        lost = [work for work in same if work.task.done() and not work.told and not work.waiting]
        if lost:
            return lost[0]
        if self._to_begin[key]:
            self._to_begin[key] -= 1
            return None
        return same[0] if len(same) == 1 else None

    async def decoder(self) -> Callable[[list[int]], str]:
        """How token ids are read, for log-probs."""
        tokenizer = await self.access.tokenizer(self.roles[LLM_RESOURCE])
        texts: dict[tuple[int, ...], str] = {}  # among the likeliest tokens of each place are the same ones

        def decode(ids: list[int]) -> str:
            if (key := tuple(ids)) not in texts:
                texts[key] = tokenizer.decode(ids, skip_special_tokens=False)
            return texts[key]

        return decode

    async def _answer(self, call: Call, role: str, work: Work) -> Answered:
        llm = self.roles.get(role) or self.roles[LLM_RESOURCE]
        tokenizer = await self.access.tokenizer(llm)
        tree = self._tree(role, call, tokenizer, llm)
        reader = tree.template.reader
        if call.tools and reader.parser is None:
            parser_for(tokenizer, tree.template.kwargs)  # says that nobody reads its calls
        trained = role in (LLM_RESOURCE, *self.settings.trained_models)
        sampling, untrained = sampling_for(
            call,
            sampling_of(llm),
            trained=trained,
            constraints=self.settings.constraints,
            parser=reader.parser,
            overridden=self.seen,
        )
        if not trained:
            untrained = f"role:{role}"
        if call.tool_choice == "none":
            reader = replace(reader, parser=None)
        reads = Reading(None if call.raw else reader, sampling.stop)
        self._images.update(call.images)
        match = tree.find(call.messages)
        self._got(match.node)
        begun = self._clock = self._clock + 1
        told_by_tools = self._changed_tools(role, tree, call.messages) if match.known == 0 else None

        async def one(index: int) -> tuple[Choice, TokenArray, int]:
            line = tree.take(match)
            session = line.session
            offered = (*session.stats.tools, *(tool["function"]["name"] for tool in call.tools))
            session.stats.tools = tuple(dict.fromkeys(offered))

            def on_progress(progress: Progress) -> None:
                work.update(index, reads.visible(progress.text), progress)

            how: dict[str, Any] = {"on_progress": on_progress} if call.stream else {}
            if call.top_log_probs:
                how["top_log_probs"] = call.top_log_probs
            how |= {"fork": match.fork or told_by_tools, "untrained": untrained}
            try:
                answer = await session.ask(sampling=sampling, delivered=lambda: work.delivered[index], **how)
            except BaseException:
                tree.failed(line)
                raise
            generation = answer.generation
            choice, ids = reads.choice(generation, call, session)
            served = served_message(choice, call.messages[-1])
            node = tree.answered(match, line, held=session.messages[-1], served=served, ids=ids, cut=answer.cut)
            work.nodes.append(node)
            if call.kept is not None and index == 0:
                self.kept[work.id] = [*call.messages[call.kept :], served]
            self._note(node, match, (id(tree), node.before), begun)
            self.seen["answers"] += 1
            self._emit({names.RESPONSE_ID: work.id, names.ROLE: role})
            if answer.cut:  # its reader is gone; what it got is written
                raise asyncio.CancelledError
            return choice, session.turns[-1].prompt_ids, generation.cached_tokens

        try:
            done = await _all([one(index) for index in range(call.n)])
        except RolloutStopped as stopped:
            if isinstance(stopped.__cause__, ContextOverflowError):  # clients know this one, and may shorten
                raise stopped.__cause__ from stopped
            return self._stopped(call, work, stopped)
        finally:
            if self.flush is not None:
                await self.flush()
        return Answered(
            id=work.id,
            created=work.created,
            model=call.model or llm.model,
            choices=tuple(choice for choice, _, _ in done),
            prompt_ids=done[0][1],
            cached_tokens=done[0][2],
        )

    def _stopped(self, call: Call, work: Work, stopped: RolloutStopped) -> Answered:
        """A limit leaves no room: what a model says that stops at once."""
        self._empty += 1
        self.write(names.GATEWAY_SPAN, {names.RESPONSE_ID: work.id, **self._known()}, time.time())
        self.seen[f"stopped/{stopped.reason.value}"] += 1
        if self._empty > _EMPTY_ANSWERS:
            raise GatewayRequestError(f"{stopped}, and asks on", status=429, code="rate_limit_exceeded")
        finish = "stop" if stopped.reason.value == "max_turns" else "length"
        choices = (Choice(finish=finish),) * call.n
        return Answered(id=work.id, created=work.created, model=call.model, choices=choices)

    async def count(self, call: Call) -> int:
        """How many tokens the prompt of a request would have."""
        llm = self.roles[LLM_RESOURCE]
        tokenizer = await self.access.tokenizer(llm)
        template = self._tree(LLM_RESOURCE, call, tokenizer, llm).template
        context = ChatContext(template=template, messages=call.messages, copies=False)
        await prepare(tokenizer, [*call.images.values()])
        return len(await context.prompt())

    # -- conversations ------------------------------------------------------------------------------------------------

    def _tree(self, role: str, call: Call, tokenizer: ChatTokenizer, llm: LLM) -> Tree:
        tools, kwargs = list(call.tools) or None, call.template_kwargs
        if call.tools is not self._tools[0] or kwargs is not self._tools[1]:  # as those of the request before
            self._tools = call.tools, kwargs, template_key(tools, kwargs)
        key = role, "" if call.raw else self._tools[2]
        if (known := self._trees.get(key)) is not None:
            return known
        if refused := sorted(_NOT_FOR_TEMPLATES & kwargs.keys()):
            where = f"chat_template_kwargs.{refused[0]}"
            raise GatewayRequestError(f"{where} is not a client's to set; the run decides on it", param=where)
        template, spans = self.access.template(tokenizer, tools, kwargs, llm=llm), self._spans

        def open_session(messages: list[Message]) -> RolloutSession:
            if self._root is not None:
                return self._root.branch(messages, template=template)
            self._root = RolloutSession(
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
                write=lambda attributes, started: spans.append((attributes, started)),
            )
            return self._root

        tree = self._trees[key] = (RawTree if call.raw else Tree)(template, open_session)
        return tree

    def _changed_tools(self, role: str, own: Tree, messages: list[Message]) -> ForkReason | None:
        """A conversation that goes on with other tools begins anew in tokens: its prompt lists them."""
        others = (tree for (other, _), tree in self._trees.items() if other == role and tree is not own)
        return ForkReason.EDITED_HISTORY if any(tree.find([*messages]).node for tree in others) else None

    def _note(self, node: Node, match: Match, place: tuple[int, int], begun: int) -> None:
        self._clock += 1
        self._left_out.add(AnswerInTime(node, match.node, place, begun, self._clock))
        assert self._root is not None
        self._root.stats.untrained_turns = self._left_out.turns

    # -- spans --------------------------------------------------------------------------------------------------------

    def _emit(self, more: Mapping[str, str]) -> None:
        spans = [*self._spans]
        self._spans.clear()
        for attributes, started in spans:
            self.write(names.GENERATE_SPAN, {**attributes, **more, **self._known()}, started)

    def _known(self) -> dict[str, Any]:
        """What is known of the rollout as a whole; on each span, for the last one counts."""
        self._told = +self.seen
        known = {names.GATEWAY: json.dumps(self._told)}
        roles = dict.fromkeys((*self.roles, *self.settings.trained_models, *self.settings.untrained_models))
        if len(roles) > 1:
            known[names.ROLES] = json.dumps([*roles])
        if self._root is None:
            return known
        left_out = self._root.stats.untrained_turns
        self._says_left_out = self._says_left_out or bool(left_out)
        if self._says_left_out:  # also that there is none any more; of the turns of this gateway's encoder
            known |= {names.STREAM: self._root.stream, names.UNTRAINED_TURNS: json.dumps(left_out)}
        return self._root.stats.attributes() | known


async def _all(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Their results; when one fails, the others are cancelled."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
