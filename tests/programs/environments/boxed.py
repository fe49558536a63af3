"""An environment whose harness runs a program: one model call, a search for a network, for this machine's files and for
other programs, and a file with the findings."""

from __future__ import annotations

from pathlib import Path

PROGRAM = """
import json, os, socket, sys, urllib.request

address, key, port, private = sys.argv[1:]
body = {"model": "m", "messages": [{"role": "user", "content": "What is one and one?"}]}
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
request = urllib.request.Request(f"{address}/chat/completions", json.dumps(body).encode(), headers)
answer = json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"]
reached = []
for target in (("127.0.0.1", int(port)), ("1.1.1.1", 443)):
    try:
        socket.create_connection(target, 2).close()
        reached.append(target)
    except OSError:
        pass
findings = {"answer": answer, "reached": len(reached), "private": os.path.exists(private), "processes": sum(
    name.isdigit() for name in os.listdir("/proc"))}
with open("findings.json", "w") as file:
    json.dump(findings, file)
"""
MODULE = """
import json

import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["BoxedTaskset", "BoxedHarness"]


class BoxedConfig(vf.HarnessConfig):
    pass


class BoxedHarness(vf.Harness[BoxedConfig]):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        arguments = [endpoint, secret, "{port}", "{private}"]
        return await runtime.run_program(["python3", "-I", "-c", {program!r}, *arguments], {{}})


class BoxedTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def odd(self, trace, runtime) -> float:
        findings = json.loads(await runtime.read("findings.json"))
        for name in ("reached", "private", "processes"):
            trace.record_metric(name, float(findings[name]))
        return float(len(findings["answer"]) % 2)


class BoxedTaskset(vf.Taskset[BoxedTask, vf.TasksetConfig]):
    def load(self):
        for number in range(8):
            yield BoxedTask(vf.TaskData(name=f"boxed-{{number}}", prompt=f"{{number}}"), self.config.task)
"""


def write(directory: Path, *, port: int, private: Path) -> str:
    """``port`` has a listener, and ``private`` is a file, of this machine."""
    (directory / "tiny_boxed.py").write_text(MODULE.format(program=PROGRAM, port=port, private=private))
    return "tiny_boxed"
