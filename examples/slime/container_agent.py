"""A black-box agent: a program in a container per rollout, which finds the gateway by the environment.

The task is one JSON line on the program's standard input, its answer the last line of its standard output. ``docker``
(or ``AGENT_ENGINE``, for example ``podman``) and the image ``AGENT_IMAGE`` must be on each node that runs agents;
``AGENT_OPTIONS`` are more options of ``docker run``, for example ``--network host``. Settings: ``agl_container.yaml``.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from typing import Any

import agentlightning as agl

ENGINE = os.environ.get("AGENT_ENGINE", "docker")


@agl.rollout
async def answer(task: dict[str, Any], llm: agl.LLM, rollout: agl.Rollout) -> float:
    url, key = llm.endpoint, llm.api_key or "unused"
    settings = {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "MODEL": llm.model,
    }
    name = f"agl-{rollout.rollout_id}"
    passed = [part for variable in settings for part in ("--env", variable)]  # values are not on the command line
    options = shlex.split(os.environ.get("AGENT_OPTIONS", ""))
    program = await asyncio.create_subprocess_exec(
        *(ENGINE, "run", "--rm", "--interactive", "--name", name, *passed, *options, os.environ["AGENT_IMAGE"]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **settings},
    )
    try:
        output, _ = await program.communicate(json.dumps(task).encode() + b"\n")
    finally:
        if program.returncode is None:  # at its time limit: the engine's daemon keeps a container whose client has died
            await (await asyncio.create_subprocess_exec(ENGINE, "kill", name)).wait()
            await program.wait()
    if program.returncode:
        raise RuntimeError(f"{ENGINE} run ended with {program.returncode}")  # the rollout fails: no reward of 0
    lines = output.decode(errors="replace").split("\n")
    return score(task, next((line for line in reversed(lines) if line.strip()), ""))


def score(task: dict[str, Any], last_line: str) -> float:
    """The reward, computed outside of the container."""
    return 1.0 if last_line.strip() == str(task["label"]) else 0.0
