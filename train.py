"""Train an agent online: ``python train.py`` trains the lookup agent on this machine, ``python train.py --help`` lists
the flags."""

import os
import signal
import sys

if __name__ == "__main__":
    # during the import nothing is open, and an exception would be lost in a callback of the import system
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    if sys.version_info < (3, 11):  # noqa: UP036  pip, which refuses, need not have been asked
        sys.exit(f"error: train.py needs Python 3.11 to 3.13, and this is {sys.version_info[0]}.{sys.version_info[1]}")
    try:
        from agl_slime.cli.main import run
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: {sys.executable} has no {error.name}: in an environment of its own run "
            'pip install -c constraints.txt -e ".[local]", then train.py with its Python'
        )
    run(["train", *sys.argv[1:]])
