"""slime's own reader of data sets beside ours, on the same files.

python -m tests.programs.slime.prompt_data DIRECTORY
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.utils.data import Dataset

from agl_slime.train.slime.args import prompt_data
from tests.harness.slime_programs import report


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


if __name__ == "__main__":
    cases = json.loads((Path(sys.argv[1]) / "cases.json").read_text())
    report({"rows": [{"slime": of_slime(path, keys), "ours": of_ours(path, keys)} for path, keys in cases]})
