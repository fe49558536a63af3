"""The launch scripts in slime's style: each flag is known to slime's parser, or
to Megatron's, as slime's scripts show."""

import json
import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.harness.slime_programs import REPOSITORY, require_slime
from tests.harness.sources import SOURCES
from tests.house.launched import RECIPES, parsed, programs, ray_job, variables

HOOKS = "agl_slime.slime_hooks"


@pytest.fixture
def root() -> Path:
    return require_slime("torch", "transformers", "sglang_router")


def launched(
    script: str, root: Path, directory: Path, *flags: str, policy: Path, cluster: bool = False, **extra: str
) -> dict[str, Any]:
    path = programs(directory / "bin", program="parse", cluster=cluster)
    arguments = parsed([RECIPES / script, *flags], root, path, variables(root, directory, policy) | extra)
    unknown = {*arguments["ignored"]} - flags_of_slimes_scripts(root)
    assert not unknown, "slime ignores unknown flags without a word"
    return arguments


def check(arguments: dict[str, Any], **expected: Any) -> None:
    assert {name: arguments[name] for name in expected} == expected


def flags_of_slimes_scripts(root: Path) -> set[str]:
    """With the flags of Megatron's own parser, where it is at hand."""
    scripts = [path for suffix in ("sh", "py") for path in root.glob(f"scripts/**/*.{suffix}")]
    if (megatron := SOURCES["megatron"].find()) is not None:
        scripts += (megatron / "megatron" / "training").glob("*.py")
    return {flag for path in scripts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", path.read_text())}


@pytest.mark.slime
@pytest.mark.parametrize("script", ["run_agent.sh", "run_agent_apart.sh"])
def test_slimes_parser_takes_the_flags_of_the_launch_script(script: str, root: Path, policy_dir: Path, tmp_path: Path):
    arguments = launched(script, root, tmp_path, "--num-rollout", "3", policy=policy_dir)
    apart = script == "run_agent_apart.sh"
    check(
        arguments,
        data_source_path="agl_slime.AGLDataSource",
        rollout_function_path=f"{HOOKS}.generate_rollout",
        eval_function_path=f"{HOOKS}.generate_rollout",
        custom_reward_post_process_path=f"{HOOKS}.normalize_rewards",
        agl_agent="agl_slime.cli.demo.agent:LookupAgent",
        num_rollout=3,  # a flag of the command line wins
        lr=1e-6,
        evals=[["lookup", str(tmp_path / "eval.jsonl"), 1]],
        save=str(tmp_path / "saved"),
        actor_num_gpus_per_node=4,
        rollout_num_gpus=4,
        use_tis=apart,
    )
    assert bool(arguments["colocate"]) is not apart
    assert not apart or arguments["tis_clip"] == 2.0


@pytest.mark.slime
@pytest.mark.parametrize("script", ["run_agent_nodes.sh", "run_agent.sbatch"])
def test_a_job_has_its_flags_and_environment_on_every_node(script: str, root: Path, policy_dir: Path, tmp_path: Path):
    """The command runs with the variables of the job's runtime environment only."""
    slurm = {"SLURM_SUBMIT_DIR": str(REPOSITORY), "SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": "node[1-4]"}
    extra = {"AGL_SLIME_MAX_STALENESS": "1", "AGENT_PATH": str(tmp_path), "NODES": "4", **slurm}
    arguments = launched(script, root, tmp_path, policy=policy_dir, cluster=True, **extra)
    check(
        arguments,
        agl_environment={"AGL_SLIME_MAX_STALENESS": "1"},
        first_on_python_path=str(tmp_path),
        colocate=True,
        actor_num_nodes=4,
        actor_num_gpus_per_node=8,
        rollout_num_gpus=32,
    )


@pytest.mark.slime
def test_the_ray_jobs_entrypoint_is_a_launch_script(root: Path, policy_dir: Path, tmp_path: Path):
    job = ray_job()
    script, *flags = shlex.split(job["entrypoint"])
    assert script == "/agl-slime/examples/slime/run_agent.sh"  # where Dockerfile.gpu has it
    assert {*variables(root, tmp_path, policy_dir)} - {"EVAL_DATA", "EVAL_NAME"} <= {*job["env"]}
    assert (root / "scripts" / "models" / Path(job["env"]["MODEL_ARGS_FILE"]).name).is_file()
    extra = {name: job["env"][name] for name in ("GPU_ARGS", "NUM_GPUS")}
    arguments = launched("run_agent.sh", root, tmp_path, *flags, policy=policy_dir, **extra)
    check(arguments, actor_num_nodes=4, rollout_num_gpus=32, colocate=True)


@pytest.mark.slime
def test_the_launch_script_with_an_agent_in_containers(root: Path, policy_dir: Path, tmp_path: Path):
    extra = {"AGL_CONFIG": str(RECIPES / "agl_container.yaml"), "AGENT_PATH": str(RECIPES)}
    arguments = launched("run_agent.sh", root, tmp_path, "--prompt-data", "t.jsonl", policy=policy_dir, **extra)
    check(arguments, agl_agent="container_agent:answer", prompt_data="t.jsonl", first_on_python_path=str(RECIPES))


@pytest.mark.slime
def test_the_launch_script_with_a_rollout_buffer(root: Path, policy_dir: Path, tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    extra = {"DATA": str(tmp_path / "tasks.jsonl"), "BUFFER_PORT": port, "EVAL_DATA": ""}
    extra |= {"LOSS_MASK_TYPE": "my_masks:CustomTaskMask", "TASK_TYPE": "agl"}
    arguments = launched("run_agent_buffer.sh", root, tmp_path, policy=policy_dir, **extra)
    check(
        arguments,
        rollout_function_path="agl_slime.buffer.agent_rollout.generate_rollout",
        agent_rollout_buffer_url=f"http://127.0.0.1:{port}",
        rollout_task_type="agl",
        loss_mask_type="my_masks:CustomTaskMask",
        rewards_normalization=False,
        generators={"math": "base_generator.py", "agl": "agl_generator.py"},
    )
    assert arguments["prompt_data"] == str(tmp_path / "tasks.jsonl")  # whose rows the buffer numbers
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port))):
        pass  # it has ended with the script


@pytest.mark.slime
def test_slimes_own_model_files_fit_the_launch_script(root: Path, policy_dir: Path, tmp_path: Path):
    """slime's usual file of model arguments, for the script's default model."""
    model = tmp_path / "model"
    model.mkdir()
    for file in policy_dir.iterdir():
        (model / file.name).symlink_to(file)
    original = json.loads((policy_dir / "config.json").read_text())
    config = {name: original[name] for name in ("architectures", "model_type")}
    config |= {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28, "intermediate_size": 3072}
    config |= {"vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1e6}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    arguments = launched("run_agent.sh", root, tmp_path, policy=policy_dir, MODEL_ARGS_FILE="")
    assert arguments["num_rollout"] == 200
