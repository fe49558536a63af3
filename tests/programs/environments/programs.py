"""One episode of a real program in the sandbox: a request as JSON on standard input, its trace as JSON on standard
output. The model is at an address that the request names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.utils.loaders import harness_config_type, load_harness

from agl_slime.environments.plugins import add_to_path
from agl_slime.environments.runtimes.layout import BubblewrapConfig
from agl_slime.environments.runtimes.lending import box, install
from tests.programs.environments.filed import PROMPT, FileTask
from tests.programs.environments.model import client, print_result, scores_of


async def run(request: dict[str, Any]) -> dict[str, Any]:
    add_to_path()
    limit = request.get("seconds", 100)
    config = BubblewrapConfig(installs=Path(request["installs"]), memory=4, disk=0.5, seconds=2 * limit)
    forward = ["SSL_CERT_FILE", "UV_INDEX_URL", "NODE_EXTRA_CA_CERTS"]
    fields = {"id": request["harness"], "forward_env": forward}
    harness = load_harness(harness_config_type(request["harness"]).model_validate(fields))
    await install(harness, config)
    async with box(config) as sandbox:
        agent = vf.make_agent(
            vf.AgentConfig(
                model="scripted",
                harness=harness.config,
                client=client(request["address"]),
                runtime=vf.SubprocessConfig(),
                timeout={"setup": 60, "rollout": limit},
            )
        )
        trace = await agent.run(FileTask(vf.TaskData(idx=0, prompt=PROMPT)), runtime=sandbox)
    errors = [error.message for error in trace.errors]
    return {"ok": trace.ok, "errors": errors, "rewards": scores_of(trace), "turns": trace.num_turns}


if __name__ == "__main__":
    print_result(run, json.load(sys.stdin))
