"""Rollouts of many turns over an OpenAI-compatible chat API: text in, text out, for collecting data and for evaluation.

    rollout = APIMultiTurnRollout(api=OpenAI(model="qwen3.5-32b", base_url="http://localhost:8000/v1"), tool_manager=ToolManager([search]),
    concurrency=8) results = rollout(trajectories)

The API gives no token ids. Samples can still be made of what comes back (``messages_to_sample``); they are tokenized
again and say so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.rollout.batched.base import Rollout, Trajectory, managers_for
from agl_slime.rollout.batched.traces import Predicate, TraceWriter
from agl_slime.rollout.tool_parsers import ToolCall, ToolParser, get_tool_parser
from agl_slime.sglang.generation import SamplingParams

logger = logging.getLogger(__name__)


@dataclass
class OpenAI:
    """An OpenAI-compatible endpoint. ``timeout_s`` is for one call; failed calls are tried again ``max_retries`` times
    by the ``openai`` client."""

    model: str
    base_url: str
    api_key: str = "none"
    timeout_s: float = 600.0
    max_retries: int = 2
    _client: Any = field(default=None, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """The completion of a conversation; ``options`` go to ``chat.completions.create``. Raises ``openai``'s errors."""
        with self._lock:
            if self._client is None:
                try:
                    import openai
                except ImportError as error:
                    raise MissingDependencyError(
                        "an OpenAI-compatible API needs the openai client: pip install openai"
                    ) from error
                self._client = openai.OpenAI(
                    base_url=self.base_url, api_key=self.api_key, timeout=self.timeout_s, max_retries=self.max_retries
                )
        return self._client.chat.completions.create(model=self.model, messages=list(messages), **options)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None, "_lock": None}  # connections and locks belong to a process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())


