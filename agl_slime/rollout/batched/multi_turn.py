"""Batched rollouts of many turns: all live trajectories are sampled in one call per turn. Each is a session of its own
in the loop of turns that agents run in; their calls of the engine wait for each other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agl_slime.errors import ContextOverflowError, EngineProtocolError
from agl_slime.rollout.batched.base import ToolRollout, Trajectory
from agl_slime.rollout.batched.sampler import Sampler
from agl_slime.rollout.scheduler import StopReason
from agl_slime.rollout.session import RolloutSession, RolloutStopped
from agl_slime.rollout.tool_parsers import get_tool_parser, parser_for_template
from agl_slime.rollout.turns import run_turns
from agl_slime.sglang.generation import Generation, SamplingParams
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.tokenizer import ChatTokenizer
from agl_slime.trace.segments import Segment, merge_turns

IGNORED_LABEL = -100


class MultiTurnRollout(ToolRollout):
    """Batched multi-turn rollouts over a ``Sampler``; ``options`` are those of ``ToolRollout``. ``template`` is the
    tokenizer, with its chat template. A trajectory of ``max_trajectory_tokens`` is truncated.

    A trajectory has ``messages``, and perhaps ``tools``: schemas to show in place of the manager's (an empty list:
    none), and ``id``. It comes back with its own keys and:

    - ``messages``: the conversation, tool results included. ``turns``: the number of answers.
    - ``input_ids``, ``labels``, ``logprobs``: one entry per token of the whole sequence. ``labels`` are -100 where a
      token is not trained, ``logprobs`` 0.0 there.
    - ``stop_reason``: ``"stop"`` or ``"length"``. ``truncated``: whether more would have come. ``end_reason``: why it
      ended, as ``StopReason`` has it. ``tools_called``: counts of calls.
    - ``segments``: all sequences, when the chat template rewrites history and the trajectory became several;
      ``input_ids`` is the last of them then. ``turn_records``: the turns, for ``trajectory_to_samples``.
    """

    def __init__(
        self, *, sampler: Sampler, template: ChatTokenizer, max_trajectory_tokens: int | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self._sampler = sampler
        self._tokenizer = template
        self._max_tokens = max_trajectory_tokens
        self._parser = get_tool_parser(
            self._tool_parser or parser_for_template(getattr(template, "chat_template", None))
        )

    def _run(
        self, trajectories: list[Trajectory], tools: Sequence[Any], made: bool, sampling: SamplingParams | None
    ) -> list[Trajectory]:
        batch = _Batch(self._sampler, live=len(trajectories))
        templates: dict[str, ChatTemplate] = {}

        common: dict[str, Any] = {"client": batch, "tokenizer": self._tokenizer, "parser": self._parser}
        common |= {"max_turns": self._max_turns, "max_trajectory_tokens": self._max_tokens, "traced": False}

        def session_of(trajectory: Trajectory, manager: Any) -> RolloutSession:
            schemas = trajectory.get("tools", manager.schemas if manager is not None else None) or None
            template = templates.setdefault(repr(schemas), ChatTemplate(tokenizer=self._tokenizer, tools=schemas))
            messages, params = trajectory["messages"], sampling or SamplingParams()
            return RolloutSession(sampling=params, messages=messages, tools=manager, template=template, **common)

        sessions = [session_of(trajectory, manager) for trajectory, manager in zip(trajectories, tools, strict=True)]

        async def run(session: RolloutSession) -> None:
            try:
                await run_turns(session, task={})
            except RolloutStopped:
                pass
            except ContextOverflowError:  # of the first prompt: it ends this trajectory and no other
                session.stats.stop_reason = session.stats.stop_reason or StopReason.CONTEXT_OVERFLOW
            finally:
                batch.leave()
                if made and session.tools is not None:
                    await session.tools.aclose()

        async def run_all() -> None:
            await asyncio.gather(*map(run, sessions))

        run_blocking(run_all())
        return list(map(self._finished, trajectories, sessions))

    def _finished(self, trajectory: Trajectory, session: RolloutSession) -> Trajectory:
        segments = [_sequence(segment) for segment in merge_turns(session.turns, self._tokenizer)]
        prompt = [] if segments else session.context.prompt_ids()
        nothing = {"input_ids": prompt, "labels": [IGNORED_LABEL] * len(prompt), "logprobs": None}
        end = session.stats.stop_reason or StopReason.STOP
        cut_off = end in (StopReason.LENGTH, StopReason.ABORTED, StopReason.CONTEXT_OVERFLOW)
        return self._output(
            trajectory,
            session,
            **(segments[-1] if segments else nothing),
            segments=segments,
            stop_reason="length" if cut_off else "stop",
            truncated=end is not StopReason.STOP,
            end_reason=end.value,
            turn_records=session.turns,
        )


class _Batch:
    """The engine of sessions that are sampled together: a call waits until every live session asks."""

    def __init__(self, sampler: Sampler, *, live: int) -> None:
        self._sampler = sampler
        self._live = live
        self._waiting: list[tuple[asyncio.Future[Generation], Sequence[int], SamplingParams]] = []

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, routing_key: str | None = None
    ) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append((answer, input_ids, sampling))
        self._sample_when_all_ask()
        return await answer

    def leave(self) -> None:
        """One session has ended."""
        self._live -= 1
        self._sample_when_all_ask()

    def _sample_when_all_ask(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if not waiting[0].cancelled()]
        if not self._waiting or len(self._waiting) < self._live:
            return
        futures, prompts, params = zip(*self._waiting, strict=True)
        self._waiting = []
        try:  # on the loop of these sessions, which all wait, and in the caller's thread
            answers = self._ask([{"input_ids": prompt} for prompt in prompts], list(params))
        except Exception as error:  # of the engine: every session raises it
            answers = [error] * len(futures)
        for future, answer in zip(futures, answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _ask(self, inputs: list[Any], params: list[SamplingParams]) -> Sequence[Generation | Exception]:
        try:
            answers = self._sampler.sample(inputs, params)
        except ContextOverflowError as error:
            if len(inputs) == 1:
                return [error]
            half = len(inputs) // 2  # a sampler that does not say which prompt it was
            return [*self._ask(inputs[:half], params[:half]), *self._ask(inputs[half:], params[half:])]
        if len(answers) != len(inputs):
            raise EngineProtocolError(f"the sampler gave {len(answers)} answers to {len(inputs)} prompts")
        return answers


def _sequence(segment: Segment) -> dict[str, Any]:
    pairs = zip(segment.token_ids.tolist(), segment.loss_mask.tolist(), strict=True)
    return {
        "input_ids": segment.token_ids.tolist(),
        "labels": [token if trained else IGNORED_LABEL for token, trained in pairs],
        "logprobs": None if segment.log_probs is None else segment.log_probs.tolist(),
    }
