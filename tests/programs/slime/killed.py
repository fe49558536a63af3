"""A driver that has started slime's side and waits to be killed; stand-ins for slime, the Ray of RAY_ADDRESS.

python -m tests.programs.slime.killed SHAPE CALLS
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import ray

from agl_slime.train.slime.trainer import SlimeTrainer
from tests.programs.slime.standins import driver


def main(shape: str, calls: Path) -> None:
    sys.modules.update(driver.modules_of(shape))
    ray.init(address="auto", log_to_driver=False)
    SlimeTrainer(args=driver.driver_args(calls)).start()
    print("started", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
