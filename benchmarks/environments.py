"""Episodes of a light environment of verifiers at once in one process: its own evaluation, and the worker for a run.

    AGL_ENV_PYTHON=DIR/bin/python python -m benchmarks.environments [--episodes 256] [--programs 32]

Both play the same tasks with the same scripted answers over HTTP. `own`: verifiers' episodes in one asyncio process.
`worker`: the same through the gateway, with tokens kept, from the first rollout that is begun to the last end.
`own, a client each`: with a configuration of the client for every rollout, as verifiers' own settings would have it
where each rollout has an address; the worker keeps one set of connections for all of them.
`own, no second hop`: with a client that answers in its process, for nothing: no client of ours could be quicker.
`programs`: as many episodes at once, each a program in a sandbox of its own that asks the model once; `own` with the
same sandboxes lent to verifiers' agents.
Start-up (imports, tasks) is not included. Memory and CPU are of the process of episodes: its peak, and its CPU time
with ended programs; in `own` the scripted model is in that process, with the worker it is with the gateway.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from agl_slime.environments.environment import load_environment
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from tests.harness.gateway import TEMPLATE
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.programs.environments import boxed, tiny

_OWN = """
import asyncio, json, os, resource, sys, time
import httpx
import verifiers.v1 as vf
import verifiers.v1.clients.eval
from agl_slime.environments.runtimes.layout import BubblewrapConfig
from agl_slime.environments.runtimes.lending import lend_boxes
from verifiers.v1.clients.eval import EvalClient
from tests.programs.environments import tiny
from tests.programs.environments.model import serving
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment, resolve_env_config
class NoHop(EvalClient):
    async def _request(self, url, body, headers, *, stream=False):
        message = {"role": "assistant", "content": tiny.answer(body["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        found = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return httpx.Response(200, json={**found, "usage": usage})
async def main(count):
    if sys.argv[2] == "none":
        verifiers.v1.clients.eval.EvalClient = NoHop
    os.environ["SCRIPTED_KEY"] = "none"
    name = sys.argv[3]
    env = load_environment(resolve_env_config({"taskset": {"id": name}}))
    if name != "tiny_sums":
        env.config.agent.runtime = vf.SubprocessConfig()
        lend_boxes(env, {"agent": BubblewrapConfig(memory=0.25)})
    tasks = list(env.taskset)
    def says(body):
        return tiny.answer(body["messages"][-1]["content"]) if name == "tiny_sums" else "two"
    async with env.serving(), serving(says) as (address, _):
        def ctx(n):
            headers = {"X-Number": str(n)} if sys.argv[2] == "each" else {}
            client = EvalClientConfig(base_url=address, api_key_var="SCRIPTED_KEY", headers=headers)
            return ModelContext(model="scripted", client=client)
        began, cpu = time.monotonic(), sum(os.times()[:4])
        done = await asyncio.gather(*(env.run_episode(tasks[n % len(tasks)], ctx(n)) for n in range(count)))
        took, cpu = time.monotonic() - began, sum(os.times()[:4]) - cpu
    assert name == "tiny_sums" or all(episode.ok for episode in done)
    print(json.dumps([took, cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]), file=out)
out, sys.stdout = sys.stdout, sys.stderr
asyncio.run(main(int(sys.argv[1])))
"""


class Most:
    """Peak memory in MB of processes whose command has a word, and their CPU seconds, including ended children."""

    def __init__(self, word: str) -> None:
        self._word, self.memory, self.cpu = word, 0.0, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Most:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            self.look()

    def look(self) -> float:
        for process in psutil.Process().children(recursive=True):
            try:
                command = process.cmdline()
                if self._word in command and "-P" in command[:2]:
                    self.memory = max(self.memory, process.memory_info().rss / 2**20)
                    self.cpu = sum(process.cpu_times()[:4])
            except psutil.Error:
                continue
        return self.cpu


def own(count: int, clients: str, name: str) -> list[float]:
    command = [os.environ["AGL_ENV_PYTHON"], "-c", _OWN, str(count), clients, name]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def through_worker(
    episodes: int, log: Path, model: Path, name: str = "tiny_sums", arguments: tuple[str, ...] = ()
) -> tuple[float, float, float]:
    def answer(prompt: str) -> str:
        return tiny.answer(prompt) if name == "tiny_sums" else "two"

    tokenizer: Any = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(model)
    begun: dict[int, tuple[list[int], int]] = {}

    def next_id(ids: Any) -> int:
        said, at = begun.pop(hash(tuple(ids)), ([], 0))
        said = said or [*tokenizer.encode(answer(tokenizer.decode(list(ids)))), tokenizer.eos_token_id]
        begun[hash((*ids, said[at]))] = (said, at + 1)
        return said[at]

    def decode(ids: Any) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    engine = ScriptedEngine(vocab_size=len(tokenizer), eos_id=tokenizer.eos_token_id, decode=decode, next_id=next_id)
    env = load_environment(name, arguments=arguments, validate=False)
    with in_thread(engine) as served, Most("work") as most:
        store = BridgeStore()
        llm = LLM(endpoint=served.url, model=str(model), sampling_parameters={"temperature": 1.0, "max_new_tokens": 64})
        run_blocking(store.add_resources({"main_llm": llm}))
        ends: list[float] = []
        store.subscribe_finished(lambda _: ends.append(time.monotonic()))
        with ControllerPool(plan=env.plan(log=log), store=store):
            first = run_blocking(store.enqueue_rollout(input=env.tasks[0], mode="train"))  # the worker has started
            run_blocking(store.wait_for_rollouts(rollout_ids=[first.rollout_id], timeout=300))
            cpu, began, ids = most.look(), time.monotonic(), []
            for number in range(episodes):
                task = env.tasks[number % len(env.tasks)]
                ids.append(run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id)
            ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=600))
            assert len(ended) == episodes, log.read_text()
            return max(ends) - began, most.look() - cpu, most.memory


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--programs", type=int, default=0)
    args = parser.parse_args()
    episodes = args.episodes
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny.write(directory)
        os.environ["PYTHONPATH"] = os.pathsep.join((str(directory), str(Path(__file__).parents[1])))
        os.environ["XDG_CACHE_HOME"] = name  # where programs are installed
        rows = []
        for label, clients in (("own", "one"), ("own, a client each", "each"), ("own, no second hop", "none")):
            rows.append((label, *own(episodes, clients, "tiny_sums")))
        rows.append(("worker", *through_worker(episodes, directory / "log", directory / "model")))
        if args.programs:
            module = boxed.write(directory, port=9, private=directory / "private")
            runtime = ("--env.agent.runtime.type", "bubblewrap", "--env.agent.runtime.memory", "0.25")
            rows.append((f"own, {args.programs} programs", *own(args.programs, "one", module)))
            took = through_worker(args.programs, directory / "log", directory / "model", module, runtime)
            rows.append((f"worker, {args.programs} programs", *took))
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {episodes} episodes at once")
    print(f"{'':<24}{'s':>8}{'episodes/s':>12}{'CPU s':>8}{'MB':>8}")
    for label, seconds, cpu, memory in rows:
        count = args.programs if label.endswith("programs") else episodes
        print(f"{label:<24}{seconds:>8.2f}{count / seconds:>12.1f}{cpu:>8.2f}{memory:>8.0f}")


if __name__ == "__main__":
    main()
