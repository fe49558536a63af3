"""kill -9 of the buffer, of the generator and of the trainer at random moments of a run; then: was each group trained
on exactly once?"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agl_slime.support.net import free_port

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
_SERVER = "import sys; from agl_slime.buffer.server import main; sys.exit(main(sys.argv[1:]))"


@dataclass
class Result:
    lost: list[str]
    twice: list[str]
    kills: Counter[str] = field(default_factory=Counter)
    adds_up: bool = False


class Run:
    """The three processes; each is restarted when it is dead."""

    def __init__(self, directory: Path, *, groups: int) -> None:
        self.directory, self.groups, self.port = directory, groups, free_port()
        instances = [json.dumps({"instance_id": f"id{n}", "prompt": "2+2?"}) + "\n" for n in range(groups)]
        (directory / "input.jsonl").write_text("".join(instances))
        (directory / "generators").mkdir()
        (directory / "generators" / "kill_generator.py").write_text(textwrap.dedent(_GENERATOR))
        self.url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._log = (directory / "log").open("ab")

    def keep_up(self) -> None:
        paths = ("--generators", self.directory / "generators", "--input-dir", self.directory)
        paths += ("--run-dir", self.directory / "run")
        self._start("buffer", "-c", _SERVER, "--port", self.port, "--generator-restarts", 1000, *paths)
        if not self.done:
            self._start("trainer", "-m", "tests.programs.buffer_trainer", self.url, self.directory, self.groups)

    def _start(self, name: str, *arguments: object) -> None:
        if name not in self.processes or self.processes[name].poll() is not None:
            command = [sys.executable, *map(str, arguments)]
            self.processes[name] = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def kill(self, victim: str) -> bool:
        try:
            generator = self.directory / "generators" / "pid"
            pid = int(generator.read_text()) if victim == "generator" else self.processes[victim].pid
            os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, KeyError, ProcessLookupError, ValueError):
            return False
        if victim != "generator":
            self.processes[victim].wait()
        return True

    @property
    def trained(self) -> list[str]:
        checkpoint = self.directory / "checkpoint.json"
        return json.loads(checkpoint.read_text())["trained"] if checkpoint.exists() else []

    @property
    def done(self) -> bool:
        return len(self.trained) >= self.groups

    def adds_up(self) -> bool:
        """Whether the buffer's ledger does, once it answers."""
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/stats", timeout=10) as response:
                    items = json.load(response)["items"]
                return items["opened"] == items["open"] + items["ready"] + sum(items["closed"].values())
            except OSError:
                time.sleep(0.1)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
                process.wait(20)
        self._log.close()


def run(directory: Path, *, kills: int, groups: int, seed: int, limit_s: float) -> Result:
    rng, scene, killed = random.Random(seed), Run(directory, groups=groups), Counter[str]()
    began = time.monotonic()
    next_kill = began + 1.5
    try:
        while not scene.done:
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"{len(scene.trained)} of {groups} groups after {limit_s:g} s; see {directory}/log")
            scene.keep_up()
            if time.monotonic() >= next_kill and killed.total() < kills:
                victim = rng.choice(["buffer", "generator", "trainer"])
                killed[victim] += scene.kill(victim)
                next_kill = time.monotonic() + rng.uniform(0.3, 2.0)
            time.sleep(0.02)
        scene.keep_up()
        counts = Counter(scene.trained)
        return Result(
            lost=[f"id{n}" for n in range(groups) if not counts[f"id{n}"]],
            twice=[instance for instance, n in counts.items() if n > 1],
            kills=killed,
            adds_up=scene.adds_up(),
        )
    finally:
        scene.end()
