"""Train an agent online: ``python train.py`` trains the lookup agent on this machine, ``python train.py --help`` lists
the flags."""

import sys

from agl_slime.cli import run

if __name__ == "__main__":
    run(["train", *sys.argv[1:]])
