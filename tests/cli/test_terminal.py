"""Text from outside on a terminal: it has letters there and no effect."""

import ast
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import rich.console
from hypothesis import given
from hypothesis import strategies as st

import agl_slime
from agl_slime.events import RolloutFinished, RunStarted, Warning
from agl_slime.report import ProgressReporter
from agl_slime.report.summary import show
from agl_slime.support.terminal import PlainConsole, plain, print_exception, print_line

ATTACKS = ("\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\x1b[8mhidden", "\rreward: 1", "\u202egnp.exe", "\x08" * 9)
TEXTS = st.lists(st.sampled_from(ATTACKS) | st.text() | st.characters(max_codepoint=0xA0), min_size=1).map("".join)
PRINTS = ("print", "Console", "logging.basicConfig", "traceback.print_exc", "traceback.print_exception")
TERMINAL = ("support/terminal.py: logging.basicConfig()", "support/terminal.py: print(plain(str(text)))")
CURSOR = re.compile(r"\x1b\[\?25[lh]|\r?\x1b\[(2K|1A)|\r(?=\x1b)")  # of the live view


def without_effect(text: str) -> bool:
    """Whether a terminal shows all of ``text``: only letters, tabs and ends of lines."""
    allowed = re.sub(r"[\n\t]", "", text)
    return not re.search("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", allowed)


@given(TEXTS)
def test_no_way_to_print_lets_a_text_act_on_the_terminal(text: str) -> None:
    assert (plain(text) == text) == without_effect(text)
    assert plain(plain(text)) == plain(text)
    out, screen = io.StringIO(), io.StringIO()
    console = PlainConsole(file=screen, force_terminal=True, color_system=None, width=60)
    print_line(text, to=out)
    print_line(text, to=rich.console.Console(file=out, width=60))
    console.print(text, markup=False)
    show([("note", text)], console)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", out)
        print_exception(ValueError, ValueError(text), None)
        live = ProgressReporter(console=console, view="live")
        for event in (
            RunStarted(settings={}, output_dir="runs/" + text.replace("/", "").replace("\0", "")),
            RolloutFinished(iteration=1, rollout_id="r", outcome="failed", reason=text),
            Warning(text=text, key="k"),
        ):
            live.handle(event)
            ProgressReporter(console=console, view="lines").handle(event)
        console.print(live.render())
        live.close()
    assert without_effect(out.getvalue())
    assert without_effect(CURSOR.sub("", screen.getvalue()))


PROGRAM = r"""
import logging, threading, warnings
from agl_slime.cli.main import _configure_logging
from agl_slime.support.terminal import PlainConsole, log_plainly, log_to_stderr, print_plainly
class Dies:
    def __del__(self): raise ValueError("\x1b[2J of an object")
def fail(where): raise ValueError(f"\x1b[2J of a {where}")
print_plainly()
warnings.warn("\x1b[2J of a warning")
_configure_logging(PlainConsole(stderr=True), debug=True)
for _ in range(2):
    try: fail("cause")
    except ValueError: logging.getLogger("agl_slime.x").exception("\x1b[2J of a message")
    logging.getLogger().handlers = []
    log_to_stderr(logging.WARNING, "%(message)s")
logging.getLogger().handlers = [logging.StreamHandler(), logging.StreamHandler()]  # of others
log_plainly()
try: fail("cause")
except ValueError: logging.getLogger("agl_slime.x").exception("%s", "\x1b[2J of a message")
Dies()
thread = threading.Thread(target=fail, args=("thread",)); thread.start(); thread.join()
fail("program")
"""


def test_a_process_logs_and_prints_warnings_and_exceptions_plainly() -> None:
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    for what in ("n object", " warning", " message", " cause", " thread", " program"):
        assert done.stderr.count(f"\\x1b[2J of a{what}") == 1 + 3 * (what in (" message", " cause")), done.stderr
    assert without_effect(done.stderr)


def test_nothing_else_in_the_package_prints() -> None:
    """Programs in boxes and in environments' Pythons write to files, and JSON has no control characters."""
    root, findings = Path(agl_slime.__file__).parent, []
    for path in sorted(
        {*root.rglob("*.py")}
        - {*root.glob("environments/*"), *root.glob("*/sglang_process.py"), *root.glob("tools/rehearse/*/*")}
    ):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        for called, *values in ([ast.unparse(part) for part in (node.func, *node.args)] for node in calls):
            if called in PRINTS and not str(*values[:1]).startswith("json.dumps("):
                findings.append(f"{path.relative_to(root)}: {called}({', '.join(values)})")
    assert findings == ["cli/main.py: logging.basicConfig()", *TERMINAL]
