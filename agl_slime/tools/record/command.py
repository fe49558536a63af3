from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agl_slime.errors import ConfigError
from agl_slime.support.files import sole_owner
from agl_slime.support.flags import parse_flags
from agl_slime.support.http import stop_signal
from agl_slime.support.terminal import print_line
from agl_slime.tools.gateway.command import ServingCommand, serve_until
from agl_slime.tools.record.recorder import RecordGateway


@dataclass(frozen=True, kw_only=True)
class RecordCommand(ServingCommand):
    """Serve a model to agents and record exact tokens for any trainer: POST /rollouts, the protocols at
    /rollouts/NAME/v1, POST /rollouts/NAME/finish with a reward, GET /rollouts/NAME."""

    directory: Path = Path("recorded")
    """A directory for a file of each rollout; one process per directory."""
    idle_s: float = 3600.0
    """Seconds without a request after which a rollout ends when it is read or another one begins."""


async def _record(command: RecordCommand) -> None:
    ended = stop_signal()
    llm = command.llm()
    try:
        command.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--directory {command.directory} cannot be made: {error}") from error
    gateway = RecordGateway(
        directory=command.directory,
        llm=llm,
        idle_s=command.idle_s,
        token=command.client_token(),
        settings=command.gateway,
    )
    with sole_owner(command.directory), gateway:
        address = f"{gateway.url}/rollouts" if command.client_token() else gateway.rollouts_url
        print_line(f"recorder at {address}")
        await serve_until(ended, model=llm.model)


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    asyncio.run(_record(parse_flags(RecordCommand, prog="agl-slime record", arguments=arguments)))
