"""The loop of turns of declared agents, schedulers and batched rollouts.

After each answer the scheduler's ``on_turn_end`` is called. Tool calls in the answer are executed, and the rollout
continues with their results; otherwise the scheduler decides. Without a scheduler an answer without calls is the last.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from agl_slime.agent.outcome import PROMPT_COLUMNS
from agl_slime.agent.scheduler import (
    ChatCompletionResponse,
    ChatMessage,
    Messages,
    MultiTurnScheduler,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
    StopReason,
)
from agl_slime.agent.session import RolloutStopped, Session
from agl_slime.agent.tools import ToolError
from agl_slime.support.threads import call_user_code
from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.codec import shared_length

logger = logging.getLogger(__name__)

_END_HOOK_S = 60.0  # time limit of a scheduler's on_trajectory_end
_SAMPLING = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_SAMPLING |= {name: name for name in ("stop", "repetition_penalty", "seed")}
_current: ContextVar[_Turns] = ContextVar("the turns of this rollout")


async def run_turns(
    session: Session,
    *,
    task: Mapping[str, Any],
    scheduler: MultiTurnScheduler | None = None,
    stop_on_tool_errors: Collection[ToolError] = (),
) -> RolloutResponseChoice:
    """Ask until the rollout is over and return the last answer, with all messages; ``session.stats`` has the reason.
    Raises ``RolloutStopped`` when a limit leaves no room for another answer, and the client's typed errors."""
    tools = session.tools.schemas if session.tools is not None else None
    request = RolloutInferRequest(messages=session.messages, tools=tools, uuid=session.rollout_id)
    turns = _Turns(session, scheduler, stop_on_tool_errors)
    if scheduler is None:
        return await turns.run(request)
    columns = {key: copy.deepcopy(value) for key, value in task.items() if key not in PROMPT_COLUMNS}
    for name in ("images", "audios", "videos"):
        value = columns.pop(name, None)
        setattr(request, name, value if isinstance(value, list) else [] if value is None else [value])
    request.objects, request.data_dict = columns.pop("objects", None) or {}, columns
    if getattr(scheduler, "infer_engine", None) is None:
        scheduler.infer_engine = _Engine()
    error: BaseException | None = None
    current = _current.set(turns)
    try:
        returned = await call_user_code(scheduler.run, request, RequestConfig())
        outputs = returned if isinstance(returned, list) else [returned]
        if not outputs or not all(hasattr(output, "response") for output in outputs):
            name = f"{type(scheduler).__name__}.run"
            raise TypeError(f"{name} must return a RolloutOutput or a list of them, got {returned!r:.99}")
        for output in outputs:
            session.stats.infos.update(output.rollout_infos or {})
        last = outputs[-1].response.choices[0]
        last.messages = copy.deepcopy(outputs[-1].messages or session.messages)
        return last
    except BaseException as raised:
        error = None if isinstance(raised, RolloutStopped) else raised
        raise
    finally:
        _current.reset(current)
        if not turns.leaves:  # otherwise an overridden run keeps the messages itself
            request.messages = session.messages
        try:
            await asyncio.wait_for(call_user_code(scheduler.on_trajectory_end, [request], error), _END_HOOK_S)
        except Exception:
            if error is None:
                raise
            logger.exception("on_trajectory_end of %s failed, after the rollout itself.", type(scheduler).__name__)


class _Engine:
    """The ``infer_engine`` of schedulers; one for all rollouts, with the current one in a context variable."""

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: Any = None, **_: Any
    ) -> ChatCompletionResponse:
        """``request_config.n`` answers to ``infer_request.messages``, which are not changed: the caller appends the
        answer that it continues. Each answer is a branch of the rollout, so calls may run concurrently."""
        turns = _current.get()
        session: Any = turns.session
        config: dict[str, Any] = {key: getattr(request_config, name, None) for key, name in _SAMPLING.items()}
        config["stop"] = tuple(config["stop"] or ()) or None
        sampling = replace(session.sampling, **{name: value for name, value in config.items() if value is not None})
        messages = [dict(message) for message in infer_request.messages]
        indices = range(getattr(request_config, "n", 1) or 1)
        answers = [turns.answer_to(messages, index=index, sampling=sampling) for index in indices]
        return ChatCompletionResponse(list(await asyncio.gather(*answers)))

    async def run_turns(self, infer_request: RolloutInferRequest) -> RolloutOutput:
        turns = _current.get()
        result = await turns.run(infer_request)
        return RolloutOutput(ChatCompletionResponse([result]), turns.session.messages)


@dataclass(frozen=True, slots=True, eq=False)
class _Leaf:
    """A conversation of a rollout up to its last answer; ``messages`` in the scheduler's form (images unmarked)."""

    session: Any
    messages: Messages


