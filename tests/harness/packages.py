"""Packages with entry points, as pip installs them."""

from pathlib import Path

import pytest


def install(site: Path, monkeypatch: pytest.MonkeyPatch, *, group: str, entry: str, source: str) -> None:
    """Put a package on the path: a module with ``source``, and one entry point, ``name = module:object``."""
    module = entry.partition("=")[2].partition(":")[0].strip()
    information = site / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
    (site / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(site)
