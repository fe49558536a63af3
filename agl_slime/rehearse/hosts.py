"""The nodes of a live rehearsal as hosts in namespaces, each with an address and a loopback of its own."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryDirectory

from agl_slime.errors import AglSlimeError
from agl_slime.rehearse.namespaces import Host, Network
from agl_slime.rehearse.script import RayNode, ipv4

STORE_BYTES = 150_000_000
"""Ray's object store of a node."""
_PORT = 6379
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9-]*(\.[A-Za-z0-9-]+)*")


def places(nodes: Sequence[RayNode], count: int) -> list[tuple[str, str | None]]:
    """Name and address of each host, the head first, as far as the script's ``ray start`` commands give them."""
    given = sorted(nodes, key=lambda node: not node.head)
    chosen: dict[str, str | None] = {}
    for number in range(count):
        words = [word for node in given[number : number + 1] for word in (node.address, node.host) if word]
        address = next((word for word in words if _is_address(word)), None)
        name = next((word for word in words if _NAME.fullmatch(word)), "localhost")
        name = f"node{number}" if name in ("localhost", *chosen) else name
        chosen[name] = None if address in chosen.values() else address
    return [*chosen.items()]


def _is_address(word: str) -> bool:
    address = ipv4(word)
    return address is not None and not (address.is_loopback or address.is_unspecified)


@contextmanager
def ray_hosts(
    hosts: Sequence[tuple[str, str | None]], *, gpus: int, python: str, envs: Sequence[Mapping[str, str]]
) -> Iterator[tuple[Host, str]]:
    """Ray on hosts of these names and addresses, with the variables ``envs`` of each. Gives the head's host and the
    address of its Ray. Raises ``AglSlimeError`` when a node does not start."""
    with ExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory(prefix="ray"))
        network = stack.enter_context(Network())
        head: Host | None = None
        for (name, address), env in zip(hosts, envs, strict=True):
            host = network.add(name, private=("/dev/shm", sockets), address=address)
            head = head or host
            first = ("--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={sockets}")
            role = first if host is head else (f"--address={head.address}:{_PORT}",)
            sizes = (f"--num-cpus={gpus + 4}", f"--num-gpus={gpus}", f"--object-store-memory={STORE_BYTES}")
            words = ("--disable-usage-stats", f"--node-ip-address={host.address}")
            try:
                host.run([python, "-m", "ray.scripts.scripts", "start", *role, *sizes, *words], timeout_s=180, env=env)
            except subprocess.SubprocessError as error:
                last = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1:]
                raise AglSlimeError(f"Ray did not start on {name} in the live rehearsal: {' '.join(last)}") from error
        assert head is not None
        yield head, f"{head.address}:{_PORT}"
