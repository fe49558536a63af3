"""The house's rules that docs/architecture.md promises to somebody who looks for a line of code."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from agl_slime.cli.main import COMMANDS
from tests.conftest import SMOKE
from tests.harness.planted import FAULTS, Fault

PACKAGE = Path(__file__).parents[2] / "agl_slime"
MODULES = sorted(PACKAGE.rglob("*.py"))
AT_THE_ROOT = {"__init__.py", "__main__.py", "types.py", "events.py", "metric_names.py", "errors.py", "slime_hooks.py"}
WITH_PYTHON = ("agl_slime", "tests", "benchmarks", "agents", "examples", "scripts")
# from … import (…) of our packages; slime has examples, OpenAI has agents
_IMPORTS = re.compile(r"^\s*from ((?:agl_slime|tests|benchmarks)[\w.]*) import (\([^)]*\)|.*)", re.MULTILINE)
LONGEST_TEST_NAME = 70
LONGEST_FILE = 600  # a longer file has several duties
HEAVY = ("slime", "ray", "torch", "transformers", "sglang", "megatron", "safetensors", "matplotlib", "tensorboard")
HEAVY += ("wandb", "mlflow")
# Rooms that run a model themselves, each loaded only when it is asked for.
RUN_A_MODEL = ("engine/", "tools/demo_policy/", "tools/forensics/", "train/local/")
# Programs of slime's processes, which run where slime and Ray are.
IN_SLIMES_PROCESSES = ("tools/rehearse/actor.py", "tools/rehearse/programs/", "tools/rehearse/megatron/")
OF_A_MODEL = {"torch", "transformers", "safetensors"}


def test_root_has_the_listed_modules_only() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == AT_THE_ROOT


def test_no_file_is_longer_than_a_reader_holds() -> None:
    root = PACKAGE.parent
    files = [*root.glob("*.py"), *(path for room in WITH_PYTHON for path in (root / room).rglob("*.py"))]
    assert len(files) > len(MODULES)
    assert not [str(path) for path in files if len(path.read_text().splitlines()) > LONGEST_FILE]


def test_names_of_tests_are_short() -> None:
    files = (PACKAGE.parent / "tests").rglob("test_*.py")
    names = [name for path in files for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.M)]
    assert len(names) > 1_000
    assert not [name for name in names if len(name) > LONGEST_TEST_NAME]


def test_planted_faults_find_their_lines() -> None:
    faults = [Fault(**json.loads(line)) for line in FAULTS.read_text().splitlines()]
    places = {(fault.file, fault.line_in((PACKAGE.parent / fault.file).read_text()), fault.after) for fault in faults}
    assert len(places) == len(faults) > 100


def imported_at_the_top(path: Path) -> set[str]:
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_optional_systems_are_not_imported_at_module_top() -> None:
    """A room imports slime, Ray, torch or transformers at its top only where it cannot exist without it."""
    findings = []
    for path in MODULES:
        room, tops = str(path.relative_to(PACKAGE)), imported_at_the_top(path)
        refused = set() if room == "support/agl.py" else {"agentlightning", "litellm"}
        if not room.startswith(IN_SLIMES_PROCESSES):
            refused |= {*HEAVY} - (OF_A_MODEL if room.startswith(RUN_A_MODEL) else set())
        findings += [f"{room} imports {top} at its top" for top in sorted(tops & refused)]
    assert not findings


def test_clients_of_the_package_do_not_trust_the_environment() -> None:
    """A proxy of the environment does not stand before a run's servers; aiohttp ignores proxies by default."""
    findings = []
    for path in MODULES:
        source = path.read_text()
        if not re.search(r"\b(httpx|aiohttp|requests)\.", source):
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            trust = [ast.unparse(word.value) for word in node.keywords if word.arg == "trust_env"]
            client = called.startswith("httpx.") and called.endswith("Client") and trust != ["False"]
            if client or called.startswith("requests.") or (called.startswith("aiohttp.") and trust):
                findings.append(f"{path}:{node.lineno}: {called}")
    assert not findings


