"""A standalone gateway, for agents that other runners execute.

agl-slime gateway --store-url http://HOST:4747 --sglang-url http://HOST:30000 --model-path DIR
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_slime.engine.client.transport import checked_url
from agl_slime.errors import ConfigError
from agl_slime.gateway.server import TOKEN_VARIABLE
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.agl_types import LLM
from agl_slime.support.flags import parse_flags
from agl_slime.support.http import stop_signal
from agl_slime.support.terminal import print_line
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.systems import LaterSystems
from agl_slime.tokens.tokenizer import read_template_kwargs


@dataclass(frozen=True, kw_only=True)
class ServingCommand:
    """The engine, its model, and the address of a standalone gateway."""

    sglang_url: str
    """SGLang server or router."""
    model_path: Path
    """A checkpoint with the policy's tokenizer and chat template."""
    max_new_tokens: int = 256
    """Most tokens of an answer, where a rollout's resources set no other number."""
    temperature: float = 1.0
    """Sampling temperature, where a rollout's resources set no other one."""
    chat_template_kwargs: str = ""
    """Arguments of the model's chat template, as a JSON object: {"preserve_thinking": true}."""
    later_systems: LaterSystems = "in_place"
    """System messages after the first, if the chat template takes only one: in_place (a user's message, or the end of
    the tool result before it), user (a user's message), or first (at the beginning, which forks)."""
    token: str | None = None
    """Token of clients; needed unless the address is loopback. AGL_SLIME_GATEWAY_TOKEN is the same. A recorder without
    one makes one, and prints it in its address."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    """Address, limits, and which answers are trained."""

    def llm(self) -> LLM:
        """The engine with the sampling parameters. Raises ``ConfigError``."""
        if not (self.model_path / "config.json").is_file() and not (self.model_path / "tokenizer.json").is_file():
            raise ConfigError(f"--model-path {self.model_path}: there is no checkpoint")
        url = checked_url(self.sglang_url)
        kwargs = read_template_kwargs(self.chat_template_kwargs, "--chat-template-kwargs")
        sampling: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
        sampling |= {"chat_template_kwargs": kwargs, "later_systems": self.later_systems}
        return LLM(endpoint=url, model=str(self.model_path), sampling_parameters=sampling)

    def client_token(self) -> str | None:
        """The token of clients, if there is one."""
        return self.token or os.environ.get(TOKEN_VARIABLE)


@dataclass(frozen=True, kw_only=True)
class GatewayCommand(ServingCommand):
    """Serve the model under training to agents that other runners execute, and write sampled answers to a store."""

    store_url: str
    """The store that the runners use (agl_slime's StoreService)."""


async def _serve(command: GatewayCommand) -> None:
    # the store is Agent Lightning's, which the recorder does without
    from agl_slime.gateway.remote import StoreGateway
    from agl_slime.store.client import RemoteStore
    from agl_slime.store.server import TOKEN_VARIABLE as STORE_TOKEN_VARIABLE

    ended = stop_signal()
    llm = command.llm()
    store = RemoteStore(command.store_url, token=os.environ.get(STORE_TOKEN_VARIABLE))
    gateway = StoreGateway(store=store, llm=llm, token=command.client_token(), settings=command.gateway)
    with gateway:
        print_line(f"gateway at {gateway.url}/v1")
        await serve_until(ended, model=llm.model)
    await store.close()


async def serve_until(ended: asyncio.Event, *, model: str) -> None:
    """Wait for ``ended``, and load the model's tokenizer meanwhile, for which the first call would wait otherwise.
    Raises ``ConfigError`` when it cannot be loaded."""
    loading = asyncio.ensure_future(run_in_thread(load_tokenizer, model))
    loading.add_done_callback(lambda loaded: ended.set() if loaded.cancelled() or loaded.exception() else None)
    await ended.wait()
    if loading.done():
        loading.result()


def main(arguments: Sequence[str]) -> None:
    """``agl-slime gateway``: serve until SIGINT or SIGTERM."""
    asyncio.run(_serve(parse_flags(GatewayCommand, prog="agl-slime gateway", arguments=arguments)))
