"""``NpmHarness``: base of harnesses for programs from npm; installs Node and one pinned version of the program."""

from __future__ import annotations

import shlex
from typing import ClassVar

import verifiers.v1 as vf
from verifiers.v1.harnesses.node import NODE_BIN_DIR, ensure_node
from verifiers.v1.harnesses.utils.install import ensure_installed


class NpmHarness(vf.Harness[vf.HarnessConfig]):
    """`PACKAGE` at the version of the config, in a separate directory below `/var/tmp`."""

    PACKAGE: ClassVar[str]
    BINARY: ClassVar[str]

    @property
    def directory(self) -> str:
        return f"/var/tmp/agl-{self.BINARY}-{self.config.version}"

    @property
    def program(self) -> str:
        return f"{self.directory}/node_modules/.bin/{self.BINARY}"

    @property
    def program_env(self) -> dict[str, str]:
        return {**self.config.resolved_env, "PATH": f"{NODE_BIN_DIR}:/usr/local/bin:/usr/bin:/bin"}

    async def setup(self, runtime) -> None:
        await ensure_node(runtime)
        ready = f"{self.directory}/.ready"
        package = shlex.quote(f"{self.PACKAGE}@{self.config.version}")
        await ensure_installed(
            runtime,
            directory=self.directory,
            ready=f"[ -f {ready} ]",
            install=(
                f"set -e; npm install --prefix {self.directory} --no-audit --no-fund --omit=dev {package} >/dev/null; "
                f"[ -x {self.program} ]; touch {ready}"
            ),
            env=self.program_env,
            label=self.PACKAGE,
        )
