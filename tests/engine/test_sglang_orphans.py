"""What stands between a run and its SGLang ends the server whenever it ends itself; with a stand-in for SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.harness.processes import is_running
from tests.harness.waiting import becomes_true

SERVER = """
    #!{python}
    import os, pathlib, sys
    from http.server import BaseHTTPRequestHandler, HTTPServer
    if sys.argv[1] == "-c":
        print(True)  # a GPU: SGLang is started as it is
        sys.exit()
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
        def log_message(self, *said):
            pass
    server = HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy)
    pathlib.Path({pid!r}).write_text(str(os.getpid()))
    server.serve_forever()
"""


def test_server_whose_starter_died_is_killed(tmp_path: Path) -> None:
    fake, pid = tmp_path / "python", tmp_path / "pid"
    fake.write_text(textwrap.dedent(SERVER).strip().format(python=sys.executable, pid=str(pid)))
    fake.chmod(0o755)
    command = [sys.executable, "-m", "agl_slime.engine.sglang_process", "--python", fake, "--model-path", tmp_path]
    command += ["--random-seed", "0", "--parent-pid", str(os.getpid())]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    assert process.stdout is not None
    process.stdout.close()  # as a run does that is killed just before the server answers
    try:
        process.wait(120)
        server = int(pid.read_text())
        assert becomes_true(lambda: not is_running(server), 20)
        assert "BrokenPipeError" in (tmp_path / "log").read_text()
    finally:
        if process.poll() is None:
            process.kill()
        if pid.exists() and is_running(int(pid.read_text())):
            os.kill(int(pid.read_text()), 9)
