"""Train an agent online: ``python train.py`` trains the lookup agent on this machine, ``python train.py --help`` lists
the flags."""

import sys

if __name__ == "__main__":
    try:
        from agl_slime.cli.main import run
    except KeyboardInterrupt:  # during the import, before the CLI handles it
        sys.exit(130)
    run(["train", *sys.argv[1:]])
