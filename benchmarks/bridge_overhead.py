"""Bridge overhead: samples per second through the whole bridge beside slime's own ``generate_rollout``, on the same
scripted engine and prompts.

    python -m benchmarks.bridge_overhead [--quick] [--slime-dir DIR --slime-python PYTHON]

Each step makes ``--groups`` groups of 8 samples and waits for all of them, as slime's synchronous training does. Ours
goes through everything: enqueue, store, runner, agent, HTTP, spans, conversion, ``get_samples``. slime's is its default
rollout function with a free reward. Both render no templates but their own, and tokenize every prompt. Once with an
engine that answers at once, where only the costs of the two are left, and once with 0.5 s per answer.

slime's row needs a checkout of slime (``--slime-dir`` or ``SLIME_DIR``) and a Python that can import it; SGLang and
Megatron need not be there. Takes about 2 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.common import (
    REPO,
    console,
    llm_resources,
    load,
    print_table,
    question_agent,
    quiet,
    requests,
    scripted_engine,
    tokenizer,
)

_GROUP = 8
_WARM_STEPS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--groups", type=int, default=64, help="groups of 8 per step")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slime-dir", type=Path, default=os.environ.get("SLIME_DIR"))
    parser.add_argument(
        "--slime-python", default=sys.executable, help="a Python with slime's dependencies; runs both, if given"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    steps = 6 if options.quick else options.steps
    if options.case:
        quiet()
        case = {"ours": ours, "slime": slimes}[options.case]
        print(json.dumps(case(options.engine, options.tokenizer, options.groups, options.steps)))
        return 0

    rows = []
    with tempfile.TemporaryDirectory() as directory:
        tokenizer().save_pretrained(directory)
        for latency in (0.0, 0.5):
            found = {}
            for name in ("ours", "slime") if options.slime_dir else ("ours",):
                with scripted_engine(latency_s=latency) as engine:
                    found[name] = run_case(name, engine, directory, steps, options)
            for name, result in found.items():
                ideal = f"{result['rate'] * latency / (options.groups * _GROUP):.0%}" if latency else "-"
                against = f"{found['ours']['rate'] / result['rate']:.2f}" if name == "slime" else "1.00"
                label = "agl-slime, whole bridge" if name == "ours" else "slime's generate_rollout"
                rows.append(
                    [
                        f"{label}, engine {latency:g} s",
                        f"{result['rate']:.0f}",
                        f"{result['cpu_ms']:.2f}",
                        ideal,
                        against,
                        f"{result['load']:.1f}",
                    ]
                )
    notes = [] if options.slime_dir else ["slime's own rows are missing: give --slime-dir and --slime-python."]
    columns = ["", "samples/s", "CPU ms per sample", "of ideal", "agl-slime / this", "load"]
    print_table(
        f"Bridge overhead: {options.groups} groups of {_GROUP} per step, {steps} steps", columns, rows, notes=notes
    )
    return 0


def run_case(name: str, engine: str, directory: str, steps: int, options: Namespace) -> dict[str, Any]:
    console.print(f"{name} … ({load()})", highlight=False)
    paths = [str(REPO)]
    if options.slime_dir:
        paths = [str(REPO), str(Path(options.slime_dir).resolve()), str(REPO / "agl_slime/tools/rehearse/standins")]
    command = [
        options.slime_python,
        "-m",
        "benchmarks.bridge_overhead",
        "--case",
        name,
        "--engine",
        engine,
        "--tokenizer",
        directory,
    ]
    command += ["--groups", str(options.groups), "--steps", str(steps)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def ours(engine: str, _: str, groups: int, steps: int) -> dict[str, Any]:
    return asyncio.run(run_ours(engine, groups, steps))


async def run_ours(engine: str, groups: int, steps: int) -> dict[str, Any]:
    from agl_slime import AGLDataSource
    from agl_slime.data.source import DataSourceSettings
    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore

    configure_worker_process()  # as the command line does
    store = BridgeStore()
    await store.add_resources(llm_resources(engine))
    with (
        AGLDataSource(
            store=store,
            tokenizer=tokenizer(),
            n_samples_per_prompt=_GROUP,
            settings=DataSourceSettings(get_timeout_s=600),
        ) as source,
        RunnerThread(agent=question_agent(), store=store, settings=RunnerSettings(max_concurrent=4_096)) as runner,
    ):

        async def step(number: int) -> None:
            batch = requests(groups * _GROUP, group_size=_GROUP)
            for request in batch:
                request.metadata["group_id"] = f"{number}-{request.metadata['group_id']}"
            await store.enqueue_many_rollouts(batch)
            runner.wake()
            taken = await asyncio.to_thread(source.get_samples, groups)
            assert len(taken) == groups
            assert all(len(group) == _GROUP for group in taken)

        for number in range(_WARM_STEPS):
            await step(number)
        began, cpu = time.monotonic(), time.process_time()
        for number in range(_WARM_STEPS, _WARM_STEPS + steps):
            await step(number)
        return result(groups * _GROUP * steps, began, cpu)


def slimes(engine: str, directory: str, groups: int, steps: int) -> dict[str, Any]:
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.http_utils import init_http_client
    from slime.utils.types import Sample

    host, port = engine.removeprefix("http://").split(":")
    args = Namespace(
        sglang_router_ip=host,
        sglang_router_port=int(port),
        hf_checkpoint=directory,
        sglang_server_concurrency=4_096,
        sglang_dp_size=1,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        rollout_num_engines=1,
        use_distributed_post=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=64,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=False,
        rollout_seed=0,
        rollout_global_dataset=True,
        rollout_batch_size=groups,
        over_sampling_batch_size=groups,
        n_samples_per_prompt=_GROUP,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        group_rm=False,
        custom_generate_function_path=None,
        custom_rm_path="benchmarks.bridge_overhead.free_reward",
        rm_type=None,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        use_rollout_routing_replay=False,
        sglang_speculative_algorithm=None,
        ci_test=False,
    )
    init_http_client(args)
    made = tokenizer()

    class Source:
        """The same prompts as ours, rendered when they are asked for, as slime's data set does when it is loaded."""

        def __init__(self) -> None:
            self.index = 0

        def get_samples(self, count: int) -> list[list[Any]]:
            found = []
            for n in range(count):
                messages = [{"role": "user", "content": f"question number {n}: what is {n} plus {n + 1}?"}]
                prompt = made.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                group = [
                    Sample(index=self.index + m, group_index=self.index // _GROUP, prompt=prompt) for m in range(_GROUP)
                ]
                self.index += _GROUP
                found.append(group)
            return found

        def add_samples(self, samples: Any) -> None:
            raise AssertionError("nothing is given back")

    source = Source()

    def step(number: int) -> None:
        output = generate_rollout(args, number, source)
        assert len(output.samples) == groups
        assert all(
            sample.rollout_log_probs is not None and sample.reward == 1.0
            for group in output.samples
            for sample in group
        )

    for number in range(_WARM_STEPS):
        step(number)
    began, cpu = time.monotonic(), time.process_time()
    for number in range(_WARM_STEPS, _WARM_STEPS + steps):
        step(number)
    return result(groups * _GROUP * steps, began, cpu)


async def free_reward(args: Any, sample: Any) -> float:
    return 1.0


def result(samples: int, began: float, cpu: float) -> dict[str, Any]:
    wall = time.monotonic() - began
    return {"rate": samples / wall, "cpu_ms": 1e3 * (time.process_time() - cpu) / samples, "load": os.getloadavg()[0]}


if __name__ == "__main__":
    sys.exit(main())
