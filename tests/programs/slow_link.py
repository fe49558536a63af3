"""A network link with a delay, the program of ``SlowHost``:

    python tests/programs/slow_link.py PORT DELAY_S

Two network interfaces, PORT and ``far``, of which each gets the frames that are sent to the other DELAY_S later. It
prints ``ready`` and ends with its standard input.
"""

from __future__ import annotations

import fcntl
import os
import selectors
import struct
import sys
import time
from collections import deque
from contextlib import suppress

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_FRAME = 65_536
_QUEUED = 10_000  # frames in flight in each direction; more are lost


def tap(name: str) -> int:
    """The descriptor of a new interface, which exists until it is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def relay(near: int, far: int, *, delay_s: float, until: int) -> None:
    """Move frames between the descriptors until ``until`` is closed by its writer."""
    queues: dict[int, deque[tuple[float, bytes]]] = {near: deque(), far: deque()}  # by destination
    with selectors.DefaultSelector() as selector:
        for source in (near, far, until):
            selector.register(source, selectors.EVENT_READ)
        while True:
            due = min((queue[0][0] for queue in queues.values() if queue), default=None)
            for key, _ in selector.select(None if due is None else max(0.0, due - time.monotonic())):
                if key.fd == until:
                    return
                queue = queues[far if key.fd == near else near]
                with suppress(OSError):  # an interface that is down
                    frame = os.read(key.fd, _FRAME)
                    if len(queue) < _QUEUED:
                        queue.append((time.monotonic() + delay_s, frame))
            now = time.monotonic()
            for destination, queue in queues.items():
                while queue and queue[0][0] <= now:
                    with suppress(OSError):
                        os.write(destination, queue.popleft()[1])


def main() -> None:
    port, delay_s = sys.argv[1], float(sys.argv[2])
    near, far = tap(port), tap("far")
    print("ready", flush=True)
    relay(near, far, delay_s=delay_s, until=sys.stdin.fileno())


if __name__ == "__main__":
    main()
