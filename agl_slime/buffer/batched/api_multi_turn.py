"""Multi-turn rollouts over an OpenAI-compatible chat API, for collecting data and for evaluation. There are no token
ids; ``messages_to_sample`` makes Samples of the returned text, marked as re-tokenized."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from agl_slime.agent.chat_session import ChatSession
from agl_slime.agent.scheduler import StopReason
from agl_slime.agent.turns import run_turns
from agl_slime.buffer.batched.multi_turn import Trajectory, TurnsRollout
from agl_slime.engine.client.generation import DefaultLimit, SamplingParams
from agl_slime.errors import ConfigError, RolloutError, missing_as_error
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.formats import get_tool_parser

logger = logging.getLogger(__name__)


@dataclass
class OpenAI:
    """An OpenAI-compatible endpoint. ``timeout_s`` limits one call; the ``openai`` client retries failed calls up to
    ``max_retries`` times."""

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
        with missing_as_error("an OpenAI-compatible API needs openai: pip install openai"):
            import openai
        return openai.OpenAI(
            base_url=self.base_url, api_key=self.api_key, timeout=self.timeout_s, max_retries=self.max_retries
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_client"}  # cannot be pickled


class APIMultiTurnRollout(TurnsRollout):
    """Rollouts over an API, each trajectory in its own thread, at most ``concurrency`` at a time; other ``options`` as
    for ``TurnsRollout``. Requests carry every parameter set in ``sampling_params``, and ``extra_body``; parameters that
    OpenAI's API lacks (``top_k``, ``stop_token_ids``, ``extra``) go by SGLang's and vLLM's names. Without
    ``max_new_tokens`` the server's limit applies, without ``tool_parser`` only ``tool_calls`` of the server count.

    A trajectory is returned with its input keys and ``messages``, ``turns``, ``truncated``, ``tools_called`` and
    ``stop_reason``: ``stop`` (an answer without calls), ``length``, ``max_turns``, or ``api_error`` (the API or a tool
    raised ``error``). A failing trajectory never raises out of the batch.
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
        self, trajectories: list[Trajectory], tools: Sequence[Any], close: bool, sampling: SamplingParams | None
    ) -> list[Trajectory]:
        options = _options(sampling, self._extra_body)

        def run(trajectory: Trajectory, manager: Any) -> Trajectory:
            return run_blocking(self._run_one(trajectory, manager, close, options))

        workers = min(self._concurrency, len(trajectories))
        with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="agl-slime-api") as pool:
            return list(pool.map(run, trajectories, tools))

    async def _run_one(self, trajectory: Trajectory, tools: Any, close: bool, options: Mapping[str, Any]) -> Trajectory:
        messages = [*map(dict, trajectory.get("messages") or [])]
        tool_options: dict[str, Any] = {}

        async def complete(messages: Sequence[Mapping[str, Any]], **_: Any) -> Mapping[str, Any]:
            choice = self._api.chat(messages, **options, **tool_options).choices[0]  # blocks this thread's loop only
            calls = [call.model_dump(exclude_none=True) for call in choice.message.tool_calls or ()]
            message = {"content": choice.message.content, "tool_calls": calls}
            return {"choices": [{"message": message, "finish_reason": choice.finish_reason}]}

        limits = {"parser": self._parser, "max_turns": self._max_turns}
        session = ChatSession(messages=messages, tools=tools, complete=complete, **limits)
        failure: dict[str, str] = {}
        try:
            schemas = trajectory.get("tools") or (tools.schemas if tools is not None else None)
            tool_options |= {"tools": schemas} if schemas else {}
            await run_turns(session, task={}, stop_on_tool_errors=["exception"])
            if session.stats.stop_reason is StopReason.TOOL_ERROR:
                results = [str(message["content"]) for message in session.messages if message["role"] == "tool"]
                raise RolloutError([text for text in results if text.startswith("Error: ")][-1])
        except Exception as error:  # must not end the other trajectories
            logger.warning("A trajectory ended with an error of the API or a tool: %s: %s", type(error).__name__, error)
            failure = {"stop_reason": "api_error", "error": f"{type(error).__name__}: {error}"}
        finally:
            if close and tools is not None:
                await tools.aclose()
        end = session.stats.stop_reason or StopReason.STOP
        truncated = not failure and end in (StopReason.LENGTH, StopReason.MAX_TURNS)
        return self._output(trajectory, session, **{"stop_reason": end.value, "truncated": truncated, **failure})


def _options(sampling: SamplingParams | None, extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """``sampling`` as arguments of ``chat.completions.create``."""
    options: dict[str, Any] = {}
    body: dict[str, Any] = {}
    if sampling is not None:
        options |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        options |= {"stop": list(sampling.stop)} if sampling.stop else {}
        if not isinstance(sampling.max_new_tokens, DefaultLimit):
            options["max_tokens"] = sampling.max_new_tokens
        body |= {"top_k": sampling.top_k} if sampling.top_k != -1 else {}
        body |= {"stop_token_ids": list(sampling.stop_token_ids)} if sampling.stop_token_ids else {}
        body |= sampling.extra
        options |= {"seed": body.pop("sampling_seed")} if "sampling_seed" in body else {}
    body |= extra_body
    return options | ({"extra_body": body} if body else {})
