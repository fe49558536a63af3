"""slime's own code as a client of our buffer, and its contract tests pointed at the agent rollout. Needs slime's source
(``SLIME_DIR``)."""

import asyncio
import sys
from pathlib import Path

import pytest

from agl_slime.buffer.server import BufferServer
from tests.buffer.items import add_generator, settings_for
from tests.harness.slime_programs import environment, read_result, require_slime, run_guarded

CONTRACTS = "tests/plugin_contracts/test_plugin_rollout_contracts.py"

_GENERATOR = """
    import json, urllib.request
    TASK_TYPE = "{task}"
    def run_rollout(data):
        size = int(data["num_repeat_per_sample"])
        for n in range(12):
            items = [
                {{
                    "uid": f"{{n}}.{{k}}", "instance_id": f"id{{n}}", "messages": [], "reward": k % 2,
                    "extra_info": {{"timestamp": str(n)}},
                    "tokens": [1, 2, 3, 4], "response_length": 2,
                }}
                for k in range(size)
            ]
            body = json.dumps(items).encode()
            urllib.request.urlopen(urllib.request.Request(data["remote_buffer_url"] + "/buffer/write", body)).read()
"""

# What slime's old example does with a buffer, less the training: start it, and take data until a batch is there.
_OLD_CLIENT = """
import asyncio, json, sys, types
sys.modules["wandb"] = types.ModuleType("wandb")
from slime_plugins.rollout_buffer import rollout_buffer_example as example
url, input_file = sys.argv[1:]
args = types.SimpleNamespace(
    num_epoch=1, sglang_router_ip="127.0.0.1", sglang_router_port=3000, rollout_buffer_url=url,
    rollout_task_type="sums", prompt_data=input_file, n_samples_per_prompt=4, rollout_max_response_len=64,
    rollout_temperature=1.0, rollout_top_p=1.0, hf_checkpoint="x", use_wandb=False,
)
started = example.start_rollout(url, args, {"0": ["id0"]})
results, metas = [], []
async def collect():
    while len(results) < 48:
        data, meta_info = await example.get_rollout_data(api_base_url=url)
        results.extend(data)
        metas.append(meta_info)
asyncio.run(collect())
example.log_raw_info(args, metas, 0)
chosen = example.select_rollout_data(args, results, 2)
print("RESULT " + json.dumps({"started": started, "n": len(results),
    "chosen": [[i["instance_id"] for i in group] for group in chosen],
    "finished": sorted(i for meta in metas for i in meta["finished_groups"])}))
"""


async def run(root: Path, *command: str, **variables: str) -> str:
    """The output of a command in slime's directory."""
    env = {**environment(root), **variables}
    code, output = await asyncio.to_thread(run_guarded, command, timeout_s=300, cwd=root, env=env)
    assert code == 0, output
    return output


@pytest.mark.slime
async def test_slimes_old_example_gets_its_data_from_our_server(tmp_path):
    root = require_slime("torch", "requests")
    add_generator(tmp_path, "sums", _GENERATOR.format(task="sums"))
    (tmp_path / "input.jsonl").write_text("{}\n")
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        output = await run(root, sys.executable, "-c", _OLD_CLIENT, server.url, str(tmp_path / "input.jsonl"))
    result = read_result(output)
    assert result["started"]["message"] == "Rollout started"
    assert result["n"] == 48
    assert result["finished"] == sorted(f"id{n}" for n in range(12))
    assert result["chosen"] == [["id11"] * 4, ["id10"] * 4]


@pytest.mark.slime
async def test_the_agent_rollout_passes_slimes_contract(tmp_path):
    root = require_slime("torch", "httpx", "pylatexenc")
    add_generator(tmp_path, "sums", _GENERATOR.format(task="sums"))
    add_generator(tmp_path, "sums_eval", _GENERATOR.format(task="sums_eval"))
    async with BufferServer(settings=settings_for(tmp_path)) as server:
        output = await run(
            root,
            *(sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", CONTRACTS),
            SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH="agl_slime.buffer.agent_rollout.generate_rollout",
            AGL_SLIME_BUFFER_URL=server.url,
            AGL_SLIME_BUFFER_TASK_TYPE="sums",
            AGL_SLIME_BUFFER_EVAL_TASK_TYPE="sums_eval",
        )
    assert f"PASSED {CONTRACTS}::test_rollout_function_path_contract_supports_user_override" in output
