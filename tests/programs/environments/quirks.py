"""An environment of rare and allowed properties: its split defaults to test, it has a metric by the name of a reward,
and it reads the environment variables of a program on this machine."""

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
        result = await runtime.run(["env"], {{}})
        assert result.exit_code == 0, result.stderr
        trace.record_metric("keys", result.stdout.count("{KEY}"))
        trace.record_metric("lines", result.stdout.count("PATH="))
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