@dataclass
class _Turns:
    session: Session
    scheduler: MultiTurnScheduler | None
    stop_on_tool_errors: Collection[ToolError]
    number: int = 0
    leaves: list[_Leaf] = field(default_factory=list)

    async def run(self, request: RolloutInferRequest) -> RolloutResponseChoice:
        if self.scheduler is not None:
            hook = self.scheduler.on_trajectory_start
            takes_one = next(iter(inspect.signature(hook).parameters), "") == "infer_request"
            await call_user_code(hook, request if takes_one else [request])
        session, following = self.session, request
        while True:
            request = following
            if request.messages is not session.messages:
                session.messages = request.messages
            result, parsed = await self.ask(session)
            request.messages = session.messages
            following = await self._next_request(request, result, parsed)
            if following is None:
                result.messages = copy.deepcopy(session.messages)
                return result

    async def answer_to(self, messages: Messages, **options: Any) -> RolloutResponseChoice:
        """The answer to ``messages``, in a branch of the conversation with the longest shared prefix."""
        leaves = [*self.leaves, _Leaf(self.session, self.session.messages)]
        closest = max(leaves, key=lambda leaf: shared_length(leaf.messages, messages))
        shared = shared_length(closest.messages, messages)
        branch = closest.session.branch([*closest.session.messages[:shared], *messages[shared:]])
        result, _parsed = await self.ask(branch, **options)
        answer, continued = dict(branch.messages[-1]), len(branch.messages) == len(messages)
        self.leaves.append(_Leaf(branch, [*(messages[:-1] if continued else messages), answer]))
        if shared == len(closest.messages) and closest in self.leaves:  # the new leaf contains it
            self.leaves.remove(closest)
        return result

    async def ask(self, session: Any, *, index: int = 0, **options: Any) -> tuple[RolloutResponseChoice, AnswerParts]:
        count, prefix = len(session.messages), str(session.messages[-1].get("content") or "")
        answer = await session.ask(**options)
        self.number += 1
        content = str(session.messages[-1].get("content") or "")  # with the stop string that the engine leaves out
        parsed = answer.parsed or AnswerParts(content=content)
        if answer.parsed is None and session.parser is not None and session.tools is not None:
            parsed = session.reader.read(content, answer.generation.output_ids)
        session.stats.count_malformed(parsed.malformed)
        added = content.removeprefix(prefix) if len(session.messages) == count else content
        log_probs = answer.generation.log_probs if self.scheduler is not None else ()
        result = RolloutResponseChoice(
            index=index,
            message=ChatMessage("assistant", added, [call.to_message() for call in parsed.calls] or None),
            finish_reason=answer.finish_reason,
            logprobs={"content": [{"logprob": value} for value in log_probs]} if log_probs else None,
            token_ids=list(answer.generation.output_ids),
        )
        return result, parsed

    async def _next_request(
        self, request: RolloutInferRequest, result: RolloutResponseChoice, parsed: AnswerParts
    ) -> RolloutInferRequest | None:
        """The request for the next answer; ``None`` at the end of the rollout, with the stop reason in the stats."""
        session, scheduler, stats = self.session, self.scheduler, self.session.stats
        args, done = (request, result, self.number), None
        if scheduler is not None:
            done = self._take_infos(await call_user_code(scheduler.on_turn_end, *args), "done")
        if result.finish_reason == "abort":
            stats.stop_reason = StopReason.ABORTED
            return None
        calls = parsed.calls if session.tools is not None and result.finish_reason != "length" else ()
        if done or (scheduler is None and not calls):
            return None  # the session has set the stop reason from the answer's finish reason
        if scheduler is not None and done is None and not calls:
            request.stop_reason = None
            check: Any = scheduler.check_finished
            is_default = getattr(check, "__func__", None) is MultiTurnScheduler.check_finished  # needs no thread
            if check(*args) if is_default else await call_user_code(check, *args):
                stats.stop_reason = request.stop_reason or stats.stop_reason
                return None
        limits = (session.max_turns, len(session.turns)), (scheduler and scheduler.max_turns, self.number)
        if any(limit is not None and count >= limit for limit, count in limits):
            stats.stop_reason = StopReason.MAX_TURNS
            return None
        if calls and session.tools is not None:
            results = await session.tools.run(calls)
            stats.count(results)
            session.add(*(result.to_message() for result in results))
            if any(result.error in self.stop_on_tool_errors for result in results):
                stats.stop_reason = StopReason.TOOL_ERROR
                return None
            return request
        assert scheduler is not None
        returned = await call_user_code(scheduler.step, *args)
        following = self._take_infos(returned, "infer_request")
        if not isinstance(following, RolloutInferRequest):
            problem = f"must return a RolloutInferRequest or a dict with infer_request, got {returned!r:.99}"
            raise TypeError(f"{type(scheduler).__name__}.step {problem}")
        following.uuid = following.uuid or request.uuid
        return following

    def _take_infos(self, returned: Any, key: str) -> Any:
        """A value that a scheduler returned, alone or in a dict as ``key``; stores the dict's ``rollout_infos``."""
        if not isinstance(returned, Mapping):
            return returned
        self.session.stats.infos.update(returned.get("rollout_infos") or {})
        return returned.get(key)
