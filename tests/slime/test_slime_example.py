"""The launch scripts in slime's style: each of their flags is one that this slime's own parser takes, or one of
Megatron's, which the scripts of this slime give as well."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slime.support import REPOSITORY, environment, model_flags, require_slime

PYTHON = """#!/bin/sh
PYTHONPATH="{path}"
export PYTHONPATH
case "$1 $2" in
  "-m agl_slime.train.slime.launch") shift 3; exec {python} -m agl_slime.train.slime.launch {parse} "$@" ;;
  "-m "*) exec {python} "$@" ;;
  *) shift; exec {python} -m tests.slime.programs.parse "$@" ;;
esac
"""


def launched(
    script: str, root: Path, directory: Path, *flags: str, model_args: Path | None = None, **variables: str
) -> dict[str, Any]:
    """What slime's parser makes of a launch script's command line."""
    # in place of the python that would start slime's train.py, one that only parses
    python, parse = directory / "python", REPOSITORY / "tests" / "slime" / "programs" / "parse.py"
    python.write_text(PYTHON.format(path=environment(root)["PYTHONPATH"], python=sys.executable, parse=parse))
    python.chmod(0o755)
    finished = subprocess.run(
        [str(REPOSITORY / "examples" / "slime" / script), *flags],
        cwd=REPOSITORY,
        env={
            **environment(root),
            "PATH": f"{directory}{os.pathsep}{os.environ['PATH']}",
            "SLIME_DIR": str(root),
            "MODEL": str(directory / "model"),
            "MODEL_TORCH_DIST": str(directory),
            "SAVE": str(directory / "saved"),
            "EVAL_DATA": str(directory / "eval.jsonl"),
            "EVAL_NAME": "lookup",
            "NUM_GPUS": "4",
            **({"MODEL_ARGS_FILE": str(model_args)} if model_args is not None else {}),
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, finished.stdout[-2000:] + finished.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


def flags_of_slimes_scripts(root: Path) -> set[str]:
    scripts = [path for suffix in ("sh", "py") for path in root.glob(f"scripts/**/*.{suffix}")]
    return {flag for path in scripts for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", path.read_text())}


@pytest.mark.slime
@pytest.mark.parametrize("script", ["run_agent.sh", "run_agent_apart.sh"])
def test_slimes_parser_takes_the_flags_of_the_launch_script(script: str, policy_dir: Path, tmp_path: Path):
    root = require_slime("torch", "transformers", "sglang_router")
    model_args = tmp_path / "model.sh"
    model_args.write_text(f"MODEL_ARGS=({' '.join(model_flags(policy_dir))})\n")
    (tmp_path / "model").symlink_to(policy_dir)
    parsed = launched(script, root, tmp_path, "--num-rollout", "3", model_args=model_args)
    assert {*parsed["ignored"]} <= flags_of_slimes_scripts(root), "slime ignores unknown flags without a word"
    hooks = "agl_slime.slime_hooks"
    assert parsed["data_source_path"] == "agl_slime.AGLDataSource"
    assert parsed["rollout_function_path"] == parsed["eval_function_path"] == f"{hooks}.generate_rollout"
    assert parsed["custom_reward_post_process_path"] == f"{hooks}.normalize_rewards"
    assert parsed["agl_agent"] == "agl_slime.cli.demo.agent:LookupAgent"
    assert parsed["num_rollout"] == 3  # what is given to the script wins
    assert parsed["lr"] == 1e-6
    assert parsed["evals"] == [["lookup", str(tmp_path / "eval.jsonl"), 1]]
    assert parsed["save"] == str(tmp_path / "saved")
    apart = script == "run_agent_apart.sh"
    assert parsed["colocate"] is not apart
    assert parsed["actor_num_gpus_per_node"] == 4
    assert parsed["rollout_num_gpus"] == 4
    assert (parsed["use_tis"], parsed["tis_clip"]) == ((True, 2.0) if apart else (False, parsed["tis_clip"]))


@pytest.mark.slime
def test_the_launch_script_with_a_rollout_buffer(policy_dir: Path, tmp_path: Path):
    root = require_slime("torch", "transformers", "sglang_router")
    model_args = tmp_path / "model.sh"
    model_args.write_text(f"MODEL_ARGS=({' '.join(model_flags(policy_dir))})\n")
    (tmp_path / "model").symlink_to(policy_dir)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    variables = {"DATA": str(tmp_path / "tasks.jsonl"), "BUFFER_PORT": port, "EVAL_DATA": ""}
    variables |= {"LOSS_MASK_TYPE": "my_masks:CustomTaskMask", "TASK_TYPE": "agl"}
    parsed = launched("run_agent_buffer.sh", root, tmp_path, model_args=model_args, **variables)
    assert {*parsed["ignored"]} <= flags_of_slimes_scripts(root)
    assert parsed["rollout_function_path"] == "agl_slime.buffer.agent_rollout.generate_rollout"
    assert parsed["agent_rollout_buffer_url"] == f"http://127.0.0.1:{variables['BUFFER_PORT']}"
    assert (parsed["rollout_task_type"], parsed["loss_mask_type"]) == ("agl", "my_masks:CustomTaskMask")
    assert parsed["rewards_normalization"] is False
    assert json.loads(Path(parsed["prompt_data"]).read_text())["instance_id"] == "instance_0"
    assert parsed["generators"] == {"math": "base_generator.py", "agl": "agl_generator.py"}
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", int(port))):
        pass  # it has ended with the script


@pytest.mark.slime
def test_slimes_own_model_files_fit_the_launch_script(policy_dir: Path, tmp_path: Path):
    """slime's usual file of model arguments, for the model that the script names when nothing else is said."""
    root = require_slime("torch", "transformers", "sglang_router")
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
    parsed = launched("run_agent.sh", root, tmp_path)
    assert {*parsed["ignored"]} <= flags_of_slimes_scripts(root)
    assert parsed["num_rollout"] == 200
