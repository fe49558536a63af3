"""kill -9 of the buffer, of the generator and of the trainer at random moments of a run; then: was each group trained
on exactly once?

python -m tests.programs.kill_buffer --kills 50
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_GENERATOR = '''
    """Writes two items per instance, slowly enough to be killed in between."""
    import asyncio, os, random
    from pathlib import Path
    from agl_slime.buffer.generators import base_generator

    TASK_TYPE = "kill"

    async def rollout(client, messages, sampling_params):
        await asyncio.sleep(random.uniform(0.01, 0.05))
        return [*messages, {"role": "assistant", "content": "4"}]

    def run_rollout(data):
        Path(__file__).with_name("pid").write_text(str(os.getpid()))
        generator = base_generator.BaseGenerator(
            "http://127.0.0.1:9", data["remote_buffer_url"], num_repeat_per_sample=2, num_process=4,
            skip_instance_ids=data["skip_instance_ids"], partial_groups=data["partial_groups"],
        )
        generator.entry(data["input_file"], rollout, lambda item: random.randrange(2), data["num_epoch"])

    def normalize_group_data(group):
        tokens = {"tokens": [1, 2, 3], "response_length": 2, "rollout_log_probs": [-0.5, -0.5]}
        return group[0], [{**item, "raw_reward": item["reward"], **tokens} for item in group[1]]
'''


@dataclass
class Result:
    groups: int
    lost: list[str]
    twice: list[str]
    kills: Counter[str] = field(default_factory=Counter)
    adds_up: bool = False
    seconds: float = 0.0


class Run:
    """The three processes; each is started again when it is found dead."""

    def __init__(self, directory: Path, *, groups: int) -> None:
        self.directory, self.groups = directory, groups
        (directory / "input.jsonl").write_text(
            "".join(json.dumps({"instance_id": f"id{n}", "prompt": "2+2?"}) + "\n" for n in range(groups))
        )
        (directory / "generators").mkdir()
        (directory / "generators" / "kill_generator.py").write_text(textwrap.dedent(_GENERATOR))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.buffer = self.trainer = None
        self._log = (directory / "log").open("ab")

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *arguments], stdout=self._log, stderr=subprocess.STDOUT)

    def keep_up(self) -> None:
        if self.buffer is None or self.buffer.poll() is not None:
            code = "import sys; from agl_slime.buffer.server import main; sys.exit(main(sys.argv[1:]))"
            where = (
                "--generators",
                f"{self.directory}/generators",
                "--input-dir",
                str(self.directory),
                "--run-dir",
                f"{self.directory}/run",
            )
            self.buffer = self.start("-c", code, "--port", str(self.port), "--generator-restarts", "1000", *where)
        if not self.done and (self.trainer is None or self.trainer.poll() is not None):
            self.trainer = self.start(
                "-m", "tests.programs.buffer_trainer", self.url, str(self.directory), str(self.groups)
            )

    def kill(self, victim: str) -> bool:
        if victim == "generator":
            try:
                os.kill(int((self.directory / "generators" / "pid").read_text()), signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError, ValueError):
                return False
            return True
        process = self.buffer if victim == "buffer" else self.trainer
        if process is None or process.poll() is not None:
            return False
        process.kill()
        process.wait()
        return True

    @property
    def trained(self) -> list[str]:
        checkpoint = self.directory / "checkpoint.json"
        return json.loads(checkpoint.read_text())["trained"] if checkpoint.exists() else []

    @property
    def done(self) -> bool:
        return len(self.trained) >= self.groups

    def stats(self) -> Any:
        with urllib.request.urlopen(f"{self.url}/stats", timeout=10) as response:
            return json.load(response)

    def end(self) -> None:
        for process in (self.trainer, self.buffer):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(20)
        self._log.close()


def run(
    directory: Path, *, kills: int, groups: int, seed: int, limit_s: float, pause_s: tuple[float, float] = (0.3, 2.0)
) -> Result:
    rng = random.Random(seed)
    scene = Run(directory, groups=groups)
    killed: Counter[str] = Counter()
    began = time.monotonic()
    next_kill = began + 1.5
    try:
        while not scene.done:
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"{len(scene.trained)} of {groups} groups after {limit_s:g} s; see {directory}/log")
            scene.keep_up()
            if time.monotonic() >= next_kill and sum(killed.values()) < kills:
                victim = rng.choice(["buffer", "generator", "trainer"])
                killed[victim] += scene.kill(victim)
                next_kill = time.monotonic() + rng.uniform(*pause_s)
            time.sleep(0.02)
        scene.keep_up()
        while True:
            try:
                items = scene.stats()["items"]
                break
            except OSError:
                time.sleep(0.1)
        counts = Counter(scene.trained)
        return Result(
            groups=groups,
            lost=[f"id{n}" for n in range(groups) if not counts[f"id{n}"]],
            twice=[instance for instance, n in counts.items() if n > 1],
            kills=killed,
            adds_up=items["opened"] == items["open"] + items["ready"] + sum(items["closed"].values()),
            seconds=time.monotonic() - began,
        )
    finally:
        scene.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = run(
            Path(directory),
            kills=options.kills,
            groups=60 * options.kills,
            seed=options.seed,
            limit_s=60 + 20 * options.kills,
        )
    print(
        f"{sum(result.kills.values())} kills ({dict(result.kills)}) in {result.seconds:.0f} s: "
        f"of {result.groups} groups {len(result.lost)} lost, ",
        end="",
    )
    print(f"{len(result.twice)} trained twice; the ledger {'adds up' if result.adds_up else 'does NOT add up'}")
    return 0 if result.adds_up and not result.lost and not result.twice else 1


if __name__ == "__main__":
    sys.exit(main())
