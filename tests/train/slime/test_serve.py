"""``python -m agl_slime.train.slime.serve``: runners in a process of their own, the data source in another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from agl_slime import AGLDataSource
from tests.harness.slime_source import AGENT, args_for, check, write_tasks

pytestmark = pytest.mark.slow  # each process imports Agent Lightning

ROOT = Path(__file__).parents[3]


def serve(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agl_slime.train.slime.serve", *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("AGL_SLIME_STORE_TOKEN", None)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_slime_data_source_reads_from_another_process_that_ends_on_sigterm(tmp_path: Path):
    process = serve("--agent", AGENT, "--port", "0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("agl_store_url: http://127.0.0.1:"), line
        args: Namespace = args_for(agl_store_url=line.split()[1], agl_tasks=write_tasks(tmp_path / "t.jsonl", 8))
        with AGLDataSource(args) as source:
            check(source.get_samples(3))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_public_address_without_a_token_is_refused_in_one_sentence():
    process = serve("--agent", AGENT, "--host", "0.0.0.0")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    last = error.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert "'0.0.0.0'" in last
    assert "AGL_SLIME_STORE_TOKEN" in last
