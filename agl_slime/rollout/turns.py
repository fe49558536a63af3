"""The turns of a rollout whose agent declares what it needs: tools, a scheduler, limits.

After each answer: calls of tools in it are run, and the rollout goes on with their results; else the scheduler decides.
Without a scheduler an answer without calls is the last.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from agl_slime.rollout.scheduler import (
    ChatMessage,
    MultiTurnScheduler,
    RolloutInferRequest,
    RolloutResponseChoice,
    resolved,
)
from agl_slime.rollout.session import Answer, RolloutSession
from agl_slime.rollout.stop import StopReason
from agl_slime.rollout.tool_parsers import ParsedAnswer, ToolParser
from agl_slime.rollout.tools import ToolManager, ToolResult

_PROMPT_COLUMNS = frozenset({"messages", "prompt"})


async def run_turns(
    session: RolloutSession,
    *,
    task: Mapping[str, Any],
    scheduler: MultiTurnScheduler | None = None,
    tools: ToolManager | None = None,
    parser: ToolParser | None = None,
    stop_on_tool_error: bool = False,
) -> RolloutResponseChoice:
    """Ask until the rollout is over; the session then holds why. Returns the last answer, with all messages.

    Raises ``RolloutStopped`` when a limit of the session leaves no room for an answer that was wanted, and the client's
    typed errors.
    """
    request = RolloutInferRequest(
        messages=session.messages,
        tools=tools.schemas if tools is not None else None,
        data_dict={key: copy.deepcopy(value) for key, value in task.items() if key not in _PROMPT_COLUMNS},
    )
    if scheduler is not None:
        await resolved(scheduler.on_trajectory_start(request))
    turn = 0
    while True:
        if request.messages is not session.messages:
            session.messages = request.messages
        answer = await session.ask()
        turn += 1
        request.messages = session.messages
        parsed = parser.parse(answer_content(session, answer)) if parser is not None and tools is not None else None
        result = _choice(session, answer, parsed)
        going_on = await _after_answer(session, request, result, turn, scheduler, tools, parsed, stop_on_tool_error)
        if going_on is None:
            result.messages = copy.deepcopy(session.messages)
            return result
        request = going_on


async def _after_answer(
    session: RolloutSession,
    request: RolloutInferRequest,
    result: RolloutResponseChoice,
    turn: int,
    scheduler: MultiTurnScheduler | None,
    tools: ToolManager | None,
    parsed: ParsedAnswer | None,
    stop_on_tool_error: bool,
) -> RolloutInferRequest | None:
    """The request for the next answer, or ``None`` when there is none; the session's stop reason is set then."""
    facts = session.facts
    if parsed is not None:
        facts.malformed_calls += len(parsed.malformed)
    if scheduler is not None:
        await resolved(scheduler.on_turn_end(request, result, turn))
    if result.finish_reason == "abort":
        facts.stop_reason = StopReason.ABORTED
        return None
    calls = parsed.calls if parsed is not None and result.finish_reason != "length" else ()
    if scheduler is None and not calls:
        return None  # the session has set the stop reason by how the answer ended
    if scheduler is not None and (not calls or _out_of_turns(scheduler, turn)):
        request.stop_reason = None
        if await resolved(scheduler.check_finished(request, result, turn)):
            facts.stop_reason = request.stop_reason or facts.stop_reason
            return None
    if session.max_turns is not None and len(session.turns) >= session.max_turns:
        facts.stop_reason = StopReason.MAX_TURNS
        return None
    if calls:
        assert tools is not None
        results = await tools.run(calls)
        count_tools(session, results)
        session.add(*(done.to_message() for done in results))
        if stop_on_tool_error and any(done.error for done in results):
            facts.stop_reason = StopReason.TOOL_ERROR
            return None
        request.messages = session.messages
        return request
    assert scheduler is not None
    following = await resolved(scheduler.step(request, result, turn))
    if not isinstance(following, RolloutInferRequest):
        raise TypeError(f"{type(scheduler).__name__}.step must return a RolloutInferRequest, got {following!r:.100}")
    return following


def _out_of_turns(scheduler: MultiTurnScheduler, turn: int) -> bool:
    return bool(scheduler.max_turns) and turn >= int(scheduler.max_turns or 0)


def answer_content(session: RolloutSession, answer: Answer) -> str:
    """The text of the last answer as the conversation holds it, with the stop string that the engine leaves out."""
    return str(session.messages[-1].get("content") or "") if session.messages else answer.text


def count_tools(session: RolloutSession, results: list[ToolResult]) -> None:
    facts = session.facts
    for result in results:
        if result.error == "unknown_tool":
            facts.unknown_tools += 1
            continue
        facts.tool_calls[result.call.name] += 1
        facts.tool_errors += result.error is not None
        facts.tool_timeouts += result.error == "timeout"


def _choice(session: RolloutSession, answer: Answer, parsed: ParsedAnswer | None) -> RolloutResponseChoice:
    calls = [call.to_message() for call in parsed.calls] if parsed is not None and parsed.calls else None
    return RolloutResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content=answer_content(session, answer), tool_calls=calls),
        finish_reason=answer.finish_reason,
        logprobs=list(answer.generation.log_probs),
    )
