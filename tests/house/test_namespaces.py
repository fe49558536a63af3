"""Hosts in namespaces: names, addresses, a slow link, a cable that is unplugged, and the end of each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.hosts import network
from tests.harness.namespaces import Host, Network, Process, why_no_namespaces
from tests.harness.waiting import becomes_true

__all__ = ["network"]

pytestmark = pytest.mark.hosts

ROOT = Path(__file__).parents[2]

ECHO = """
import socket
with socket.create_server(("::", 7000), family=socket.AF_INET6, dualstack_ipv6=True) as server:
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(100))
"""
ASK = """
import socket, sys, time
began = time.monotonic()
try:
    with socket.create_connection((sys.argv[1], 7000), timeout=2) as connection:
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
        print(time.monotonic() - began)
except OSError as error:
    print(type(error).__name__)
"""


def echo(host: Host) -> Process:
    process = host.start([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ask(host: Host, address: str) -> str:
    return host.run([sys.executable, "-c", ASK, address]).stdout.strip()


def test_each_host_has_its_name_addresses_cable_and_power(network: Network) -> None:
    first, second = network.add("first"), network.add("second")
    assert first.run(["hostname"]).stdout == "first\n"
    assert second.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"]).stdout.strip() in ("2", "3", "4")
    process = echo(second)
    for address in ("second", second.address, second.address6):
        assert float(ask(first, address)) < 2
    second.cut()
    assert ask(first, second.address) == "TimeoutError"
    second.restore()
    answers = [ask(first, second.address) for _ in range(2)]  # the first may still wait for the neighbour's old address
    assert float(answers[1]) < 2
    process.terminate()
    assert process.wait(10) == -15  # SIGTERM reached the program itself
    assert ask(first, second.address) == "ConnectionRefusedError"
    process = echo(second)
    second.kill()
    assert process.returncode == -9
    assert ask(first, second.address) in ("TimeoutError", "OSError")


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
