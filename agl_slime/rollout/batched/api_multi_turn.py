"""Rollouts of many turns over an OpenAI-compatible chat API: text in, text out, for collecting data and for evaluation.
There are no token ids; ``messages_to_sample`` makes Samples of what comes back, tokenized again and marked as such."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.rollout.batched.multi_turn import Trajectory, TurnsRollout
from agl_slime.rollout.chat_session import ChatSession
from agl_slime.rollout.scheduler import StopReason
from agl_slime.rollout.turns import run_turns
from agl_slime.sglang.generation import SamplingParams
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.formats import get_tool_parser

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

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        """The completion of a conversation; ``options`` go to ``chat.completions.create``, whose errors are raised."""
        return self._client.chat.completions.create(model=self.model, messages=list(messages), **options)

    @cached_property
    def _client(self) -> Any:
        try:
            import openai
        except ImportError as error:
            raise MissingDependencyError("an OpenAI-compatible API needs openai: pip install openai") from error
        return openai.OpenAI(
            base_url=self.base_url, api_key=self.api_key, timeout=self.timeout_s, max_retries=self.max_retries
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_client"}  # belongs to a process


class APIMultiTurnRollout(TurnsRollout):
    """Rollouts over an API, each trajectory in a thread of its own, at most ``concurrency`` at the same time; other
    ``options`` are those of ``TurnsRollout``. Of ``sampling_params`` temperature, top_p, stop and max_new_tokens are
    sent (its default is not: the server's own limit holds then), and ``extra_body``. Without ``tool_parser`` only the
    server's own ``tool_calls`` count.

    A trajectory comes back with its own keys and ``messages``, ``turns``, ``truncated``, ``tools_called`` and
    ``stop_reason``: ``stop`` (an answer without calls), ``length``, ``max_turns``, or ``api_error`` (the API or a tool
    manager raised; ``error`` says what). A failing trajectory never raises out of the batch.
    """

    def __init__(
        self, *, api: OpenAI, concurrency: int = 8, extra_body: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {concurrency}")
        self._api = api
        self._concurrency = concurrency
        self._extra_body = dict(extra_body or {})
        self._parser = get_tool_parser(self._tool_parser) if self._tool_parser is not None else None

    def _run(
        self, trajectories: list[Trajectory], tools: Sequence[Any], made: bool, sampling: SamplingParams | None
    ) -> list[Trajectory]:
        options: dict[str, Any] = {"extra_body": self._extra_body} if self._extra_body else {}
        if sampling is not None:
            options |= {name: getattr(sampling, name) for name in ("temperature", "top_p")}
            if sampling.max_new_tokens != SamplingParams().max_new_tokens:
                options["max_tokens"] = sampling.max_new_tokens
            options |= {"stop": list(sampling.stop)} if sampling.stop else {}

        def run(trajectory: Trajectory, manager: Any) -> Trajectory:
            return run_blocking(self._run_one(trajectory, manager, made, options))

        workers = min(self._concurrency, len(trajectories))
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="agl-slime-api") as pool:
            return list(pool.map(run, trajectories, tools))

    async def _run_one(self, trajectory: Trajectory, tools: Any, made: bool, options: Mapping[str, Any]) -> Trajectory:
        messages = [*map(dict, trajectory.get("messages") or [])]
        shown: dict[str, Any] = {}

        async def complete(messages: Sequence[Mapping[str, Any]], **_: Any) -> Mapping[str, Any]:
            choice = self._api.chat(messages, **options, **shown).choices[0]  # blocks its own thread and loop
            listed = [call.model_dump(exclude_none=True) for call in choice.message.tool_calls or ()]
            message = {"content": choice.message.content, "tool_calls": listed}
            return {"choices": [{"message": message, "finish_reason": choice.finish_reason}]}

        limits = {"parser": self._parser, "max_turns": self._max_turns}
        session = ChatSession(messages=messages, tools=tools, complete=complete, **limits)
        failure: dict[str, str] = {}
        try:
            schemas = trajectory.get("tools") or (tools.schemas if tools is not None else None)
            shown |= {"tools": schemas} if schemas else {}
            await run_turns(session, task={})
        except Exception as error:  # whatever goes wrong with one trajectory is its own end and no other's
            logger.warning("A trajectory ended with an error of the API or a tool: %s: %s", type(error).__name__, error)
            failure = {"stop_reason": "api_error", "error": f"{type(error).__name__}: {error}"}
        finally:
            if made and tools is not None:
                await tools.aclose()
        end = session.stats.stop_reason or StopReason.STOP
        truncated = not failure and end in (StopReason.LENGTH, StopReason.MAX_TURNS)
        return self._output(trajectory, session, **{"stop_reason": end.value, "truncated": truncated, **failure})
