"""An agent that repairs a function with the tools ``read``, ``edit`` and ``test``.

Code of the agent runs in a sandbox (bubblewrap) that gets the arguments of calls and returns their results. The results
that tests expect stay outside, and so does the comparison: no code can read or change them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from agl_slime import SGLangLitAgent, Trajectory

SECONDS, WAIT, MEMORY, OUTPUT = 5, 20, 2**29, 2**16  # of the processor, of the clock; bytes
# The program in the sandbox: a line of results per call. What the agent's code prints goes to stderr.
PROGRAM = """
import json, os, sys
results, sys.stdout = sys.stdout, sys.stderr
given = json.load(sys.stdin)
names = {}
exec(given["source"], names)
for arguments in given["calls"]:
    try:
        line = json.dumps({"value": names[given["name"]](*arguments)})
    except Exception as error:
        line = json.dumps({"error": f"{type(error).__name__}: {error}"[:200]})
    print(line, file=results, flush=True)
"""


def sandbox() -> list[str]:
    """bubblewrap's words: the system read-only, everything else fresh and in memory, no network, no rights."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"]
    for name in ("/usr", "/bin", "/lib", "/lib64", sys.base_prefix):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    return [*words, "--proc", "/proc", "--dev", "/dev", "--size", str(2**26), "--tmpfs", "/tmp"]


def run_calls(source: str, name: str, calls: list[list[Any]]) -> list[Any]:
    """The result of each call by code that is not trusted: ``{"value": …}`` or ``{"error": …}``."""

    limits = f"ulimit -d {MEMORY >> 10} -t {SECONDS} -f {OUTPUT >> 9} -c 0"
    python = [os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM]
    command = [*sandbox(), "--chdir", "/tmp", "/bin/sh", "-c", f'{limits}; exec "$@"', "sh", *python]
    given = json.dumps({"source": source, "name": name, "calls": calls}).encode()
    failed, end = "the code does not run", None
    with tempfile.TemporaryFile() as output:
        options: dict[str, Any] = {"stdout": output, "stderr": subprocess.DEVNULL, "check": False}
        try:
            end = subprocess.run(command, input=given, timeout=WAIT, **options)
        except subprocess.TimeoutExpired:
            failed = f"it did not end within {WAIT} s"
        output.seek(0)
        lines = output.read(OUTPUT).decode(errors="replace").splitlines()
    try:
        results = [json.loads(line) for line in lines] if end is not None and end.returncode == 0 else []
    except ValueError:
        results = []
    return results if len(results) == len(calls) else [{"error": failed}] * len(calls)


def failures(source: str, name: str, tests: list[list[Any]]) -> list[str]:
    """For each test, the arguments of a call and its result, the reason why it fails; empty for one that passes."""
    texts = []
    for (arguments, expected), result in zip(tests, run_calls(source, name, [test[0] for test in tests]), strict=True):
        result = result if isinstance(result, dict) else {"error": "no result"}
        passes = "value" in result and json.dumps(result["value"]) == json.dumps(expected)
        call = f"{name}({', '.join(map(repr, arguments))})"
        shown = result.get("error", repr(result.get("value")))
        texts.append("" if passes else f"{call} is {shown}, not {expected!r}"[:300])
    return texts


class Workspace:
    """The tools of one rollout."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task, self.source = task, task["source"]

    def read(self) -> str:
        """Read the function, with numbers of lines."""
        return "\n".join(f"{number} {line}" for number, line in enumerate(self.source.splitlines(), 1))

    def edit(self, line: int, text: str) -> str:
        """Replace a line of the function.

        Args:
            line: Its number, from 1.
            text: The new line, with its indentation.
        """
        lines = self.source.splitlines()
        if not 1 <= line <= len(lines):
            return f"Error: the lines are numbered from 1 to {len(lines)}"
        self.source = "\n".join([*lines[: line - 1], text, *lines[line:]])
        return "edited"

    def test(self) -> str:
        """Run the tests."""
        failed = failures(self.source, self._task["name"], self._task["tests"])
        return "\n".join(filter(None, failed)) or "all tests pass"


def score_source(task: dict[str, Any], source: str) -> dict[str, float]:
    """1 if all tests pass, 0.1 if only those that the agent sees do."""
    n_shown, failed = len(task["tests"]), failures(source, task["name"], task["tests"] + task["hidden"])
    right = not any(failed)
    return {"score": 1.0 if right else 0.1 * (not any(failed[:n_shown])), "right": float(right)}


class RepairAgent(SGLangLitAgent):
    max_turns = 10
    system = "Repair the function. Read it, edit its wrong line, run the tests; say done when they pass."

    def build_tools(self, task: dict[str, Any]) -> list[Any]:
        workspace = Workspace(task)
        return [workspace.read, workspace.edit, workspace.test]

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}, {"role": "user", "content": task["prompt"]}]

    def score(self, task: dict[str, Any], trajectory: Trajectory) -> dict[str, float]:  # type: ignore[override]
        return score_source(task, trajectory.tools["edit"].__self__.source)


class SmallRepairAgent(RepairAgent):
    """The task at the size of SmolLM2-135M: the function and a test are in the prompt, and the answer is the right line
    with its number."""

    max_turns = 1
    system = "Write the wrong line as it should be."

    def build_tools(self, task: dict[str, Any]) -> list[Any]:
        return []

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        system, tests = super().build_prompt(task)
        test = tests["content"].splitlines()[0]
        return [system, {"role": "user", "content": f"{test}\n{Workspace(task).read()}"}]

    def score(self, task: dict[str, Any], trajectory: Trajectory) -> dict[str, float]:  # type: ignore[override]
        workspace = Workspace(task)
        number, _, text = trajectory.response.partition(" ")
        if number.isdecimal():
            workspace.edit(int(number), text)
        return score_source(task, workspace.source)
