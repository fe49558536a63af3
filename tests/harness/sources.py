"""Sources of slime and Megatron-LM for tests: a checkout that a variable names, or an archive in a folder.

python -m tests.harness.sources slime        # prints the directory; exit code 1 and a sentence where there is none
"""

import os
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ARCHIVES = "AGL_SLIME_SOURCES"


@dataclass(frozen=True)
class Source:
    """``variable`` names a checkout; else the archive ``archive`` in the folder ``AGL_SLIME_SOURCES`` is unpacked,
    which holds one directory, ``directory``. ``part`` exists in each version."""

    variable: str
    archive: str
    directory: str
    part: str

    def find(self) -> Path | None:
        """The root of the sources; ``None`` where neither variable is set."""
        if named := os.environ.get(self.variable):
            root = Path(named).resolve()
        elif folder := os.environ.get(ARCHIVES):
            root = self._unpacked(Path(folder))
        else:
            return None
        if not (root / self.part).is_dir():
            raise FileNotFoundError(f"{root} has no {self.part}: name a checkout with {self.variable}")
        return root

    def _unpacked(self, folder: Path) -> Path:
        """The archive's directory, unpacked once per user."""
        root = Path(tempfile.gettempdir()) / f"agl-slime-sources-{os.getuid()}" / self.archive
        if root.is_dir():
            return root
        root.parent.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent) as new:
            with tarfile.open(folder / f"{self.archive}.tar.xz") as archive:
                archive.extractall(new, filter="data")
            try:
                (Path(new) / self.directory).rename(root)
            except OSError:
                if not root.is_dir():  # else another process was faster
                    raise
        return root


SOURCES = {
    "slime": Source("SLIME_DIR", "slime-624b824", "slime", "slime/ray"),
    "slime-v0.3.1": Source("SLIME_V031_DIR", "slime-v0.3.1", "slime", "slime/ray"),
    "megatron": Source("MEGATRON_DIR", "megatron-lm-1dcf0dafa8", "Megatron-LM", "megatron/core"),
}


def main(name: str) -> int:
    source = SOURCES[name]
    root = source.find()
    print(root or f"set {source.variable} to a checkout, or {ARCHIVES} to a folder with {source.archive}.tar.xz")
    return int(root is None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
