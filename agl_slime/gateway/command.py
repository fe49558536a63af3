"""``agl-slime gateway``: a standalone gateway for agents that other runners execute.

agl-slime gateway --store-url http://HOST:4747 --sglang-url http://HOST:30000 --model-path DIR
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from agl_slime.errors import AglSlimeError, ConfigError
from agl_slime.gateway.remote import TOKEN_VARIABLE, StoreGateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.store.client import RemoteStore
from agl_slime.store.server import TOKEN_VARIABLE as STORE_TOKEN_VARIABLE
from agl_slime.support.agl import LLM
from agl_slime.support.http import stop_signal
from agl_slime.tokens.systems import LaterSystems
from agl_slime.tokens.tokenizer import read_template_kwargs


@dataclass(frozen=True, kw_only=True)
class GatewayCommand:
    """Serve the model under training to agents that other runners execute, and write sampled answers to a store."""

    store_url: str
    """The store that the runners use (agl_slime's StoreService)."""
    sglang_url: str
    """SGLang server or router."""
    model_path: Path
    """A checkpoint with the policy's tokenizer and chat template."""
    max_new_tokens: int = 256
    """Most tokens of an answer, unless the rollout's resources set it."""
    temperature: float = 1.0
    """Sampling temperature, unless the rollout's resources set it."""
    chat_template_kwargs: str = ""
    """Arguments of the model's chat template, as a JSON object: {"preserve_thinking": true}."""
    later_systems: LaterSystems = "in_place"
    """System messages after the first, if the chat template takes only one: in_place (a user's message, or the end of
    the tool result before it), user (a user's message), or first (at the beginning, which forks)."""
    token: str | None = None
    """Token of clients; needed unless the address is loopback. AGL_SLIME_GATEWAY_TOKEN is the same."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    """Address, limits, and which answers are trained."""


async def _serve(command: GatewayCommand) -> None:
    if not (command.model_path / "config.json").is_file() and not (command.model_path / "tokenizer.json").is_file():
        raise ConfigError(f"--model-path {command.model_path}: there is no checkpoint")
    kwargs = read_template_kwargs(command.chat_template_kwargs, "--chat-template-kwargs")
    sampling: dict[str, Any] = {"temperature": command.temperature, "max_new_tokens": command.max_new_tokens}
    sampling |= {"chat_template_kwargs": kwargs, "later_systems": command.later_systems}
    llm = LLM(endpoint=command.sglang_url, model=str(command.model_path), sampling_parameters=sampling)
    store_token, token = os.environ.get(STORE_TOKEN_VARIABLE), command.token or os.environ.get(TOKEN_VARIABLE)
    ended = stop_signal()
    store = RemoteStore(command.store_url, token=store_token)
    gateway = StoreGateway(store=store, llm=llm, token=token, settings=command.gateway)
    with gateway:
        print(f"gateway at {gateway.url}/v1", flush=True)
        await ended.wait()
    await store.close()


def main(arguments: Sequence[str]) -> int:
    """``agl-slime gateway``: serve until SIGINT or SIGTERM; returns the exit code."""
    try:
        asyncio.run(_serve(tyro.cli(GatewayCommand, prog="agl-slime gateway", args=list(arguments))))
    except AglSlimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
