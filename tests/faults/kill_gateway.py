"""kill -9 of gateway workers at random moments of a real ``train.py``; then: was each task trained on or dropped once,
and does the audit find nothing?

python -m tests.faults.kill_gateway --kills 50

The agent is one that knows nothing of its training (``openai`` client, two calls a rollout, the second after a
tool). A kill takes one of the workers that listen, at a random moment; the run goes on with the others, and ends by
itself after a Ctrl-C and a last life of a few iterations.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from agl_slime.audit import audit as audit_files
from agl_slime.demo import LOOKUP_POLICY
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.gateway.workers import PROCESS_NAME
from tests.faults.kill_train import Result, Run, audit, report

_FLAGS = (
    "--agent agents/lookup_openai.py:lookup --rollout-batch-size 8 --n-samples-per-prompt 4 --eval-interval 0 "
    "--save-interval 3 --group-max-retries 3"
)


def workers_of(pid: int) -> list[int]:
    """The gateway workers of process ``pid`` that listen."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            own, _, rest = (path / "stat").read_text().partition(" (")
            name, _, rest = rest.rpartition(") ")
        except OSError:  # it has ended
            continue
        if name == PROCESS_NAME and int(rest.split()[1]) == pid:
            found.append(int(own))
    return sorted(found)


def run(
    directory: Path, *, kills: int, seed: int, limit_s: float, workers: int = 2, max_staleness: int = 0, flags: str = ""
) -> Result:
    rng, began, leftovers = random.Random(seed), time.monotonic(), []
    with EmbeddedEngine(LOOKUP_POLICY) as engine:
        flags = f"{_FLAGS} --gateway-workers {workers} --max-staleness {max_staleness} {flags}"
        scene = Run(directory, flags=flags, limit_s=limit_s, engine_url=engine.url)
        process = scene.start(iterations=100_000, cold=False)
        try:
            scene.wait_for_training(process)
            for _ in range(kills):
                scene.wait(process, rng.uniform(0.0, 2.0))
                while len(up := workers_of(process.pid or 0)) < workers:  # one was killed and is not back yet
                    scene.wait(process, 0.05)
                os.kill(killed := rng.choice(up), signal.SIGKILL)
                while killed in workers_of(process.pid or 0):
                    scene.wait(process, 0.01)
            scene.wait_for_training(process)
            os.kill(process.pid or 0, signal.SIGINT)
            process.join(60)
        finally:
            process.kill()
            process.join()
        leftovers += scene.leftovers()
        findings = [f"after Ctrl-C: {said}" for said in audit_files(scene.output).findings]
        done = max([0, *(row["iteration"] for row in scene.rows())])
        last = scene.start(iterations=done + 4, cold=False)
        last.join(limit_s)
        if last.exitcode != 0:
            raise RuntimeError(f"the last life of the run failed; {scene.last_words()}")
        result = audit(scene.output)
        closing = audit_files(scene.output)
        result.kills = result.kills_while_training = kills
        result.leftovers = leftovers + scene.leftovers()
        result.findings = findings + closing.findings + ([] if closing.finished else ["the run did not finish"])
        result.seconds = time.monotonic() - began
        return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = run(Path(directory), limit_s=120 + 60 * options.kills, **vars(options))
    return report(result, "gateway workers of train.py")


if __name__ == "__main__":
    sys.exit(main())
