"""Makes the tiny policy that agl_slime/demo ships: python scripts/make_demo_policy.py [DIRECTORY]

The same machine and library versions give the same files to the last bit (tests/integration/test_policy_checkpoint.py).
One of them, chat_template.jinja, is where every tiny policy has its chat template from: edit it there.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from agl_slime.demo.policy import SHIPPED, make_policy


def main(directory: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = make_policy(Path(scratch) / "policy", anew=True)
        directory.mkdir(parents=True, exist_ok=True)
        for file in made.iterdir():
            shutil.copyfile(file, directory / file.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