class APIMultiTurnRollout(Rollout):
    """Rollouts over an API, each trajectory on its own, at most ``concurrency`` at the same time.

    Args:
        api: The endpoint.
        tool_manager: A ``ToolManager`` for all trajectories, a list with one for each, or a function that makes one for
            a trajectory; may also be given per call.
        sampling_params: temperature, top_p, max_new_tokens and stop are sent; what else the server takes goes into
            ``extra_body``.
        max_turns: Most answers of a trajectory.
        concurrency: Most calls at the same time.
        extra_body: More fields of each request.
        tool_parser: Where the server leaves calls in the text: how the model writes them. By default only the server's
            ``tool_calls`` count.
        trace_dir, trace_callback, success_callback: See ``TraceWriter``.

    A trajectory comes back with its own keys and ``messages``, ``turns``, ``truncated``, ``tools_called`` and
    ``stop_reason``: ``stop`` (an answer without calls), ``length``, ``max_turns``, or ``api_error`` (the API or a tool
    manager raised; ``error`` says what). A failing trajectory never raises out of the batch.
    """

    def __init__(
        self,
        *,
        api: OpenAI,
        tool_manager: Any = None,
        sampling_params: SamplingParams | None = None,
        max_turns: int = 6,
        concurrency: int = 8,
        extra_body: Mapping[str, Any] | None = None,
        tool_parser: str | ToolParser | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Predicate | None = None,
        success_callback: Predicate | None = None,
    ) -> None:
        for name, value in (("max_turns", max_turns), ("concurrency", concurrency)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self._api = api
        self._tools = tool_manager
        self._sampling = sampling_params
        self._max_turns = max_turns
        self._concurrency = concurrency
        self._extra_body = dict(extra_body or {})
        self._parser = get_tool_parser(tool_parser) if tool_parser is not None else None
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
        the call."""
        step = self._step if step is None else step
        self._step += 1
        managers = managers_for(tool_manager if tool_manager is not None else self._tools, trajectories)
        options = self._options(sampling_params or self._sampling)

        def run(number: int) -> Trajectory:
            finished = self._run(trajectories[number], managers[number], options)
            self._traces.write(finished, step=step, fallback_id=str(number))
            return finished

        if not trajectories:
            return []
        with ThreadPoolExecutor(
            max_workers=min(self._concurrency, len(trajectories)), thread_name_prefix="agl-slime-api"
        ) as pool:
            return list(pool.map(run, range(len(trajectories))))

    def _options(self, sampling: SamplingParams | None) -> dict[str, Any]:
        options: dict[str, Any] = {}
        if sampling is not None:
            options = {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens,
            }
            if sampling.stop:
                options["stop"] = list(sampling.stop)
        if self._extra_body:
            options["extra_body"] = self._extra_body
        return options

    def _run(self, trajectory: Trajectory, tools: Any, options: Mapping[str, Any]) -> Trajectory:
        row = _ApiRow(trajectory, tools)
        try:
            schemas = trajectory.get("tools") or (tools.schemas if tools is not None else None)
            offered = {"tools": schemas} if schemas else {}
            while row.stop_reason is None:
                choice = self._api.chat(row.messages, **offered, **options).choices[0]
                calls = row.answered(choice, self._parser, with_tools=tools is not None)
                if row.stop_reason is None and row.turns >= self._max_turns:
                    row.stop_reason = "max_turns"
                if row.stop_reason is None:
                    assert tools is not None  # without tools an answer is the last
                    row.observed(asyncio.run(tools.run(calls)))
        except Exception as error:  # whatever goes wrong with one trajectory is its own end and no other's
            logger.warning("A trajectory ended with an error of the API or a tool: %s: %s", type(error).__name__, error)
            row.stop_reason, row.error = "api_error", f"{type(error).__name__}: {error}"
        return row.output()


class _ApiRow:
    """One trajectory while it runs."""

    def __init__(self, trajectory: Trajectory, tools: Any) -> None:
        self.given = trajectory
        self.offered = list(getattr(tools, "names", ()))
        self.messages: list[dict[str, Any]] = [dict(message) for message in trajectory.get("messages") or []]
        self.turns = 0
        self.stop_reason: str | None = None
        self.error: str | None = None
        self.calls: Counter[str] = Counter()
        self.malformed = self.errors = 0

    def answered(self, choice: Any, parser: ToolParser | None, *, with_tools: bool) -> list[ToolCall]:
        """Take an answer in; sets ``stop_reason`` unless it calls tools."""
        self.turns += 1
        content = choice.message.content or ""
        message: dict[str, Any] = {"role": "assistant", "content": content}
        listed = choice.message.tool_calls or []
        if listed:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in listed]
        self.messages.append(message)
        calls = [self._call(call) for call in listed]
        if not listed and parser is not None and with_tools:
            parsed = parser.parse(content)
            self.malformed += len(parsed.malformed)
            calls = list(parsed.calls)
        if choice.finish_reason == "length":
            self.stop_reason = "length"
        elif not calls or not with_tools:
            self.stop_reason = "stop"
        return calls

    def _call(self, call: Any) -> ToolCall:
        try:
            arguments = json.loads(call.function.arguments or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("not an object")
        except ValueError:
            self.malformed += 1
            arguments = {"arguments": call.function.arguments}  # no such argument: the tool's error tells the model
        return ToolCall(name=call.function.name, arguments=arguments, id=call.id or "")

    def observed(self, results: Sequence[Any]) -> None:
        for result in results:
            self.calls[result.call.name] += 1
            self.errors += result.error is not None
            self.messages.append(result.to_message())

    def output(self) -> Trajectory:
        finished = {
            **self.given,
            "messages": self.messages,
            "turns": self.turns,
            "stop_reason": self.stop_reason,
            "truncated": self.stop_reason in ("length", "max_turns"),
            "tools_called": {
                "offered": self.offered,
                "calls": dict(self.calls),
                "malformed": self.malformed,
                "errors": self.errors,
            },
        }
        return finished if self.error is None else {**finished, "error": self.error}
