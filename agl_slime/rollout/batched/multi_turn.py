"""Batched rollouts of many turns: all live trajectories are sampled in one call per turn.

    rollout = MultiTurnRollout(sampler=SGLangSampler(base_url=url), template=tokenizer, tool_manager=ToolManager([search]), max_turns=6)
    results = rollout([{"messages": [{"role": "user", "content": "…"}]}, …])

Each turn: the prompts of the live trajectories, one batched ``sampler.sample``, then for each its end (cut off, no tool
call, out of turns) or its tools, whose results are appended; what they and the next opening add to the tokens gets
label -100. It runs on the same engine of turns as agents do: prompts are what was sampled, verbatim.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, EngineProtocolError
from agl_slime.rollout.batched.base import Rollout, Trajectory, managers_for
from agl_slime.rollout.batched.sampler import Sampler
from agl_slime.rollout.batched.traces import Predicate, TraceWriter
from agl_slime.rollout.stop import StopReason
from agl_slime.rollout.tool_parsers import ParsedAnswer, ToolParser, get_tool_parser, parser_for_template
from agl_slime.rollout.tools import ToolResult
from agl_slime.sglang.generation import Generation, SamplingParams
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.conversation import ChatContext
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.tokenizer import ChatTokenizer
from agl_slime.trace.segments import Segment, merge_turns
from agl_slime.trace.turn import Turn

IGNORED_LABEL = -100


class MultiTurnRollout(Rollout):
    """Batched multi-turn rollouts over a ``Sampler``.

    Args:
        sampler: Samples the answers; ``SGLangSampler`` for an SGLang server.
        template: The tokenizer, with its chat template.
        tool_manager: A ``ToolManager`` for all trajectories, a list with one for each, or a function that makes one for
            a trajectory; may also be given per call.
        sampling_params: How to sample where a call does not say.
        max_turns: Most answers of a trajectory.
        max_trajectory_tokens: Most tokens of a trajectory; one that reaches it is truncated.
        tool_parser: How the model writes calls; by default as its chat template shows.
        trace_dir, trace_callback, success_callback: See ``TraceWriter``.

    A trajectory has ``messages``, and perhaps ``tools``: schemas to show in place of the manager's (an empty list:
    none), and ``id``. It comes back with its own keys and:

    - ``messages``: the conversation, tool results included.
    - ``input_ids``, ``labels``, ``logprobs``: one entry per token of the whole sequence. ``labels`` are -100 where a
      token is not trained,
    ``logprobs`` 0.0 there.
    - ``turns``: the number of answers. ``stop_reason``: ``"stop"`` or ``"length"``. ``truncated``: whether more would
      have come.
    - ``end_reason``: why it ended, as ``StopReason`` has it (``max_turns`` and the like). ``tools_called``: counts of
      calls.
    - ``segments``: all sequences with their labels, when the chat template rewrites history and the trajectory became
      several; ``input_ids`` is the
    last of them then.
    - ``turn_records``: the turns, for ``trajectory_to_samples``.
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        template: ChatTokenizer,
        tool_manager: Any = None,
        sampling_params: SamplingParams | None = None,
        max_turns: int = 6,
        max_trajectory_tokens: int | None = None,
        tool_parser: str | ToolParser | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Predicate | None = None,
        success_callback: Predicate | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._sampler = sampler
        self._tokenizer = template
        self._tools = tool_manager
        self._sampling = sampling_params or SamplingParams()
        self._max_turns = max_turns
        self._max_tokens = max_trajectory_tokens
        source = getattr(template, "chat_template", None)
        self._parser = get_tool_parser(tool_parser or parser_for_template(source if isinstance(source, str) else None))
        self._traces = TraceWriter(trace_dir, keep=trace_callback, succeeded=success_callback)
        self._step = 0

    def __call__(
        self,
        trajectories: list[Trajectory],
        *,
        tool_manager: Any = None,
        sampling_params: SamplingParams | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> list[Trajectory]:
        """Run ``trajectories`` to their ends. ``step`` is the number in the names of trace files, by default that of
        the call. Raises the sampler's errors."""
        step = self._step if step is None else step
        self._step += 1
        sampling = sampling_params or self._sampling
        managers = managers_for(tool_manager if tool_manager is not None else self._tools, trajectories)
        templates: dict[str, ChatTemplate] = {}
        rows = [
            _Row(each, tools, self._tokenizer, templates) for each, tools in zip(trajectories, managers, strict=True)
        ]
        while live := [row for row in rows if row.end is None]:
            self._turn(live, sampling)
        finished = [row.output() for row in rows]
        for number, trajectory in enumerate(finished):
            self._traces.write(trajectory, step=step, fallback_id=str(number))
        return finished

    def _turn(self, live: list[_Row], sampling: SamplingParams) -> None:
        """One batched call for all live trajectories, then the tools that their answers call, all at the same time."""
        asked: list[tuple[_Row, list[int], SamplingParams]] = []
        for row in live:
            prompt = row.context.prompt_ids()
            room = None if self._max_tokens is None else self._max_tokens - len(prompt)
            if room is not None and room < 1:
                row.end = StopReason.LENGTH
                continue
            params = sampling if room is None else replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))
            asked.append((row, prompt, params))
        if not asked:
            return
        answers = self._sampler.sample(
            [{"input_ids": prompt} for _, prompt, _ in asked], [params for *_, params in asked]
        )
        if len(answers) != len(asked):
            raise EngineProtocolError(f"the sampler gave {len(answers)} answers to {len(asked)} prompts")
        calling: list[tuple[_Row, ParsedAnswer]] = []
        for (row, prompt, _), generation in zip(asked, answers, strict=True):
            parsed = row.answered(prompt, generation, self._parser)
            if row.end is None and len(row.turns) >= self._max_turns:
                row.end = StopReason.MAX_TURNS
            if row.end is None:
                calling.append((row, parsed))
        results = run_blocking(_run_tools([(row.tools, parsed) for row, parsed in calling])) if calling else []
        for (row, _), done in zip(calling, results, strict=True):
            row.observed(done)


