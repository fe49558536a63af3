"""Items, settings, generators and clients for tests of the rollout buffer."""

import json
import textwrap
from pathlib import Path
from typing import Any, Self

import aiohttp

from agl_slime.buffer.settings import BufferSettings

WRITES_TWO_PER_INSTANCE = """
    import json, urllib.request

    TASK_TYPE = "sums"

    def send(data, item):
        body, headers = json.dumps(item).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(data["remote_buffer_url"] + "/buffer/write", body, headers)
        return json.loads(urllib.request.urlopen(request).read())

    def run_rollout(data):
        skip = list(data["skip_instance_ids"])
        for line in open(data["input_file"]):
            instance_id = json.loads(line)["instance_id"]
            if instance_id in skip:
                continue
            for n in range(int(data["num_repeat_per_sample"])):
                names = {"uid": f"{instance_id}.{n}", "instance_id": instance_id}
                send(data, {**names, "messages": [], "reward": n % 2, "extra_info": {}})
"""


def make_item(uid: str, instance_id: Any = "math_001", reward: Any = 1.0, **fields: Any) -> dict[str, Any]:
    """An item as in the documentation of the agent rollout."""
    messages = [
        {"role": "user", "content": "Solve the equation x^2 + 5x + 6 = 0"},
        {"role": "assistant", "content": "-2 and -3"},
    ]
    return {"uid": uid, "instance_id": instance_id, "messages": messages, "reward": reward, "extra_info": {}, **fields}


def settings_for(tmp_path: Path, **changes: Any) -> BufferSettings:
    generators = tmp_path / "generators"
    generators.mkdir(exist_ok=True)
    sizes = {"port": 0, "group_size": 2, "generator_restarts": 0}
    return BufferSettings(**{"generators": generators, "input_dir": (tmp_path,), **sizes, **changes})


def add_generator(tmp_path: Path, name: str, code: str) -> Path:
    path = tmp_path / "generators" / f"{name}_generator.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return path


def write_problems(tmp_path: Path, n: int = 3) -> str:
    rows = [
        {"instance_id": f"math_{i}", "prompt": [{"role": "user", "content": f"{i} + 1?"}], "label": str(i + 1)}
        for i in range(n)
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Client:
    """A client that returns status and JSON."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(
        self, path: str, body: Any = None, *, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        async with self._session.post(self.url + path, json=body, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self._session.get(self.url + path) as response:
            return response.status, await response.json()

    async def read(self, **query: Any) -> list[dict[str, Any]]:
        _, answer = await self.post("/get_rollout_data", query)
        return answer["data"]["data"]