def test_only_the_command_line_names_tools_and_help_imports_none() -> None:
    for name, (_, target) in COMMANDS.items():
        module, _, function = target.partition(":")
        file = PACKAGE / f"{module.replace('.', '/')}.py"
        assert re.search(rf"^(async )?def {function}\(", file.read_text(), re.MULTILINE), name
    circle = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] not in ("tools", "cli")]
    assert len(circle) > 200
    assert not [str(path) for path in circle if re.search(r"agl_slime[./]tools[./]", path.read_text())]
    program = "import sys; from agl_slime.cli.main import main; main(['--help']); print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "agl_slime.cli.main" in printed
    assert "agl_slime.tools." not in printed


def test_programs_outside_the_package_import_existing_names() -> None:
    """Benchmarks and scripts are run rarely, and pyright reads the package only."""
    root, missing = PACKAGE.parent, []
    for path in (path for room in WITH_PYTHON for path in (root / room).rglob("*.py")):
        for module_name, names in _IMPORTS.findall(path.read_text()):
            file = root / module_name.replace(".", "/")
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            text = file.read_text() if file.exists() else ""
            for name in re.findall(r"(?:^|[(,])\s*(\w+)", re.sub("#.*", "", names)):
                module = (file.parent / name).is_dir() or (file.parent / f"{name}.py").exists()
                if not re.search(rf"\b{name}\b", text) and not (file.name == "__init__.py" and module):
                    missing.append(f"{path.relative_to(root)}: {module_name}.{name}")
    assert not missing


def test_names_on_the_architecture_page_exist() -> None:
    """Each `room/file.py:name` of docs/architecture.md, with methods that a class inherits."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([a-z_/]+\.py)(?::([A-Za-z_.]+))?`", page)
    assert len(named) > 40
    for file, name in named:
        value: Any = importlib.import_module("agl_slime." + file.removesuffix(".py").replace("/", "."))
        for attribute in filter(None, name.split(".")):
            assert hasattr(value, attribute), f"{file} has no {name}"
            value = getattr(value, attribute)


def test_each_command_of_the_readme_is_one_line_that_ci_runs() -> None:
    root = PACKAGE.parent
    commands = re.findall(r"^    (python3 -m venv .*)$", (root / "README.md").read_text(), re.MULTILINE)
    ends = [command.rpartition(" && ")[2] for command in commands]
    assert ends == [".venv/bin/python train.py", ".venv/bin/pytest -n 2"]
    steps = (root / ".ci/steps.sh").read_text()
    for script in ("run", "nightly"):
        text = (root / ".ci" / script).read_text()
        for number, function in enumerate(("first_command", "second_command"), 1):
            assert re.search(rf"^{function}\(\) .*\$\(readme_command {number}\)", steps, re.MULTILINE)
            assert re.search(rf'^step "README, .*" {function}\b', text, re.MULTILINE)


def test_every_classified_python_is_trained_on_each_night() -> None:
    root = PACKAGE.parent
    claimed = re.findall(r"Python :: (3\.\d+)", (root / "pyproject.toml").read_text())
    promised = re.search(r"Python (3\.\d+) to (3\.\d+)", (root / "README.md").read_text())
    tried = re.search(r"for version in (.*); do", (root / ".ci/nightly").read_text())
    assert promised is not None
    assert tried is not None
    assert (claimed[0], claimed[-1]) == promised.groups()
    assert claimed == tried[1].split()


def test_markers_stand_in_the_files_of_their_tests() -> None:
    """``.ci/nightly`` collects only the files that name a marker; SGLang's also comes from a fixture. The smoke tests
    are listed by file."""
    root = PACKAGE.parent
    assert SMOKE
    assert not [name for name in SMOKE if not (root / "tests" / f"{name}.py").is_file()]
    registered = set(re.findall(r'^  "(\w+): ', (root / "pyproject.toml").read_text(), re.MULTILINE))
    assert "browser" in registered
    helpers = [path for path in (root / "tests").rglob("*.py") if not path.name.startswith("test_")]
    named = {marker for path in helpers for marker in re.findall(r"\bmark\.(\w+)", path.read_text())}
    assert named & registered <= {"sglang", "smoke"}
