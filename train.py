"""Train an agent online: ``python train.py`` trains the lookup agent on this machine, ``python train.py --help`` lists
the flags."""

import sys

if __name__ == "__main__":
    try:
        from agl_slime.cli import run
    except KeyboardInterrupt:  # before there is anybody who takes it
        sys.exit(130)
    run(["train", *sys.argv[1:]])
