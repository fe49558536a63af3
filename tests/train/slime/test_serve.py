"""``python -m agl_slime.train.slime.serve``: runners in a process of their own, the data source in another."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agl_slime import AGLDataSource
from tests.harness.guard import guarded_child
from tests.harness.slime_programs import finish_guarded, start_guarded
from tests.harness.slime_source import AGENT, args_for, check, write_tasks

pytestmark = pytest.mark.slow  # each process imports Agent Lightning


@contextmanager
def serve(*flags: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "agl_slime.train.slime.serve", "--agent", AGENT, *flags]
    environment = {name: value for name, value in os.environ.items() if name != "AGL_SLIME_STORE_TOKEN"}
    with start_guarded(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        yield process


def test_slime_data_source_reads_from_another_process_that_ends_on_sigterm(tmp_path: Path):
    with serve("--port", "0") as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("agl_store_url: http://127.0.0.1:"))
        args = args_for(agl_store_url=line.split()[1], agl_tasks=write_tasks(tmp_path / "t.jsonl", 8))
        with AGLDataSource(args) as source:
            check(source.get_samples(3))
        guarded_child(process).send_signal(signal.SIGTERM)
        assert finish_guarded(process, 60)[0] == 0
