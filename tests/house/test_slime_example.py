"""The launch scripts in slime's style: each of their flags is one that this slime's own parser takes, or one of
Megatron's, which the scripts of this slime give as well."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.harness.slime_programs import REPOSITORY, require_slime
from tests.house.launched import RECIPES, parsed, programs, ray_job, variables

HOOKS = "agl_slime.slime_hooks"


@pytest.fixture
def root() -> Path:
    return require_slime("torch", "transformers", "sglang_router")


def launched(
    script: str, root: Path, directory: Path, *flags: str, policy: Path, cluster: bool = False, **given: str
) -> dict[str, Any]:
    path = programs(directory / "bin", program="parse", cluster=cluster)
    found = parsed([RECIPES / script, *flags], root, path, variables(root, directory, policy) | given)
    assert {*found["ignored"]} <= flags_of_slimes_scripts(root), "slime ignores unknown flags without a word"
    return found


def flags_of_slimes_scripts(root: Path) -> set[str]:
    scripts = [path for suffix in ("sh", "py") for path in root.glob(f"scripts/**/*.{suffix}")]
    return {flag for path in scripts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", path.read_text())}


@pytest.mark.slime
@pytest.mark.parametrize("script", ["run_agent.sh", "run_agent_apart.sh"])
def test_slimes_parser_takes_the_flags_of_the_launch_script(script: str, root: Path, policy_dir: Path, tmp_path: Path):
    found = launched(script, root, tmp_path, "--num-rollout", "3", policy=policy_dir)
    assert found["data_source_path"] == "agl_slime.AGLDataSource"
    assert found["rollout_function_path"] == found["eval_function_path"] == f"{HOOKS}.generate_rollout"
    assert found["custom_reward_post_process_path"] == f"{HOOKS}.normalize_rewards"
    assert found["agl_agent"] == "agl_slime.cli.demo.agent:LookupAgent"
    assert found["num_rollout"] == 3  # what is given to the script wins
    assert found["lr"] == 1e-6
    assert found["evals"] == [["lookup", str(tmp_path / "eval.jsonl"), 1]]
    assert found["save"] == str(tmp_path / "saved")
    apart = script == "run_agent_apart.sh"
    assert found["colocate"] is not apart
    assert found["actor_num_gpus_per_node"] == 4
    assert found["rollout_num_gpus"] == 4
    assert (found["use_tis"], found["tis_clip"]) == ((True, 2.0) if apart else (False, found["tis_clip"]))


@pytest.mark.slime
@pytest.mark.parametrize("script", ["run_agent_nodes.sh", "run_agent.sbatch"])
def test_a_job_has_its_flags_and_environment_on_every_node(script: str, root: Path, policy_dir: Path, tmp_path: Path):
    """The command runs with the variables of the job's runtime environment only."""
    slurm = {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[1-4]"}
    given = {"AGL_SLIME_MAX_STALENESS": "1", "AGENT_PATH": str(tmp_path), "NODES": "4", **slurm}
    found = launched(script, root, tmp_path, policy=policy_dir, cluster=True, **given)
    assert found["agl_environment"] == {"AGL_SLIME_MAX_STALENESS": "1"}
    assert found["first_on_python_path"] == str(tmp_path)
    assert found["colocate"] is True
    assert (found["actor_num_nodes"], found["actor_num_gpus_per_node"], found["rollout_num_gpus"]) == (4, 8, 32)


@pytest.mark.slime
def test_the_ray_jobs_entrypoint_is_a_launch_script(root: Path, policy_dir: Path, tmp_path: Path):
    job = ray_job()
    script, *flags = shlex.split(job["entrypoint"])
    assert script == "/agl-slime/examples/slime/run_agent.sh"  # where Dockerfile.gpu has it
    where = variables(root, tmp_path, policy_dir)
    assert {*where} - {"EVAL_DATA", "EVAL_NAME"} <= {*job["env"]}
    assert (root / "scripts" / "models" / Path(job["env"]["MODEL_ARGS_FILE"]).name).is_file()
    given = {name: job["env"][name] for name in ("GPU_ARGS", "NUM_GPUS")}
    found = launched("run_agent.sh", root, tmp_path, *flags, policy=policy_dir, **given)
    assert (found["actor_num_nodes"], found["rollout_num_gpus"], found["colocate"]) == (4, 32, True)


@pytest.mark.slime
def test_the_launch_script_with_an_agent_in_containers(root: Path, policy_dir: Path, tmp_path: Path):
    given = {"AGL_CONFIG": str(RECIPES / "agl_container.yaml"), "AGENT_PATH": str(RECIPES)}
    found = launched("run_agent.sh", root, tmp_path, "--prompt-data", "t.jsonl", policy=policy_dir, **given)
    assert (found["agl_agent"], found["prompt_data"]) == ("container_agent:answer", "t.jsonl")
    assert found["first_on_python_path"] == str(RECIPES)


@pytest.mark.slime
def test_the_launch_script_with_a_rollout_buffer(root: Path, policy_dir: Path, tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    given = {"DATA": str(tmp_path / "tasks.jsonl"), "BUFFER_PORT": port, "EVAL_DATA": ""}
    given |= {"LOSS_MASK_TYPE": "my_masks:CustomTaskMask", "TASK_TYPE": "agl"}
    found = launched("run_agent_buffer.sh", root, tmp_path, policy=policy_dir, **given)
    assert found["rollout_function_path"] == "agl_slime.buffer.agent_rollout.generate_rollout"
    assert found["agent_rollout_buffer_url"] == f"http://127.0.0.1:{port}"
    assert (found["rollout_task_type"], found["loss_mask_type"]) == ("agl", "my_masks:CustomTaskMask")
    assert found["rewards_normalization"] is False
    assert json.loads(Path(found["prompt_data"]).read_text())["instance_id"] == "instance_0"
    assert found["generators"] == {"math": "base_generator.py", "agl": "agl_generator.py"}
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port))):
        pass  # it has ended with the script


@pytest.mark.slime
def test_slimes_own_model_files_fit_the_launch_script(root: Path, policy_dir: Path, tmp_path: Path):
    """slime's usual file of model arguments, for the model that the script names when nothing else is said."""
    model = tmp_path / "model"
    model.mkdir()
    for file in policy_dir.iterdir():
        (model / file.name).symlink_to(file)
    given = json.loads((policy_dir / "config.json").read_text())
    config = {name: given[name] for name in ("architectures", "model_type")}
    config |= {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28, "intermediate_size": 3072}
    config |= {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    found = launched("run_agent.sh", root, tmp_path, policy=policy_dir, MODEL_ARGS_FILE="")
    assert found["num_rollout"] == 200
