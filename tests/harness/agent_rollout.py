"""Arguments of the agent rollout, a generator for it, and servers in place of the buffer."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from agl_slime.buffer.agent_rollout import generate_rollout
from agl_slime.support.http import listening
from agl_slime.types import RolloutFnTrainOutput

GENERATOR = """
    import json, urllib.request

    TASK_TYPE = "sums"
    EPOCHS = None

    def run_rollout(data):
        skip = list(data["skip_instance_ids"])
        for epoch in range(EPOCHS or data["num_epoch"]):
            for line in open(data["input_file"]):
                instance_id = json.loads(line)["instance_id"]
                if instance_id in skip:
                    skip.remove(instance_id)
                    continue
                n_items = int(data["num_repeat_per_sample"])
                items = [
                    {
                        "uid": f"{epoch}.{instance_id}.{n}", "instance_id": instance_id, "group_id": epoch,
                        "messages": [], "reward": n % 2,
                        "extra_info": {"payload": {
                            k: data[k] for k in ("sampling_params", "remote_engine_url", "num_process")
                        }},
                        "tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-0.5, -1.0],
                    }
                    for n in range(n_items)
                ]
                request = urllib.request.Request(
                    data["remote_buffer_url"] + "/buffer/write", json.dumps(items).encode(),
                    {"Content-Type": "application/json"},
                )
                urllib.request.urlopen(request).read()
"""


class DataBuffer:
    """The methods of slime's data buffer that the agent rollout calls."""

    def __init__(self, metadata: dict[str, Any] | None = None) -> None:
        self.metadata = dict(metadata or {})

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)


def args_for(url: str, tmp_path: Path, *, instances: int = 4, **changes: Any) -> SimpleNamespace:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"instance_id": f"id{n}"}) + "\n" for n in range(instances)))
    values = {"agent_rollout_buffer_url": url, "rollout_task_type": "sums", "prompt_data": str(file), "num_epoch": 1}
    values |= {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 64}
    values |= {"rollout_temperature": 0.8, "rollout_top_p": 0.9, "hf_checkpoint": None, "rewards_normalization": False}
    values |= {"sglang_router_ip": "127.0.0.1", "sglang_router_port": 3000, "fetch_trajectory_retry_times": 3}
    return SimpleNamespace(**{**values, **changes})


async def call(args: Any, rollout_id: int, data_buffer: Any) -> RolloutFnTrainOutput:
    output = await asyncio.to_thread(generate_rollout, args, rollout_id, data_buffer)
    assert isinstance(output, RolloutFnTrainOutput)
    return output


def instances(output: RolloutFnTrainOutput) -> list[str]:
    return [group[0].metadata["instance_id"] for group in output.samples]


def serve(app: web.Application) -> AbstractAsyncContextManager[str]:
    return listening(app, host="127.0.0.1", port=0, backlog=128)


def buffer_that(get: Callable[[web.Request], Awaitable[web.Response]]) -> AbstractAsyncContextManager[str]:
    """A buffer that accepts every start and answers ``/get_rollout_data`` with ``get``."""

    async def start(request: web.Request) -> web.Response:
        return web.json_response({"message": "Rollout started"})

    app = web.Application()
    app.router.add_post("/get_rollout_data", get)
    app.router.add_post("/start_rollout", start)
    return serve(app)
