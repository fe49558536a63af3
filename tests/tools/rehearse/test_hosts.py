"""Names and addresses of the hosts of a live rehearsal."""

from __future__ import annotations

import pytest

from agl_slime.rehearse.hosts import places
from agl_slime.rehearse.script import RayNode


def node(host: str | None, address: str | None, *, head: bool = False) -> RayNode:
    return RayNode(host=host, head=head, address=address, gpus=None)


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ([], [("node0", None), ("node1", None)]),
        ([node("10.0.0.2", None), node(None, "10.0.0.1", head=True)], [("node0", "10.0.0.1"), ("node1", "10.0.0.2")]),
        ([node(None, "127.0.0.1", head=True), node("worker-1.lan", None)], [("node0", None), ("worker-1.lan", None)]),
        ([node(None, "10.0.0.1", head=True), node("a", "10.0.0.1")], [("node0", "10.0.0.1"), ("a", None)]),
        ([node("localhost", "0.0.0.0", head=True), node("a b", "$IP")], [("node0", None), ("node1", None)]),
    ],
)
def test_hosts_have_the_names_and_addresses_of_the_script(nodes: list[RayNode], hosts: list[tuple[str, str | None]]):
    assert places(nodes, 2) == hosts