async def _run_tools(wanted: Sequence[tuple[Any, ParsedAnswer]]) -> list[list[ToolResult]]:
    return list(await asyncio.gather(*(tools.run(parsed.calls) for tools, parsed in wanted)))


class _Row:
    """One trajectory while it runs."""

    def __init__(
        self, trajectory: Trajectory, tools: Any, tokenizer: ChatTokenizer, templates: dict[str, ChatTemplate]
    ) -> None:
        self.given = trajectory
        self.tools = tools
        schemas = (
            trajectory.get("tools", tools.schemas if tools is not None else None) or None
        )  # an empty list: none are shown
        template = templates.setdefault(repr(schemas), ChatTemplate(tokenizer=tokenizer, tools=schemas))
        self.context = ChatContext(tokenizer=tokenizer, messages=trajectory["messages"], template=template)
        self.turns: list[Turn] = []
        self.end: StopReason | None = None
        self.calls: Counter[str] = Counter()
        self.malformed = self.errors = 0
        self._tokenizer = tokenizer

    def answered(self, prompt: list[int], generation: Generation, parser: ToolParser) -> ParsedAnswer:
        """Take an answer in; sets ``end`` unless it calls tools."""
        messages = [dict(message) for message in self.context.messages]
        said = self.context.add_answer(prompt, generation)
        turn = Turn.from_generation(
            self.context.prompt_view(len(prompt)),
            generation,
            messages=messages,
            base_turn=len(self.turns) - 1 if self.turns else None,
            kept_tokens=self.context.kept_tokens,
            fork=self.context.fork,
        )
        self.turns.append(turn)
        parsed = parser.parse(said["content"]) if self.tools is not None else ParsedAnswer(said["content"])
        self.malformed += len(parsed.malformed)
        if generation.finish_reason == "length":
            self.end = StopReason.LENGTH
        elif generation.finish_reason == "abort":
            self.end = StopReason.ABORTED
        elif not parsed.calls:
            self.end = StopReason.STOP
        return parsed

    def observed(self, results: Sequence[ToolResult]) -> None:
        for result in results:
            self.calls[result.call.name] += 1
            self.errors += result.error is not None
        self.context.add(*(result.to_message() for result in results))

    def output(self) -> Trajectory:
        segments = merge_turns(self.turns, self._tokenizer)
        last = (
            _sequence(segments[-1])
            if segments
            else {"input_ids": self.context.prompt_ids(), "labels": [], "logprobs": None}
        )
        if not segments:
            last["labels"] = [IGNORED_LABEL] * len(last["input_ids"])
        end = self.end or StopReason.STOP
        return {
            **self.given,
            "messages": self.context.messages,
            **last,
            "segments": [_sequence(segment) for segment in segments],
            "turns": len(self.turns),
            "stop_reason": "length" if end in (StopReason.LENGTH, StopReason.ABORTED) else "stop",
            "truncated": end is not StopReason.STOP,
            "end_reason": end.value,
            "tools_called": {
                "offered": list(getattr(self.tools, "names", ())),
                "calls": dict(self.calls),
                "malformed": self.malformed,
                "errors": self.errors,
            },
            "turn_records": self.turns,
        }


def _sequence(segment: Segment) -> dict[str, Any]:
    ids = segment.token_ids.tolist()
    labels = [
        token if trained else IGNORED_LABEL for token, trained in zip(ids, segment.loss_mask.tolist(), strict=True)
    ]
    return {
        "input_ids": ids,
        "labels": labels,
        "logprobs": None if segment.log_probs is None else segment.log_probs.tolist(),
    }


__all__ = ["IGNORED_LABEL", "MultiTurnRollout"]
