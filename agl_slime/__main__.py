"""The program ``agl-slime``, and ``python -m agl_slime``."""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    # during the import nothing is open, and an exception would be lost in a callback of the import system
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from agl_slime.cli.main import run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
