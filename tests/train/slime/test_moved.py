"""A slime in which a name was moved once more: one sentence, wherever the bridge is entered."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.slime_programs import REPOSITORY, STANDINS, require_slime

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
    "train.py": ["train.py", "--trainer", "slime", "--sglang-url", "http://127.0.0.1:1", "--model-path"],
    "doctor": ["-m", "agl_slime.train.slime.doctor"],
}


def entered(root: Path, *path: Path) -> dict[str, tuple[int, str]]:
    """Exit code and output of each entry with the slime that lies in ``root``."""
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    python_path = os.pathsep.join(str(place) for place in (*path, root, REPOSITORY))
    processes = {
        name: subprocess.Popen(
            [sys.executable, *command, *([str(model)] if name == "train.py" else [])],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": python_path, "COLUMNS": "1000"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name, command in _ENTRIES.items()
    }
    found = {}
    for name, process in processes.items():
        output, _ = process.communicate(timeout=120)
        found[name] = (process.returncode, output)
    return found


def judge(found: dict[str, tuple[int, str]], version: str, name: str, places: str) -> None:
    code, output = found["hooks"]
    sentence = f"{version} has no {name}: looked for it in {places}; supported are"
    assert code == 1
    assert f"UnknownVersionError: {sentence}" in output
    code, output = found["train.py"]
    assert code == 2, output
    assert f"error: {sentence}" in output
    assert "Traceback" not in output
    code, output = found["doctor"]
    assert code == 1
    assert version in output
    assert f"UNKNOWN: in none of {places.replace(' and ', ', ')}" in output
    assert "Traceback" not in output


def test_name_moved_again_is_reported_with_version_and_places(tmp_path: Path):
    for place, source in _LEAST.items():
        moved = place if place != "data/data_source" else "elsewhere/new_home"
        (tmp_path / "slime" / moved).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "slime" / f"{moved}.py").write_text(source)
    (tmp_path / "setup.py").write_text('setup(name="slime", version="0.9.1")\n')
    judge(entered(tmp_path), f"slime 0.9.1 ({tmp_path})", "DataSource", PLACES)


def test_a_slime_whose_samples_have_no_id_for_siblings_is_refused(tmp_path: Path):
    """v0.3.0 called it group_id."""
    for place, source in _LEAST.items():
        (tmp_path / "slime" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "slime" / f"{place}.py").write_text(source.replace("rollout_id", "group_id"))
    code, output = entered(tmp_path)["hooks"]
    assert code == 1
    assert "has no rollout_id, new in v0.3.1; supported are v0.3.1," in output


@pytest.mark.parametrize("newer", [False, True])
def test_doctor_names_what_bounds_the_age_of_groups(newer: bool, tmp_path: Path):
    """Of main's files: #2390 orders and measures, #2391 removed train_async.py; neither drops a group."""
    modules = dict(_LEAST)
    if newer:
        modules["data/data_source"] += "\n\ndef pop_oldest(args, rollout_id, buffer, num_samples): ...\n"
        modules["utils/routed_experts"] = "async def spill_routed_experts(args, sample): ...\n"
    for place, source in modules.items():
        (tmp_path / "slime" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "slime" / f"{place}.py").write_text(source)
    for script in ("train.py", *(() if newer else ("train_async.py",))):
        (tmp_path / script).touch()
    command = [sys.executable, *_ENTRIES["doctor"]]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    output = subprocess.run(command, env=env, cwd=REPOSITORY, capture_output=True, text=True).stdout
    lines = {line[2:28].strip(): line[28:].strip() for line in output.splitlines()}
    assert "agl_max_staleness" in lines["staleness"]
    assert ("--buffer-sort-by-staleness" in lines["staleness"]) is newer
    assert lines["asynchronous training"].startswith("by train.py " if newer else "by train_async.py")
    assert ("spill_routed_experts" in lines["routed experts"]) is newer


def test_the_other_package_of_that_name_counts_as_no_slime(tmp_path: Path):
    """The one on PyPI has ``core`` and ``model``, and nothing of slime's."""
    (tmp_path / "slime" / "core").mkdir(parents=True)
    (tmp_path / "slime" / "__init__.py").touch()
    found = entered(tmp_path)
    assert found["hooks"] == (0, "")
    for name, expected in (("train.py", 2), ("doctor", 1)):
        code, output = found[name]
        assert code == expected
        assert "slime is not installed, or an unrelated PyPI package of that name is" in output


@pytest.mark.slime
def test_a_real_slime_with_its_data_source_moved(tmp_path: Path):
    root = require_slime("torch", "transformers", "ray")
    shutil.copytree(root / "slime", tmp_path / "slime", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "setup.py", tmp_path)
    old = next(tmp_path.glob("slime/*/data_source.py"))
    old.rename(old.with_name("sources.py"))
    for file in (tmp_path / "slime").rglob("*.py"):
        text = file.read_text()
        if "data_source import" in text:
            file.write_text(text.replace(f"{old.parent.name}.data_source import", f"{old.parent.name}.sources import"))
    found = entered(tmp_path, STANDINS)
    version = found["doctor"][1].splitlines()[0]
    judge(found, version, "DataSource", PLACES)
