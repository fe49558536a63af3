"""``ChatApi``, a model that takes chat messages and returns text, and ``ChatSession``, a conversation with it. Token
ids are unknown, so its answers are scored and compared but never trained on."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

from agl_slime.agent.scheduler import StopReason
from agl_slime.agent.session import Answer, Session, SpanWriter, write_span
from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams
from agl_slime.engine.client.transport import ClientSettings, HttpTransport
from agl_slime.errors import ConfigError, ContextOverflowError, EngineError, EngineProtocolError
from agl_slime.support.net import shown_url
from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.codec import token_array
from agl_slime.tokens.formats import read_object
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn

DEFAULT_KEY = "OPENAI_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ChatApi:
    """``model`` at an OpenAI-compatible ``url``, written as in ``OPENAI_BASE_URL``; ``/v1`` is added to a URL without
    path."""

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.model} at {shown_url(self.url)}"

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/") + ("" if urlsplit(self.url).path.strip("/") else "/v1")

    async def complete(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        sampling: SamplingParams,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Mapping[str, Any]:
        """The chat completion, with the retries and typed errors of the SGLang client. Sends temperature, top_p, stop
        and max_new_tokens of ``sampling``."""
        body: dict[str, Any] = {"model": self.model, "messages": list(messages)}
        body |= {"temperature": sampling.temperature, "max_tokens": sampling.max_new_tokens}
        body |= {"top_p": sampling.top_p} if sampling.top_p < 1 else {}
        body |= {"stop": list(sampling.stop)} if sampling.stop else {}
        body |= {"tools": list(tools)} if tools else {}
        timeout_s = self._http.settings.total_timeout_s
        return await self._http.call("POST", self._path("chat/completions"), body, timeout_s=timeout_s)

    async def models(self) -> list[str]:
        listed = (await self._http.call("GET", self._path("models"), max_attempts=2)).get("data")
        return [str(model["id"]) for model in listed or () if isinstance(model, Mapping) and model.get("id")]

    async def aclose(self) -> None:
        await self._http.aclose()

    def _path(self, name: str) -> str:
        return f"{urlsplit(self.base_url).path}/{name}"

    @cached_property
    def _http(self) -> HttpTransport:
        address = urlsplit(self.url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError(f"the address must look like https://host/v1, got {shown_url(self.url)!r}")
        return HttpTransport(
            base_url=f"{address.scheme}://{address.netloc}", settings=ClientSettings(api_key=self.api_key or None)
        )


async def find_chat_api(url: str, *, model: str | None, key_env: str) -> ChatApi:
    """``model`` at ``url``; without a name the server's only model. Raises ``ConfigError``."""
    key = os.environ.get(key_env)
    if key is None and key_env != DEFAULT_KEY:
        raise ConfigError(f"--openai-key-env {key_env}: this environment variable is not set")
    api = ChatApi(url=url, model=model or "", api_key=key)
    if model is not None:
        return api
    flag = f"--openai-url {shown_url(url)}"
    try:
        names = await api.models()
    except EngineError as error:
        raise ConfigError(f"{flag} does not list its models ({error}); give --openai-model") from error
    finally:
        await api.aclose()
    if len(names) != 1:
        listed = ", ".join(names[:5]) or "none"
        raise ConfigError(f"{flag} has {len(names)} models ({listed}); name one with --openai-model")
    return replace(api, model=names[0])


Complete = Callable[..., Awaitable[Mapping[str, Any]]]
"""``complete(messages, sampling=...)``: OpenAI's chat completion as JSON."""

_NO_IDS = token_array((), name="ids")


@dataclass(kw_only=True, eq=False)
class ChatSession(Session):
    """A conversation as messages alone; ``complete`` gives the answers. With ``write`` each turn is written as a span
    without token ids."""

    complete: Complete
    sampling: SamplingParams = field(default_factory=SamplingParams)
    write: SpanWriter | None = None
    tokenizer: Any = None  # schedulers read it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._encoder = TurnEncoder()

    async def ask(self, *messages: Mapping[str, Any], sampling: SamplingParams | None = None, **_: Any) -> Answer:
        """Append ``messages``, let the model answer, append the answer. Other arguments of ``RolloutSession.ask``
        concern tokens and are ignored."""
        self.add(*messages)
        if self.max_turns is not None and len(self.turns) + self.stats.asking >= self.max_turns:
            raise self._stopped(StopReason.MAX_TURNS, f"the rollout has had its {self.max_turns} turns")
        history, started = copy.deepcopy(self.messages), time.time()
        self.stats.asking += 1
        try:
            completion = await self.complete(history, sampling=sampling or self.sampling)
        except ContextOverflowError as error:
            if not self.turns:
                raise
            raise self._stopped(StopReason.CONTEXT_OVERFLOW, str(error)) from error
        finally:
            self.stats.asking -= 1
        content, calls, finish = _choice(completion)
        for number, call in enumerate(calls):  # some servers leave the id out, and a tool result refers to it
            call |= {"id": call.get("id") or f"call_{len(self.turns) + 1}_{number}", "type": "function"}
        self.add({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        self.stats.stop_reason = StopReason(finish)
        latency_s = time.time() - started
        turn = Turn(
            prompt_ids=_NO_IDS,
            response_ids=_NO_IDS,
            text=content,
            messages=history,
            finish_reason=finish,
            latency_s=latency_s,
        )
        self.turns.append(turn)
        if self.write is not None:
            self.write(self._encoder.encode(turn), started)
        generation = Generation(output_ids=(), log_probs=(), text=content, finish_reason=finish)
        return Answer(content, finish, generation, _parsed(content, calls) if calls or self.parser is None else None)

    def branch(self, messages: Sequence[Mapping[str, Any]], *, template: Any = None, role: str = "") -> ChatSession:
        """Another conversation of the same rollout; its turns count."""
        branch = copy.copy(self)
        branch.messages = [*map(dict, messages)]
        return branch

    def set_reward(self, reward: Any) -> None:
        """Does nothing: rewards of roles are for training, and these turns are never trained on."""


def open_chat_session(
    api: ChatApi, *, schemas: Sequence[Mapping[str, Any]] | None = None, **options: Any
) -> ChatSession:
    """The conversation of a rollout with ``api``, whose requests declare tools by ``schemas``."""
    return ChatSession(complete=partial(api.complete, tools=schemas), write=write_span, **options)


def _choice(completion: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]], FinishReason]:
    try:
        choice = completion["choices"][0]
        message = choice["message"]
        calls = [{**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ()]
        content = message.get("content") or ""
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineProtocolError(f"the API returned no OpenAI chat completion: {str(completion)[:200]}") from error
    return str(content), calls, "length" if choice.get("finish_reason") == "length" else "stop"


def _parsed(content: str, tool_calls: Sequence[Mapping[str, Any]]) -> AnswerParts:
    calls, malformed = [], []
    for call in tool_calls:
        name, text = str(call["function"].get("name")), call["function"].get("arguments")
        try:
            arguments = read_object(text or "{}")
        except ValueError:
            malformed.append(text)
            arguments = {"arguments": text}  # no tool has this parameter, so the model sees an error
        calls.append(ToolCall(name=name, arguments=arguments, id=call.get("id") or ""))
    return AnswerParts(content=content, calls=tuple(calls), malformed=tuple(malformed))
