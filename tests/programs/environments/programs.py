"""One episode of a real program in the sandbox: a request as JSON on standard input, what became of it on standard
output. The model is at an address that the request names, or scripted here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.utils.loaders import harness_config_type, load_harness

from agl_slime.environments.plugins import add_to_path
from agl_slime.environments.runtimes.layout import BubblewrapConfig
from agl_slime.environments.runtimes.lending import box, install
from tests.programs.environments.filed import PROMPT, FileTask
from tests.programs.environments.model import serving


async def run(request: dict[str, Any]) -> dict[str, Any]:
    os.environ["SCRIPTED_KEY"] = "none"
    add_to_path()
    limit = request.get("seconds", 100)
    config = BubblewrapConfig(installs=Path(request["installs"]), memory=4, disk=0.5, seconds=2 * limit)
    forward = ["SSL_CERT_FILE", "UV_INDEX_URL", "NODE_EXTRA_CA_CERTS"]
    raw = {"id": request["harness"], "forward_env": forward, **request.get("config", {})}
    harness = load_harness(harness_config_type(request["harness"]).model_validate(raw))
    at = time.monotonic()
    await install(harness, config)
    installed = time.monotonic() - at
    says = iter(request.get("says", []))
    async with contextlib.AsyncExitStack() as stack:
        address, asked = request.get("address"), []
        if address is None:
            address, asked = await stack.enter_async_context(serving(lambda body: next(says, "Done.")))
        mine = await stack.enter_async_context(box(config))
        agent = vf.make_agent(
            vf.AgentConfig(
                model="scripted",
                harness=harness.config,
                client=EvalClientConfig(base_url=address, api_key_var="SCRIPTED_KEY"),
                runtime=vf.SubprocessConfig(),
                timeout={"setup": 60, "rollout": limit},
            )
        )
        data = vf.TaskData(idx=0, prompt=PROMPT)
        at = time.monotonic()
        trace = await agent.run(FileTask(data), runtime=mine)
        ran = time.monotonic() - at
    return {
        "ok": trace.ok,
        "errors": [error.message for error in trace.errors],
        "rewards": {name: reward.score for name, reward in trace.rewards.items() if reward is not None},
        "turns": trace.num_turns,
        "branches": len(trace.branches),
        "stop": trace.stop_condition,
        "seconds": {"install": round(installed, 2), "run": round(ran, 2)},
        "asked": asked if request.get("show") else len(asked),
        "reply": trace.last_reply,
    }


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(asyncio.run(run(json.load(sys.stdin))), default=str), file=out)
