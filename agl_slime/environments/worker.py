"""The program for the Python that has verifiers: ``describe`` prints an environment's agents and tasks, ``work`` plays
episodes for a run, as Agent Lightning 1.0's controller executes rollouts. Imports neither Agent Lightning nor torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="agl_slime.environments.worker")
    parser.add_argument("command", choices=("describe", "work"))
    parser.add_argument("--spec", required=True, help="the environment's settings, as JSON, or @FILE")
    parser.add_argument("--url", help="the run's address, with /controller/NAME for one of several workers")
    args = parser.parse_args(argv)
    text = Path(args.spec[1:]).read_text() if args.spec.startswith("@") else args.spec
    spec: dict[str, Any] = json.loads(text)
    out, sys.stdout = sys.stdout, sys.stderr  # libraries print to stdout
    try:
        import verifiers.v1  # noqa: F401
    except ImportError as error:
        print(f"this Python has no verifiers ({error}): pip install verifiers", file=sys.stderr)
        return 3
    from agl_slime.environments.play import Player
    from agl_slime.environments.plugins import add_to_path
    from agl_slime.environments.taskset import build_environment, describe

    add_to_path()
    if args.command == "describe":
        description = asyncio.run(describe(build_environment(spec), spec))
        print(json.dumps(description), file=out)
        return 0
    from agl_slime.environments.queue import Queue

    # inherited by programs that episodes start: the supervisor finds them by it and ends them
    os.environ["AGL_EVENT_URL"] = f"{args.url}/"

    async def work() -> None:
        player = Player(spec, url=args.url, key=os.environ.get("AGL_KEY") or "none")
        limit = min(spec["max_concurrent"], player.max_episodes or spec["max_concurrent"])
        async with player, Queue(player, limit=limit, poll_s=spec["poll_interval_s"]) as queue:
            await queue.follow()

    asyncio.run(work())
    return 0


if __name__ == "__main__":
    sys.exit(main())
