"""Installation beside SGLang's and slime's packages: the shipped lists and the script. The dry run itself, which asks a
package index, is a step of .ci/nightly."""

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SGLANG = {"constraints-slime.txt": ("0.5.15.post1", "2.6.1"), "constraints-slime-0.5.23.txt": ("0.5.23", "2.8.0")}

# Stands for python3 -m pip: notes its arguments, and lists the files before, after, … in turn.
PIP = """#!/bin/sh
shift 2
cd "{directory}"
if [ "$1" = list ]; then cat list && [ -f next ] && mv next list; exit 0; fi
echo "$@" >> calls
"""


def test_the_requirements_are_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts" / "slime_requirements.py"))
    expected = "\n".join([made["HEADER"], *made["lines"]()]) + "\n"
    assert (ROOT / "requirements-slime.txt").read_text() == expected, "run SLIME_DIR=… scripts/pins.sh slime"
    assert not {"litellm", "agentlightning", "agentops"} & {*expected.split()}


def test_lists_of_pins_have_sglangs_versions():
    for file, (version, openai) in SGLANG.items():
        lines = (ROOT / file).read_text().splitlines()
        assert {f"sglang=={version}", f"openai=={openai}"} <= {*lines}
        assert [line for line in lines if line.startswith("mcp==1.")]
        assert not [line for line in lines if line.startswith(("litellm", "agl-slime", "agentlightning"))]
        assert file in (ROOT / ".ci" / "nightly").read_text()
        assert lines[0].startswith("# For Python 3.12 only.")  # as pip compile resolves in pins.sh


@pytest.mark.parametrize("openai", ["2.6.1", "3.57.0", None])
def test_a_package_that_moved_ends_the_installation(openai: str | None, tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(PIP.format(directory=tmp_path))
    python.chmod(0o755)
    (tmp_path / "list").write_text("agl-slime==0.0.9\nopenai==2.6.1\nrich==15.0.0\n")
    line = f"openai=={openai}\n" if openai else ""
    (tmp_path / "next").write_text(f"agl-slime==0.1.0\nagentops==0.4.21\n{line}rich==15.0.0\n")
    command, environment = ["bash", str(ROOT / "scripts/install_in_slime.sh"), "--quiet"], {"PYTHON": str(python)}
    finished = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    needs, packages = (tmp_path / "calls").read_text().splitlines()
    assert re.fullmatch("install --quiet -c .* -r requirements-slime.txt", needs)
    assert packages == "install --quiet --no-deps agentlightning==0.3.0 agentops==0.4.21 ."
    error = "" if openai == "2.6.1" else "No longer at its version: openai==2.6.1\n"
    assert (finished.returncode, finished.stderr) == (1 if error else 0, error)
