"""Our data source under slime's own rollout functions: the default, which generates and aborts, and fully-async.

python -m tests.programs.slime.default_rollout DIRECTORY
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from agl_slime import AGLDataSource
from agl_slime.engine.process import EmbeddedEngine
from tests.harness.routers import sglang_router
from tests.harness.slime_programs import report
from tests.harness.slime_source import counts_of
from tests.programs.slime.common import as_flags, make_policy, sizes, slime_args, write_tasks

GROUPS, SIZE, BATCHES = 4, 4, 3


def main(directory: Path) -> None:
    model = make_policy(directory)
    with EmbeddedEngine(model) as engine, sglang_router([engine.url]) as router:
        flags = sizes(steps=BATCHES, groups=GROUPS, size=SIZE)
        flags |= {"rollout-external-engine-addrs": engine.url.removeprefix("http://")}
        flags |= {"sglang-router-ip": "127.0.0.1", "sglang-router-port": router.rpartition(":")[2]}
        flags |= {"rollout-function-path": "slime.rollout.sglang_rollout.generate_rollout"}
        config = {
            "agl_agent": "agl_slime.cli.demo.agent:LookupAgent",
            "agl_tasks": str(write_tasks(directory / "tasks.jsonl", 200)),
            "agl_get_timeout_s": 60,
        }
        args = slime_args(as_flags(flags), model=model, config=config, directory=directory)
        report({"default": run_default(args), "fully_async": run_fully_async(args)})


def run_default(args: Any) -> dict[str, Any]:
    from slime.rollout.sglang_rollout import generate_rollout
    from slime.utils.http_utils import init_http_client

    init_http_client(args)
    with AGLDataSource(args) as source:
        batches = [generate_rollout(args, step, source).samples for step in range(BATCHES)]
        return judge(batches, source)


def run_fully_async(args: Any) -> dict[str, Any]:
    module = importlib.import_module("slime.rollout.fully_async_rollout")
    args.rollout_function_path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
    with AGLDataSource(args) as source:
        batches = []
        for step in range(BATCHES):
            output = module.generate_rollout_fully_async(args, step, source)
            batches.append(getattr(output, "samples", output))
        stop = getattr(module, "_stop_global_worker", None) or module.stop_global_worker
        stop()
        return judge(batches, source)


def judge(batches: list[Any], source: AGLDataSource) -> dict[str, Any]:
    counts_of(source)  # they add up
    groups = [group for batch in batches for group in batch]
    samples = [sample for group in groups for sample in group]
    names = {sample.metadata["agl_rollout_id"] for sample in samples}
    indices = {sample.index for sample in samples}
    return {
        "groups": [len(batch) for batch in batches],
        "sizes": sorted({len(group) for group in groups}),
        "statuses": sorted({sample.status.value for sample in samples}),
        "distinct": len(names) == len(indices) == len(samples) and None not in indices,
        "rewards_set": all(sample.reward is not None for sample in samples),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
