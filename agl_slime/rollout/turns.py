"""The one loop of turns: of agents by declaration, of schedulers, and of batched rollouts.

After each answer the scheduler hears of it; calls of tools in it are run, and the rollout goes on with their results;
else the scheduler decides. Without a scheduler an answer without calls is the last.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from agl_slime.rollout.scheduler import (
    ChatCompletionResponse,
    ChatMessage,
    MultiTurnScheduler,
    RequestConfig,
    RolloutInferRequest,
    RolloutOutput,
    RolloutResponseChoice,
    StopReason,
)
from agl_slime.rollout.session import RolloutStopped, Session
from agl_slime.support.threads import call_user_code
from agl_slime.tokens.answer import AnswerParts

logger = logging.getLogger(__name__)

_PROMPT_COLUMNS = frozenset({"messages", "prompt"})
_END_HOOK_S = 60.0  # that long a scheduler may take to close what it opened
_SAMPLING = {"max_new_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_SAMPLING["stop"] = "stop"
_current: ContextVar[_Turns] = ContextVar("the turns of this rollout")


async def run_turns(
    session: Session,
    *,
    task: Mapping[str, Any],
    scheduler: MultiTurnScheduler | None = None,
    stop_on_tool_error: bool = False,
) -> RolloutResponseChoice:
    """Ask until the rollout is over; ``session.stats`` then says why. Returns the last answer, with all messages.

    Raises ``RolloutStopped`` when a limit of the session leaves no room for an answer that was wanted, and the client's
    typed errors.
    """
    tools = session.tools.schemas if session.tools is not None else None
    request = RolloutInferRequest(messages=session.messages, tools=tools, uuid=session.rollout_id)
    turns = _Turns(session, scheduler, stop_on_tool_error)
    if scheduler is None:
        return await turns.run(request)
    columns = {key: copy.deepcopy(value) for key, value in task.items() if key not in _PROMPT_COLUMNS}
    for name in ("images", "audios", "videos"):
        given = columns.pop(name, None)
        setattr(request, name, given if isinstance(given, list) else [] if given is None else [given])
    request.objects, request.data_dict = columns.pop("objects", None) or {}, columns
    if getattr(scheduler, "infer_engine", None) is None:
        scheduler.infer_engine = _Engine()
    error: BaseException | None = None
    current = _current.set(turns)
    try:
        said = await call_user_code(scheduler.run, request, RequestConfig())
        outputs = said if isinstance(said, list) else [said]
        if not outputs or not all(hasattr(output, "response") for output in outputs):
            name = f"{type(scheduler).__name__}.run"
            raise TypeError(f"{name} must return a RolloutOutput or a list of them, got {said!r:.99}")
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
        request.messages = session.messages
        try:
            await asyncio.wait_for(call_user_code(scheduler.on_trajectory_end, [request], error), _END_HOOK_S)
        except Exception:
            if error is None:
                raise
            logger.exception("on_trajectory_end of %s failed, after its rollout.", type(scheduler).__name__)


class _Engine:
    """What a scheduler's ``run`` asks; one for all rollouts."""

    async def infer_async(
        self, infer_request: RolloutInferRequest, request_config: Any = None, **_: Any
    ) -> ChatCompletionResponse:
        """The next answer to ``infer_request.messages``, which stay as they are. Calls of one rollout wait for each
        other; one that does not go on from the last is a branch."""
        turns = _current.get()
        session: Any = turns.session
        given = {ours: getattr(request_config, name, None) for ours, name in _SAMPLING.items()}
        given["stop"] = tuple(given["stop"] or ()) or None
        sampling = replace(session.sampling, **{name: value for name, value in given.items() if value is not None})
        async with turns.asking:
            result, _parsed = await turns.ask(infer_request, sampling=sampling)
        return ChatCompletionResponse([result])

    async def run_turns(self, infer_request: RolloutInferRequest) -> RolloutOutput:
        turns = _current.get()
        result = await turns.run(infer_request)
        return RolloutOutput(ChatCompletionResponse([result]), turns.session.messages)


