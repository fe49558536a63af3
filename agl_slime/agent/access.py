"""``EngineAccess``: tokenizer, engine client and chat templates for the model that an ``LLM`` resource names.

One instance serves all rollouts of an agent, or of a gateway.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
from yarl import URL

from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.describe import end_token_ids, vocab_size_of
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.engine.client.transport import ClientSettings
from agl_slime.errors import ConfigError, EngineError, EngineProtocolError, EngineRequestError
from agl_slime.support.agl_types import LLM, ProxyLLM
from agl_slime.support.net import shown_url
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.template import ChatTemplate, chat_template
from agl_slime.tokens.tokenizer import ChatTokenizer

logger = logging.getLogger(__name__)

_PROBE_SETTINGS = ClientSettings(total_timeout_s=60.0, max_attempts=2)

# Agent Lightning's name for the model under training.
LLM_RESOURCE = "main_llm"

# The least recently used templates are dropped: an agent may have other tools for each task.
_MAX_TEMPLATES = 64

_TEMPLATE_SETTINGS = ("chat_template_kwargs", "later_systems")
_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__) - {"extra"}


class EngineAccess:
    """Clients by endpoint, templates by tools, made at first use. A copy in another process has its own connections."""

    def __init__(self, *, tokenizer: ChatTokenizer | None = None, settings: ClientSettings | None = None) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._clients: dict[str, SGLangClient] = {}
        self._templates: dict[Any, ChatTemplate] = {}
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self._engines: dict[str, dict[str, Any]] = {}  # by gateway: the engine's address and replay parameters

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "_templates": {}, "_tokenizers": {}}

    async def tokenizer(self, llm: LLM) -> ChatTokenizer:
        """The constructor's tokenizer, else the one of ``LLM.model``."""
        if self._tokenizer is None and not llm.model:
            raise ConfigError(f"LLM.model of {LLM_RESOURCE!r} is empty; name a checkpoint, or give a tokenizer")
        tokenizer = self._tokenizer or self._tokenizers.get(llm.model)
        if tokenizer is None:
            tokenizer = self._tokenizers[llm.model] = await run_in_thread(load_tokenizer, llm.model)
        return tokenizer

    async def engine(self, llm: LLM) -> LLM:
        """``llm`` with the engine's address in place of the gateway's: an agent that works on tokens needs no protocol
        translation. Raises ``ConfigError`` when the address is no gateway of this package."""
        if not isinstance(llm, ProxyLLM):
            return llm
        gateway = llm.get_base_url(None, None).removesuffix("/v1")
        if gateway not in self._engines:
            async with aiohttp.ClientSession() as session, session.get(f"{gateway}/engine") as answer:
                if answer.status != 200:
                    origin = str(URL(gateway).origin())  # its path may hold the token
                    raise ConfigError(f"{LLM_RESOURCE} names {origin}, which is no gateway of agl-slime's")
                self._engines[gateway] = await answer.json()
        engine = self._engines[gateway]
        sampling = {**engine.get("replay", {}), **llm.sampling_parameters}
        return LLM(endpoint=engine["endpoint"], model=llm.model, sampling_parameters=sampling)

    def client(self, llm: LLM, tokenizer: ChatTokenizer) -> SGLangClient:
        client = self._clients.get(llm.endpoint)
        if client is None:
            client = self._clients[llm.endpoint] = SGLangClient(
                base_url=llm.endpoint,
                settings=self._settings,
                eos_token_ids=end_token_ids(llm.model, tokenizer),
                decode=tokenizer.decode,
                vocab_size=vocab_size_of(llm.model, tokenizer),
            )
        return client

    def template(
        self,
        tokenizer: ChatTokenizer,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any],
        *,
        llm: LLM,
    ) -> ChatTemplate:
        """The template that all rollouts with these tools share, and with it the results of its probes. The run's
        template settings are in ``llm``; ``template_kwargs`` override its template arguments."""
        settings = template_settings(llm.sampling_parameters)
        kwargs = {**settings.pop("chat_template_kwargs", {}), **template_kwargs}
        key = template_key(tools, kwargs), id(tokenizer), *settings.values()
        template = self._templates.pop(key, None)
        if template is None:
            template = chat_template(tokenizer, tools, kwargs, **settings)
        self._templates[key] = template  # last: most recently used
        if len(self._templates) > _MAX_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        return template

    async def aclose(self) -> None:
        """Close the connections. Must run on the event loop that used them."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()


def template_key(tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any]) -> str:
    """A cache key for the templates of one tokenizer."""
    return json.dumps([tools, dict(template_kwargs)], sort_keys=True, default=repr)


def replay_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The replay parameters among a run's sampling parameters: internal, stripped before clients see them."""
    return {name: sampling[name] for name in ("routed_experts", "nucleus", "replay_files") if sampling.get(name)}


def template_settings(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The template settings of a run, which travel among its sampling parameters to every place that builds prompts."""
    return {name: sampling[name] for name in _TEMPLATE_SETTINGS if sampling.get(name)}


def run_parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a run that agents do not send: a gateway adds them to each request."""
    context = {name: sampling[name] for name in ("context_length",) if sampling.get(name)}
    return {**replay_of(sampling), **template_settings(sampling), **context}


def sampling_of(llm: LLM) -> SamplingParams:
    """``LLM.sampling_parameters`` as ``SamplingParams``: OpenAI's ``max_tokens`` means ``max_new_tokens``, unknown
    names are passed to SGLang unchanged."""
    extra = {name: value for name, value in llm.sampling_parameters.items() if name not in _TEMPLATE_SETTINGS}
    values = {name: extra.pop(name) for name in [*extra] if name in _SAMPLING_FIELDS}
    if "max_tokens" in extra:
        values.setdefault("max_new_tokens", extra.pop("max_tokens"))
    for name in {"stop", "stop_token_ids"} & values.keys():
        value = values[name]
        values[name] = (value,) if isinstance(value, (str, int)) else tuple(value or ())
    return SamplingParams(**values, extra=extra)


async def check_replay(base_url: str, parameters: Mapping[str, Any]) -> bool:
    """Sample one token with these parameters before a run depends on it. False when the engine cannot be reached now.
    Raises ``ConfigError``, naming flag and shape, when it sends no routed experts, some of another shape, or no
    nucleus, although ``parameters`` request them."""
    sampling = sampling_of(LLM(endpoint=base_url, model="", sampling_parameters=dict(parameters)))
    if sampling.routed_experts is None and not sampling.nucleus:
        return True
    try:
        async with SGLangClient(base_url=base_url, settings=_PROBE_SETTINGS) as client:
            await client.generate([0, 0], replace(sampling, max_new_tokens=1, stop=(), stop_token_ids=()))
    except (EngineProtocolError, EngineRequestError) as error:
        raise ConfigError(str(error)) from error
    except EngineError as error:
        logger.debug("The replay data of %s cannot be checked yet: %s", shown_url(base_url), error)
        return False
    return True


def limits_of(rollout: Any, attempt: Any = None) -> dict[str, Any]:
    """A run's settings for a rollout's requests: ``seed``, from which each request gets its own ``sampling_seed``, and
    ``oldest_version``, the oldest weights that may answer."""
    metadata, attempt = rollout.metadata or {}, attempt or getattr(rollout, "attempt", None)
    seed, oldest = metadata.get("seed", rollout.rollout_id), metadata.get("oldest_version")
    seed = f"{seed} {getattr(attempt, 'sequence_id', 1)}"
    return {"seed": seed, "oldest_version": oldest if isinstance(oldest, int) else None}
