"""What a reporter leaves behind, or why it leaves nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Artifact:
    """A file or directory of the run; ``note`` is the sentence to show when it is not there."""

    label: str
    path: Path
    note: str = ""

    @property
    def exists(self) -> bool:
        return self.path.exists()


class LeavesArtifact(Protocol):
    """A reporter that writes files."""

    def artifact(self) -> Artifact: ...
