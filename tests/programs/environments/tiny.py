"""Two tiny environments, written as packages into a directory, and verifiers' own episodes of them with a scripted
model, to which the same episodes through a run are compared."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

SUMS = """
import verifiers.v1 as vf
{imports}

class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace) -> float:
        reply = trace.last_reply or ""
        if "unreadable" in reply:
            raise ValueError("the scorer cannot read that")
        return 1.0 if self.data.answer in reply else 0.0

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        return 1.0 if len(trace.last_reply or "") < 8 else 0.0

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply or ""))


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for number in range(20):
            data = SumData(name=f"sum-{{number}}", prompt=f"What is {{number}} + 1?", answer=str(number + 1))
            yield SumTask(data, self.config.task)


{rest}
"""
CHAT = "from agl_slime.environments.tasksets.chat import ChatHarness, LocalEnv\n"
JUDGED = """
class JudgedConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())
    judge: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig())


class JudgedEnv(vf.Env[JudgedConfig]):
    async def setup(self, agents):
        agents.judge.trainable = False

    async def run(self, task, agents):
        solved = await agents.solver.run(task)
        await agents.judge.run(vf.Task(vf.TaskData(prompt=f"Is it good: {solved.last_reply}?")))

    async def finalize(self, task, episode):
        by_name = {trace.agent.name: trace for trace in episode.traces}
        good = "yes" in (by_name["judge"].last_reply or "")
        by_name["solver"].record_reward("judged", float(good))
        by_name["judge"].record_reward("fair", 0.25)


__all__ = ["SumTaskset", "JudgedEnv", "ChatHarness"]
"""
NAMES = ("tiny_plain", "tiny_sums", "tiny_judged")


def write(directory: Path) -> None:
    """``tiny_plain`` is as its author would have it; the others have a harness without a process."""
    plain = SUMS.format(imports="", rest='__all__ = ["SumTaskset"]')
    sums = SUMS.format(imports=CHAT, rest='__all__ = ["SumTaskset", "ChatHarness", "LocalEnv"]')
    judged = SUMS.format(imports=CHAT, rest=JUDGED)
    for name, text in zip(NAMES, (plain, sums, judged), strict=True):
        (directory / f"{name}.py").write_text(text)


def answer(prompt: str) -> str:
    """The scripted model: right, wrong, nothing, a text that the scorer cannot read, and right at length."""
    if "Is it good" in prompt:
        return "yes" if re.search(r"good: \d+\?", prompt) else "no"
    number = int(re.findall(r"What is (\d+) \+ 1", prompt)[-1])
    return [str(number + 1), "none", "", "unreadable", f"I think that it is {number + 1}"][number % 5]


async def _episodes(name: str, count: int) -> list[dict[str, Any]]:
    from tests.programs.environments.model import environment, episode_of, scores_of, serving

    env = environment({"taskset": {"id": name}})
    episodes = []
    async with env.serving(), serving(lambda body: answer(str(body["messages"][-1]["content"]))) as (address, _):
        for task in env.taskset.take(count):
            episode = await episode_of(env, task, address)
            errors = [*(error for trace in episode.traces for error in trace.errors), *episode.errors]
            traces = {
                trace.agent.name: {"reward": trace.reward, "rewards": scores_of(trace), "metrics": dict(trace.metrics)}
                for trace in episode.traces
            }
            episodes.append({"ok": episode.ok, "errors": [error.type for error in errors], "traces": traces})
    return episodes


if __name__ == "__main__":
    from tests.programs.environments.model import print_result

    sys.path.insert(0, sys.argv[1])
    print_result(_episodes, sys.argv[2], int(sys.argv[3]))
