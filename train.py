"""Train an agent online: ``python train.py`` trains the lookup agent on this machine, ``python train.py --help`` lists
the flags."""

import os
import signal
import sys

if __name__ == "__main__":
    # during the import nothing is open, and an exception would be lost in a callback of the import system
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from agl_slime.cli.main import run

    run(["train", *sys.argv[1:]])
