"""A slime in which a name was moved once more: one sentence, wherever the bridge is entered."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from agl_slime.errors import MissingDependencyError, UnknownVersionError
from agl_slime.support import slime
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
    "doctor": ["-m", "agl_slime.train.slime.doctor"],
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
        monkeypatch.setitem(slime._PLACES, "pop_oldest", (place,))
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
