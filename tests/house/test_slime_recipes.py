"""Recipes of ``examples/slime`` as they stand, on a CPU: slime's script, Ray, manager, Megatron actors and updates of
weights are real."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report.read import RunReader
from agl_slime.support.net import free_port
from agl_slime.tools.slime_dumps.runs import SlimeRuns
from tests.harness.guard import guarded
from tests.harness.megatron import require_megatron
from tests.harness.routers import sglang_router
from tests.harness.slime_programs import environment, require_slime, run_guarded
from tests.house.launched import RECIPES, programs, variables

SMALL = {"num-rollout": 3, "rollout-batch-size": 8, "n-samples-per-prompt": 4, "global-batch-size": 32}
SMALL |= {"micro-batch-size": 1, "rollout-max-response-len": 48, "save-interval": 3}
ONE_GPU = "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 1"
HERE = "ENGINE ROUTER WORK HF_HUB_OFFLINE SLIME_HOST_IP OMP_NUM_THREADS WANDB_MODE RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


def run_recipe(script: str, root: Path, work: Path, policy: Path, **extra: str) -> str:
    """The output of a recipe with three small steps; fails with the output."""
    path = programs(work / "bin", program="launched")
    flags = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    with EmbeddedEngine(policy) as engine, sglang_router() as router:
        settings = variables(root, work, policy) | {"ENGINE": engine.url, "ROUTER": router, "WORK": str(work)}
        settings |= {"MODEL_TORCH_DIST": str(policy), "EVAL_DATA": "", "GPU_ARGS": ONE_GPU, "JOB_ENV": HERE}
        env = {**environment(root), **settings, "PATH": path_with(path), **extra}
        code, output = run_guarded([RECIPES / script, *flags], timeout_s=240, env=env)
    assert code == 0, output[-6000:]
    return output


def path_with(programs: Path) -> str:
    return os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])


def judge(work: Path, policy: Path) -> None:
    page = RunReader(work / "dump", SlimeRuns(policy)).update()
    assert page is not None
    assert page["metrics"]["iteration"] == [0, 1, 2]
    assert max(page["metrics"]["columns"]["train/logprob_diff_max"]) < 1e-5  # each update reached the engine
    assert [page["words"][word] for word in page["members"]["outcome"]] == ["trained"] * 3 * 32
    assert (work / "saved" / "rollout" / "agl_datasource_2.json").is_file()
    assert (work / "saved" / "latest_checkpointed_iteration.txt").read_text() == "2"


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
def test_one_machine_trains_by_the_launch_script(policy_dir: Path, tmp_path: Path):
    require_megatron()
    root = require_slime()
    output = run_recipe("run_agent.sh", root, tmp_path, policy_dir)
    judge(tmp_path, policy_dir)
    assert "rollout 2 (" in output  # the line of log_rollout that the page promises


def wait_until_up(port: int, node: subprocess.Popen[bytes], log: Path) -> None:
    """Until Ray's head listens, at most 60 s: a second node gives up sooner."""
    deadline = time.monotonic() + 60
    while True:
        assert node.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)


@contextmanager
def two_ray_nodes(root: Path, work: Path) -> Iterator[dict[str, str]]:
    """Ray's head and a second node, with a token as several hosts need it; yields the variables of its clients."""
    port, dashboard = free_port(), free_port()
    # short, for paths of sockets; separate, for "ray.init()" joins the cluster named there
    ray_directory = tempfile.mkdtemp(prefix="ray-")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": ray_directory}
    path = path_with(programs(work / "bin", program="launched"))
    # a node does not have the recipe's variables: they come with the job
    env = {name: value for name, value in environment(root).items() if name != "PYTHONPATH"} | token | {"PATH": path}
    common = ["--num-gpus", "1", "--num-cpus", "3", "--disable-usage-stats", "--block"]
    common += ["--object-store-memory", "100000000"]
    head = ["--head", "--node-ip-address", "127.0.0.1", "--port", str(port), "--dashboard-port", str(dashboard)]
    nodes: list[subprocess.Popen[bytes]] = []
    with (work / "nodes.log").open("wb") as log:
        try:
            for place in (head, ["--address", f"127.0.0.1:{port}"]):
                command = guarded(["ray", "start", *place, *common])
                nodes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=work))
                wait_until_up(port, nodes[-1], work / "nodes.log")
            yield token | {"RAY_JOB_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        finally:
            for node in reversed(nodes):
                node.terminate()
                node.wait(60)
            shutil.rmtree(ray_directory, ignore_errors=True)


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
def test_two_nodes_train_by_a_job_with_a_runtime_environment(policy_dir: Path, tmp_path: Path):
    require_megatron()
    root = require_slime()
    with two_ray_nodes(root, tmp_path) as extra:
        output = run_recipe("run_agent_nodes.sh", root, tmp_path, policy_dir, **extra)
        judge(tmp_path, policy_dir)
        assert "succeeded" in output
        wrong = extra | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PATH": path_with(tmp_path / "bin")}
        refused = subprocess.run(
            [str(RECIPES / "run_agent_nodes.sh")],
            env={**environment(root), **wrong},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert refused.returncode == 2  # at once, not after RAY_WAIT_S
        assert "No Ray takes jobs" in refused.stderr
