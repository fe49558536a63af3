"""The launcher of slime's scripts, over a parser that is put together as slime's is."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agl_slime.train.slime.launch import add_arguments, main
from tests.harness.slime_programs import REPOSITORY

ARGUMENTS = """
import argparse

def get_slime_extra_args_provider(add_custom_arguments=None):
    def add_slime_arguments(parser):
        if add_custom_arguments is not None:
            parser = add_custom_arguments(parser)
        parser.add_argument("--rollout-buffer-url", default=None)
        parser.add_argument("--loss-mask-type", default="qwen", choices=["qwen", "distill_qwen"])
        return parser
    return add_slime_arguments

def parse_args(add_custom_arguments=None):
    return get_slime_extra_args_provider(add_custom_arguments)(argparse.ArgumentParser()).parse_known_args()[0]
"""
SCRIPT = """
import json, sys
import beside
from slime.utils.arguments import parse_args

if __name__ == "__main__":
    print(json.dumps({"argv": sys.argv[1:], **vars(parse_args())}))
"""


def launched(tmp_path: Path, *flags: str, slime: bool = True) -> subprocess.CompletedProcess[str]:
    (tmp_path / "slime" / "utils").mkdir(parents=True)
    (tmp_path / "slime" / "utils" / "arguments.py").write_text(ARGUMENTS)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "train.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "beside.py").touch()
    path = os.pathsep.join([str(REPOSITORY), *([str(tmp_path)] if slime else [])])
    command = [sys.executable, "-m", "agl_slime.train.slime.launch", str(tmp_path / "scripts" / "train.py"), *flags]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path / "scripts", env=env, timeout=60)


def test_a_script_of_slimes_knows_the_flags_of_the_agent_rollout(tmp_path: Path):
    flags = ["--agent-rollout-buffer-url", "http://127.0.0.1:8889", "--loss-mask-type", "my_masks:Mask"]
    finished = launched(tmp_path, *flags, "--rollout-num-process", "7")
    parsed = json.loads(finished.stdout)
    assert parsed["argv"] == [*flags, "--rollout-num-process", "7"]
    assert parsed["agent_rollout_buffer_url"] == "http://127.0.0.1:8889"
    assert (parsed["loss_mask_type"], parsed["rollout_num_process"]) == ("my_masks:Mask", 7)
    assert (parsed["agent_rollout_eval_task_type"], parsed["rollout_buffer_url"]) == (None, None)


def test_a_flag_that_slime_knows_itself_is_not_added_twice():
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent-rollout-buffer-url", default="slime's own")
    assert add_arguments(add_arguments(parser)).parse_args([]).agent_rollout_buffer_url == "slime's own"


def test_without_slime_or_a_script_it_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main([]) == main([str(tmp_path / "nothing.py")]) == 2
    assert "nothing.py: there is no such Python file; give slime's train.py" in capsys.readouterr().err
    finished = launched(tmp_path, slime=False)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: slime is not installed")