@dataclass
class _Turns:
    session: Session
    scheduler: MultiTurnScheduler | None
    stop_on_tool_error: bool
    number: int = 0
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, request: RolloutInferRequest) -> RolloutResponseChoice:
        if self.scheduler is not None:
            started = self.scheduler.on_trajectory_start
            alone = next(iter(inspect.signature(started).parameters), "") == "infer_request"
            await call_user_code(started, request if alone else [request])
        following: RolloutInferRequest | None = request
        while True:
            request = following
            result, parsed = await self.ask(request)
            request.messages = self.session.messages
            following = await self._after(request, result, parsed)
            if following is None:
                result.messages = copy.deepcopy(self.session.messages)
                return result

    async def ask(self, request: RolloutInferRequest, **how: Any) -> tuple[RolloutResponseChoice, AnswerParts]:
        session = self.session
        if request.messages is not session.messages:
            session.messages = request.messages
        before = len(session.messages), str(session.messages[-1].get("content") or "")
        answer = await session.ask(**how)
        self.number += 1
        content = str(session.messages[-1].get("content") or "")  # with the stop string that the engine leaves out
        parsed = answer.parsed or AnswerParts(content=content)
        if answer.parsed is None and session.parser is not None and session.tools is not None:
            parsed = session.reader.read(content, answer.generation.output_ids)
        session.stats.calls["malformed"] += len(parsed.malformed)
        said = content.removeprefix(before[1]) if len(session.messages) == before[0] else content
        result = RolloutResponseChoice(
            index=0,
            message=ChatMessage("assistant", said, [call.to_message() for call in parsed.calls] or None),
            finish_reason=answer.finish_reason,
            logprobs=list(answer.generation.log_probs),
            token_ids=list(answer.generation.output_ids),
        )
        return result, parsed

    async def _after(
        self, request: RolloutInferRequest, result: RolloutResponseChoice, parsed: AnswerParts
    ) -> RolloutInferRequest | None:
        """The request for the next answer, or ``None`` when there is none; the stats have the stop reason then."""
        session, scheduler, stats = self.session, self.scheduler, self.session.stats
        told, done = (request, result, self.number), None
        if scheduler is not None:
            done = self._noted(await call_user_code(scheduler.on_turn_end, *told), "done")
        if result.finish_reason == "abort":
            stats.stop_reason = StopReason.ABORTED
            return None
        calls = parsed.calls if session.tools is not None and result.finish_reason != "length" else ()
        if done or (scheduler is None and not calls):
            return None  # the session has set the stop reason by how the answer ended
        if scheduler is not None and done is None and not calls:
            request.stop_reason = None
            check: Any = scheduler.check_finished
            ours = getattr(check, "__func__", None) is MultiTurnScheduler.check_finished  # which needs no thread
            if check(*told) if ours else await call_user_code(check, *told):
                stats.stop_reason = request.stop_reason or stats.stop_reason
                return None
        limits = (session.max_turns, len(session.turns)), (scheduler and scheduler.max_turns, self.number)
        if any(most is not None and had >= most for most, had in limits):
            stats.stop_reason = StopReason.MAX_TURNS
            return None
        if calls and session.tools is not None:
            results = await session.tools.run(calls)
            stats.count(results)
            session.add(*(result.to_message() for result in results))
            if self.stop_on_tool_error and any(result.error for result in results):
                stats.stop_reason = StopReason.TOOL_ERROR
                return None
            return request
        assert scheduler is not None
        said = await call_user_code(scheduler.step, *told)
        following = self._noted(said, "infer_request")
        if not isinstance(following, RolloutInferRequest):
            name = f"{type(scheduler).__name__}.step"
            raise TypeError(f"{name} must return a RolloutInferRequest or a dict with infer_request, got {said!r:.99}")
        following.uuid = following.uuid or request.uuid
        return following

    def _noted(self, said: Any, key: str) -> Any:
        """What a scheduler's method returned, alone or in a dict as ``key``; notes the other things in the dict."""
        if not isinstance(said, Mapping):
            return said
        self.session.stats.infos.update(said.get("rollout_infos") or {})
        return said.get(key)
