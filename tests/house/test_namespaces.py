"""Hosts in namespaces end with the process that made them; tests with the marker ``hosts`` use what else they do."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.namespaces import why_no_namespaces
from tests.harness.waiting import becomes_true

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).parents[2]


def test_nothing_outlives_the_process_that_made_the_hosts() -> None:
    if reason := why_no_namespaces():
        pytest.skip(reason)
    program = """
import sys
from tests.harness.namespaces import Network
with Network() as network:
    host = network.add("host")
    host.start(["sleep", "1000"])
    print(*(path for path in host.run(["readlink", "/proc/self/ns/net"]).stdout.split()), flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        namespace = process.stdout.readline().strip()
        assert namespace.startswith("net:")
        assert namespace in _network_namespaces()
        process.kill()
    assert becomes_true(lambda: namespace not in _network_namespaces(), 10)


def _network_namespaces() -> set[str]:
    namespaces = set()
    for link in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            namespaces.add(str(link.readlink()))
        except OSError:  # the process has ended
            continue
    return namespaces
