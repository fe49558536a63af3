"""slime's own reader of data sets beside ours, on the same files, and its evaluation's samples beside our tasks.

python -m tests.programs.slime.prompt_data DIRECTORY
"""

from __future__ import annotations

import asyncio
import json
import sys
from argparse import Namespace
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime.rollout import sglang_rollout
from slime.utils.data import Dataset
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs

from agl_slime.train.slime.args import PluginSettings, prompt_data
from agl_slime.train.slime.flags import EVALUATED, refused_keys
from tests.harness.slime_programs import report
from tests.programs.slime.common import as_flags, make_policy, sizes, slime_args


def of_slime(path: str, keys: dict[str, Any]) -> list[list[Any]]:
    values = {"input_key": "input", "label_key": None, "metadata_key": "metadata", "tool_key": "tools", **keys}
    values["prompt_key"] = values.pop("input_key")
    samples = Dataset(path, None, None, None, **values).samples
    return [[sample.prompt, sample.label, (sample.metadata or {}).get("tools")] for sample in samples]


def of_ours(path: str, keys: dict[str, Any]) -> list[list[Any]]:
    data = prompt_data(Namespace(prompt_data=path, **{"tool_key": "tools", **keys}))
    assert data is not None
    tasks = data.read()
    return [[task.get("prompt"), task.get("label"), task.get("tools")] for task in tasks]


def evaluated(directory: Path, sets: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Metadata and sampling parameters of each sample that slime's evaluation generates, and of our rollouts."""
    samples: list[Any] = []

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool) -> Any:
        samples.append((sample.index, sample.metadata, sampling_params))
        sample.reward, sample.status = 1.0, sample.Status.COMPLETED
        return sample

    flags = sizes(steps=1, groups=1, size=1) | {"rollout-num-gpus": 1, "eval-top-p": 0.9, "rollout-stop": "end"}
    config = {"agl_agent": "agl_slime.cli.demo.agent:LookupAgent"}
    args = slime_args(as_flags(flags), model=make_policy(directory), config=config, directory=directory)
    args.eval_datasets = build_eval_dataset_configs(args, sets, {"temperature": 0.25})
    sglang_rollout.generate_and_rm = generate
    for given in args.eval_datasets:
        asyncio.run(sglang_rollout.eval_rollout_single_dataset(args, 0, given))
    ours = PluginSettings.from_args(args, {}).eval_sets
    return {"slime": samples, "ours": [[one.data.read(), one.samples, one.sampling] for one in ours]}


def unread() -> list[str]:
    """The keys of slime's evaluation data sets that are neither read nor refused, or both."""
    keys = {field.name: {"a": 1} if field.name == "metadata_overrides" else 1 for field in fields(EvalDatasetConfig)}
    sets = {name: EvalDatasetConfig(**{"name": "a", "path": "b", name: value}) for name, value in keys.items()}
    texts = {name: "".join(refused_keys(Namespace(eval_datasets=[one]))) for name, one in sets.items()}
    return [name for name, text in texts.items() if (name in EVALUATED) == (f": {name} " in text)]


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    cases = json.loads((directory / "cases.json").read_text())
    rows = [{"slime": of_slime(path, keys), "ours": of_ours(path, keys)} for path, keys in cases["rows"]]
    report({"rows": rows, "evaluated": evaluated(directory, cases["sets"]), "unread": unread()})
