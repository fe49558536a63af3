import os
import signal


def kill_process_tree(parent_pid: int, include_parent: bool = True, skip_pid: int | None = None) -> None:
    if include_parent:
        os.kill(parent_pid, signal.SIGKILL)


class MultiprocessingSerializer: ...
