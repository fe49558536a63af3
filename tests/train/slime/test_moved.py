"""A slime in which a name was moved, and the launch of its scripts: one sentence, wherever the bridge is entered."""

import argparse
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from agl_slime.errors import MissingDependencyError, UnknownVersionError
from agl_slime.support import slime
from agl_slime.train.slime.launch import add_arguments, main
from tests.harness.slime_programs import REPOSITORY, finish_guarded, run_guarded, start_guarded

# The least that the hooks look for: module and source.
_LEAST = {
    "utils/types": "from dataclasses import dataclass\n\n\n@dataclass\nclass Sample:\n    rollout_id: int = 0\n",
    "data/data_source": "class DataSource:\n    pass\n",
    "rollout/base_types": "class RolloutFnTrainOutput:\n    pass\n\n\nclass RolloutFnEvalOutput:\n    pass\n",
    "rollout/filter_hub/base_types": "class DynamicFilterOutput:\n    pass\n",
}
PLACES = "slime.data.data_source and slime.rollout.data_source"
_ENTRIES = {
    "hooks": ["-c", "import agl_slime.slime_hooks"],
    "train.py": ["train.py", "--rollout-num-gpus", "2", "--sglang-url", "http://127.0.0.1:1", "--model-path"],
    "doctor": ["-m", "agl_slime.tools.doctor.slime"],
}
_LIMIT_S = 300.0  # many times the usual: processes that import slime and Ray on a busy machine


def write_slime(root: Path, modules: dict[str, str]) -> None:
    for module, source in modules.items():
        (root / "slime" / module).parent.mkdir(parents=True, exist_ok=True)
        (root / "slime" / f"{module}.py").write_text(source)


def entered(root: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each entry with the slime that lies in ``root``."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    python_path = os.pathsep.join(map(str, (root, REPOSITORY)))
    env = {**os.environ, "PYTHONPATH": python_path, "COLUMNS": "1000"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with ExitStack() as stack:
        processes = {}
        for name, command in _ENTRIES.items():
            words = [sys.executable, *command, *([model] if name == "train.py" else [])]
            processes[name] = stack.enter_context(start_guarded(words, env=env, **pipes))
        return {name: finish_guarded(process, _LIMIT_S) for name, process in processes.items()}


def judge(results: dict[str, tuple[int, str]], version: str, name: str, places: str) -> None:
    code, output = results["hooks"]
    sentence = f"{version} has no {name}: looked for it in {places}; supported are"
    assert code == 1
    assert f"UnknownVersionError: {sentence}" in output
    code, output = results["train.py"]
    assert code == 2, output
    assert f"error: {sentence}" in output
    assert "Traceback" not in output
    code, output = results["doctor"]
    assert code == 1
    assert version in output
    assert f"UNKNOWN: in none of {places.replace(' and ', ', ')}" in output
    assert "Traceback" not in output


def test_name_moved_again_is_reported_with_version_and_places(tmp_path: Path):
    write_slime(tmp_path, {name.replace("data/data_source", "elsewhere/home"): text for name, text in _LEAST.items()})
    (tmp_path / "setup.py").write_text('setup(name="slime", version="0.9.1")\n')
    judge(entered(tmp_path), f"slime 0.9.1 ({tmp_path})", "DataSource", PLACES)


def test_a_slime_whose_samples_have_no_id_for_siblings_is_refused(tmp_path: Path):
    """v0.3.0 called it group_id."""
    older = {name: text.replace("rollout_id", "group_id") for name, text in _LEAST.items()}
    needy = _LEAST | {"data/data_source": "import none_of_this\n"}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    for modules, sentence in (
        (older, "has no rollout_id, new in v0.3.1; supported are v0.3.1,"),
        (needy, "needs none_of_this, which is not installed: follow slime's guide"),
    ):
        write_slime(tmp_path, modules)
        code, output = run_guarded([sys.executable, *_ENTRIES["hooks"]], timeout_s=_LIMIT_S, env=env)
        assert code == 1
        assert sentence in output


def test_a_missing_dependency_is_no_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "needy_slime.py").write_text("import none_of_this\n")
    monkeypatch.syspath_prepend(tmp_path)
    for place, error, text in (
        ("needy_slime", MissingDependencyError, "needs none_of_this, which is not installed"),
        ("older_slime.utils", UnknownVersionError, "has no pop_oldest: looked for it in older_slime.utils"),
    ):
        monkeypatch.setitem(slime._MODULES, "pop_oldest", (place,))
        with pytest.raises(error, match=text):
            slime.find("pop_oldest")


@pytest.mark.parametrize("newer", [False, True])
def test_doctor_names_what_bounds_the_age_of_groups(newer: bool, tmp_path: Path):
    """Of main's files: #2390 orders and measures, #2391 removed train_async.py; neither drops a group."""
    write_slime(tmp_path, _LEAST)
    if newer:
        added = "\n\ndef pop_oldest(args, rollout_id, buffer, num_samples): ...\n"
        spilling = "async def spill_routed_experts(args, sample): ...\n"
        source = _LEAST["data/data_source"] + added
        builder = "class BatchBuilder:\n    def __init__(self, args): ...\n"
        write_slime(tmp_path, {"data/data_source": source, "data/batch_builder": builder})
        write_slime(tmp_path, {"utils/routed_experts": spilling})
    for script in ("train.py", *(() if newer else ("train_async.py",))):
        (tmp_path / script).touch()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    _, output = run_guarded([sys.executable, *_ENTRIES["doctor"]], timeout_s=_LIMIT_S, env=env)
    assert ("UNKNOWN: BatchBuilder of" in output) is newer  # it cannot normalise rewards
    lines = {line[2:28].strip(): line[28:].strip() for line in output.splitlines()}
    assert "agl_max_staleness" in lines["staleness"]
    assert ("--buffer-sort-by-staleness" in lines["staleness"]) is newer
    assert lines["asynchronous training"].startswith("by train.py " if newer else "by train_async.py")
    assert ("spill_routed_experts" in lines["routed experts"]) is newer


def test_the_other_package_of_that_name_counts_as_no_slime(tmp_path: Path):
    """The package on PyPI has ``core`` and ``model``, and nothing of slime's."""
    (tmp_path / "slime" / "core").mkdir(parents=True)
    (tmp_path / "slime" / "__init__.py").touch()
    results = entered(tmp_path)
    assert results["hooks"] == (0, "")
    for name, expected in (("train.py", 2), ("doctor", 1)):
        code, output = results[name]
        assert code == expected
        assert "slime is not installed, or an unrelated PyPI package of that name is" in output


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
