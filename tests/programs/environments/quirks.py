"""An environment that does what is allowed and rare: it is for testing where nobody says so, has a metric by the name
of a reward, and looks at what a program on this machine finds in its environment."""

from __future__ import annotations

from pathlib import Path

KEY = "the-key-of-the-run"
MODULE = f"""
from typing import Literal

import verifiers.v1 as vf
from agl_slime.environments.tasksets.chat import ChatHarness, LocalEnv

__all__ = ["QuirkTaskset", "ChatHarness", "LocalEnv"]


class QuirkConfig(vf.TasksetConfig):
    split: Literal["train", "test"] = "test"


class QuirkTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace, runtime) -> float:
        found = await runtime.run(["env"], {{}})
        assert found.exit_code == 0, found.stderr
        trace.record_metric("keys_seen", found.stdout.count("{KEY}"))
        trace.record_metric("lines_seen", found.stdout.count("PATH="))
        trace.record_metric("right", 3.0)
        return 1.0


class QuirkTaskset(vf.Taskset[QuirkTask, QuirkConfig]):
    def load(self):
        for number in range(4):
            prompt = f"What is {{number}} + 1? ({{self.config.split}})"
            yield QuirkTask(vf.TaskData(name=f"{{self.config.split}}-{{number}}", prompt=prompt), self.config.task)
"""


def write(directory: Path) -> str:
    (directory / "tiny_quirks.py").write_text(MODULE)
    return "tiny_quirks"
