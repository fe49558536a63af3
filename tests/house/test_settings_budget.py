"""Settings and flags: each is written once, and there are no more of them than the budget, which only falls."""

import ast
import functools
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from agl_slime.cli.config_file import HIDDEN, parse_train_config
from agl_slime.cli.options import PATHS, default_of, name_of
from agl_slime.cli.settings import TrainConfig, flat_values, train_config
from agl_slime.train.local.settings import LocalTrainerSettings

PACKAGE = Path(__file__).parents[2] / "agl_slime"
IS_SETTINGS = re.compile(r"(Settings|Config|Options|Flags|RunnerPlan|SamplingParams)$")
ARE_OF_OTHERS = ("gateway/agl1/schemas.py", "tools/forensics/formulas.py")  # Agent Lightning 1.0's names, and slime's
MOST_FIELDS = 287
MOST_CLASSES = 23
MOST_FLAGS = 66  # without --config and the local trainer's
MOST_LOCAL_FLAGS = 31
# One word for several things: addresses of several servers, Pythons of several programs, ms-swift's names of SGLang's
# parameters, the rooms' settings in the tree.
EQUAL_NAMES = {
    *("host", "port", "token", "python", "model", "models", "settings", "seed", "max_attempts", "max_restarts"),
    *("max_body_mb", "poll_interval_s", "resume", "output_dir", "group_size", "replay_files", "agent"),
    # of commands and tools of their own
    *("batch_size", "overwrite", "run_dir", "sglang_url", "loss", "clip", "step"),
    *("max_tokens", "temperature", "top_p", "top_k", "stop", "repetition_penalty"),
    *("loop", "sampling", "eval_sampling", "group", "gateway", "controller"),
    # copies that are left: slime's args and the buffer are given these apart from a run's settings
    *("tasks", "eval_tasks", "runners", "max_staleness", "drop_zero_variance", "get_timeout_s", "blocking"),
    *("max_concurrent", "store_host", "teacher_url", "credit"),
}


@functools.cache
def settings_classes() -> dict[str, list[str]]:
    """The fields of each settings class of the package, dataclass or pydantic model."""
    classes = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or not IS_SETTINGS.search(node.name):
                continue
            bases = [*map(ast.unparse, [*node.decorator_list, *node.bases])]
            if not any("dataclass" in base or base == "BaseModel" for base in bases):
                continue
            if str(path.relative_to(PACKAGE)) not in ARE_OF_OTHERS:
                classes[node.name] = [
                    each.target.id
                    for each in node.body
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                ]
    return classes


def test_fields_stay_within_the_budget() -> None:
    classes = settings_classes()
    assert {"TrainConfig", "LoopSettings", "PluginSettings"} <= classes.keys()
    assert len(classes) <= MOST_CLASSES
    assert sum(map(len, classes.values())) <= MOST_FIELDS


def test_no_setting_is_a_copy_of_another() -> None:
    counts = Counter(name for names in settings_classes().values() for name in names)
    assert {name for name, count in counts.items() if count > 1} <= EQUAL_NAMES


def test_flags_stay_within_the_budget(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_train_config(["--help"])
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    flags = {*re.findall(r"^\W --(\w[\w.-]+)", text, re.MULTILINE)}
    names = {name.replace("_", "-") for name in PATHS.keys() - HIDDEN}
    local = {f"local.{each.name}".replace("_", "-") for each in fields(LocalTrainerSettings)}
    assert flags == {"config", *names - {"model-path"}, "model", *local}
    assert len(names) <= MOST_FLAGS
    assert len(local) <= MOST_LOCAL_FLAGS


def test_each_flag_is_one_setting_of_the_tree() -> None:
    assert len(PATHS) == len(set(PATHS.values()))
    assert {name_of(path): default_of(TrainConfig, path) for path in PATHS.values()} == flat_values(train_config())
