"""A taskset whose answer is a file; copied to where verifiers finds it, a module of its own."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["FiledTaskset"]

PROMPT = "Write the capital of Italy into the file named capital."


class FileTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Done when the file has the capital."""

    @vf.reward
    async def written(self, runtime) -> float:
        result = await runtime.run(["cat", "capital"], {})
        return float(result.stdout.strip() == "Rome")


class FiledTaskset(vf.Taskset[FileTask, vf.TasksetConfig]):
    def load(self):
        for number in range(20):
            data = vf.TaskData(name=f"filed-{number}", prompt=f"Task {number}: {PROMPT}")
            yield FileTask(data, self.config.task)
