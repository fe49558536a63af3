"""How a resource that names a model becomes what a conversation needs: tokenizer, client of the engine, templates.

One of these serves all rollouts of an agent, or of a gateway.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp
from yarl import URL

from agl_slime.errors import ConfigError
from agl_slime.sglang.client import SGLangClient
from agl_slime.sglang.describe import end_token_ids, vocab_size_of
from agl_slime.sglang.generation import SamplingParams
from agl_slime.sglang.transport import ClientSettings
from agl_slime.support.agl import LLM, ProxyLLM
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.template import ChatTemplate, chat_template
from agl_slime.tokens.tokenizer import ChatTokenizer

# Agent Lightning's convention for the name of the model under training.
LLM_RESOURCE = "main_llm"

# Rollouts of one agent have the same tools, mostly; where each task has its own, those not used for long are let go.
_MAX_TEMPLATES = 64

_SAMPLING_FIELDS = frozenset(SamplingParams.__dataclass_fields__) - {"extra"}


class EngineAccess:
    """Clients by endpoint and templates by tools, made when they are first asked for. A copy in another process opens
    its own connections."""

    def __init__(self, *, tokenizer: ChatTokenizer | None = None, settings: ClientSettings | None = None) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._clients: dict[str, SGLangClient] = {}
        self._templates: dict[Any, ChatTemplate] = {}
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self._engines: dict[str, dict[str, Any]] = {}  # behind gateways: address, what is asked for to be replayed

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "_templates": {}, "_tokenizers": {}}

    async def tokenizer(self, llm: LLM) -> ChatTokenizer:
        """The one that was given, else that of ``LLM.model``."""
        if self._tokenizer is None and not llm.model:
            raise ConfigError(f"LLM.model of {LLM_RESOURCE!r} is empty; name a checkpoint, or give a tokenizer")
        known = self._tokenizer or self._tokenizers.get(llm.model)
        if known is None:
            known = self._tokenizers[llm.model] = await run_in_thread(load_tokenizer, llm.model)
        return known

    async def engine(self, llm: LLM) -> LLM:
        """``llm`` with the engine's own address, where it names a gateway of ours: an agent that knows tokens needs
        nobody to translate."""
        if not isinstance(llm, ProxyLLM):
            return llm
        gateway = llm.get_base_url(None, None).removesuffix("/v1")
        if gateway not in self._engines:
            async with aiohttp.ClientSession() as session, session.get(f"{gateway}/engine") as answer:
                if answer.status != 200:
                    where = str(URL(gateway).origin())  # its path may hold the token
                    raise ConfigError(f"{LLM_RESOURCE} names {where}, which is no gateway of agl-slime's")
                self._engines[gateway] = await answer.json()
        told = self._engines[gateway]
        sampling = {**told.get("replay", {}), **llm.sampling_parameters}
        return LLM(endpoint=told["endpoint"], model=llm.model, sampling_parameters=sampling)

    def client(self, llm: LLM, tokenizer: ChatTokenizer) -> SGLangClient:
        client = self._clients.get(llm.endpoint)
        if client is None:
            client = self._clients[llm.endpoint] = SGLangClient(
                base_url=llm.endpoint,
                settings=self._settings,
                eos_token_ids=end_token_ids(llm.model, tokenizer),
                decode=tokenizer.decode,
                vocab_size=vocab_size_of(llm.model),
            )
        return client

    def template(
        self,
        tokenizer: ChatTokenizer,
        tools: Sequence[Mapping[str, Any]] | None,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        llm: LLM | None = None,
    ) -> ChatTemplate:
        """One template for all rollouts with these tools: what it has found out about itself is known to all. The
        run's template settings are those of ``llm``; ``template_kwargs`` are given over its arguments."""
        given = template_settings(llm.sampling_parameters if llm is not None else {})
        kwargs = {**given.pop("chat_template_kwargs", {}), **(template_kwargs or {})}
        key = template_key(tools, kwargs), id(tokenizer), *given.values()
        made = self._templates.pop(key, None)
        if made is None:
            made = chat_template(tokenizer, tools, kwargs, **given)
        self._templates[key] = made  # those used last at the end
        if len(self._templates) > _MAX_TEMPLATES:
            del self._templates[next(iter(self._templates))]
        return made

    async def aclose(self) -> None:
        """Close the connections; to be called on the event loop that they were used on."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()


def template_key(tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Equal for what makes the same template of one tokenizer."""
    return json.dumps([tools, dict(template_kwargs or {})], sort_keys=True, default=repr)


class ServedResources(dict[str, Any]):
    """Agents that were written for other runs find the model as ``llm``. It is not listed twice, for
    ``@agl.rollout`` takes the first model that is listed and warns of others."""

    def __missing__(self, name: str) -> Any:
        if name != "llm":
            raise KeyError(name)
        return self.get(LLM_RESOURCE) or next(found for found in self.values() if isinstance(found, LLM))


def replay_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What of a run's sampling parameters is between gateway and engine, and no client's to hand on."""
    return {name: sampling[name] for name in ("routed_experts", "nucleus", "replay_files") if sampling.get(name)}


def template_settings(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The template settings of a run, which travel with its sampling parameters to wherever a prompt is made."""
    return {name: sampling[name] for name in ("chat_template_kwargs", "later_systems") if sampling.get(name)}


def run_parameters(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run's sampling parameters, those that agents do not hand on: a gateway adds them to what they ask."""
    return {**replay_of(sampling), **template_settings(sampling)}


def sampling_of(llm: LLM) -> SamplingParams:
    """``LLM.sampling_parameters`` as ``SamplingParams``; OpenAI's ``max_tokens`` is taken for ``max_new_tokens``, names
    that are not ours are passed to SGLang as they are."""
    settings = template_settings(llm.sampling_parameters)
    extra = {name: value for name, value in llm.sampling_parameters.items() if name not in settings}
    values = {name: extra.pop(name) for name in [*extra] if name in _SAMPLING_FIELDS}
    if "max_tokens" in extra:
        values.setdefault("max_new_tokens", extra.pop("max_tokens"))
    for name in {"stop", "stop_token_ids"} & values.keys():
        value = values[name]
        values[name] = (value,) if isinstance(value, (str, int)) else tuple(value or ())
    return SamplingParams(**values, extra=extra)
