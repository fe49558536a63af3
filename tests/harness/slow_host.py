"""``SlowHost``: a host in namespaces behind a link with a delay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.rehearse.namespaces import INTERFACE, Host


class SlowHost(Host):
    """``delay_s`` is added to each packet in either direction, by a process that holds each frame back: not every
    kernel has ``netem``."""

    def __init__(self, *, delay_s: float, **options: Any) -> None:
        self._delay_s = delay_s
        super().__init__(**options)

    def _plug_in(self) -> None:
        program = [
            sys.executable,
            str(Path(__file__).parents[1] / "programs" / "slow_link.py"),
            self._port,
            str(self._delay_s),
        ]
        relay = subprocess.Popen(
            [*self._switch.enter("net"), *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert relay.stdin is not None
        assert relay.stdout is not None
        self._stack.callback(relay.communicate)  # it ends with its standard input
        if relay.stdout.readline() != "ready\n":
            raise ConfigError("a link with a delay needs /dev/net/tun: load the kernel's module tun")
        self._bridge("ip", "link", "set", "far", "netns", str(self._space.pid))
        self.run(["ip", "link", "set", "far", "name", INTERFACE])
