"""Check that ``scripts/install_in_slime.sh`` finds versions that leave SGLang's and slime's packages as they are.

    python scripts/slime_dry_run.py constraints-slime.txt …

For each list of pinned packages: an environment that has them by name only, and a dry run of the installation there.
Ends with 1 when pip would install, replace or miss one of them, or install LiteLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SCRIPT = Path(__file__).with_name("install_in_slime.sh")


def pretend(site_packages: Path, pins: dict[str, str]) -> None:
    """Enter the metadata of packages, without their code."""
    for name, version in pins.items():
        info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").touch()


def planned(pins: dict[str, str], directory: Path) -> dict[str, str]:
    """The packages that pip would install, by name."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    pretend(Path(subprocess.check_output([python, "-c", where], text=True).strip()), pins)
    reports = directory / "reports"
    reports.mkdir()
    environment = {**os.environ, "PYTHON": str(python), "AGL_SLIME_PIP_REPORTS": str(reports)}
    subprocess.run(["bash", SCRIPT, "--dry-run", "--quiet"], env=environment, check=True)
    installs = [entry for file in reports.iterdir() for entry in json.loads(file.read_text())["install"]]
    return {entry["metadata"]["name"].lower().replace("_", "-"): entry["metadata"]["version"] for entry in installs}


def pins_of(file: str) -> dict[str, str]:
    lines = Path(file).read_text().splitlines()
    return dict(line.split(" ")[0].split("==") for line in lines if "==" in line and not line.startswith("#"))


def main(files: list[str]) -> int:
    code = 0
    with ThreadPoolExecutor() as threads, tempfile.TemporaryDirectory() as directory:
        places = [Path(directory) / str(number) for number in range(len(files))]
        plans = [*threads.map(planned, map(pins_of, files), places)]
    for file, added in zip(files, plans, strict=True):
        pins = pins_of(file)
        wrong = {name: version for name, version in added.items() if name in pins or name == "litellm"}
        names = ", ".join(f"{name} {version}" for name, version in sorted(added.items()))
        print(f"{file}: {len(pins)} packages stay, {len(added)} are added: {names}")
        if wrong or "agl-slime" not in added:
            print(f"{file}: these must not be installed: {wrong or 'agl-slime is missing'}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
