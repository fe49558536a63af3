"""verifiers' evaluation program, with this package's tasksets registered."""

import sys

from verifiers.v1.cli.eval.main import main

from agl_slime.environments.plugins import register
from agl_slime.environments.tasksets import FIELDS

if __name__ == "__main__":
    for kind in FIELDS:
        if any(f"agl_{kind.replace('-', '_')}" in word.replace("-", "_") for word in sys.argv[1:]):
            register("tasksets", kind)
    main()
