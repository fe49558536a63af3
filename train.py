"""Train an agent online: ``python train.py`` trains the lookup agent on this machine, ``python train.py --help`` lists the flags."""

import sys

from agl_slime.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
