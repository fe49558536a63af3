"""slime's own reader of data sets and ours give the same prompts, labels and tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.gateway import WEATHER
from tests.harness.slime_programs import require_slime, run_program
from tests.train.slime.test_prompt_data import QUESTION, URI, jsonl, parquet


@pytest.mark.slime
def test_rows_are_as_slime_reads_them(tmp_path: Path):
    root = require_slime("ray", "torch", "transformers", "sglang_router", "pyarrow")
    rows = [
        {"prompt": QUESTION, "label": str(n), "tools": json.dumps([WEATHER]), "metadata": {"n": n}} for n in range(9)
    ]
    text = [{"question": f"{n}?", "answer": {"target": [n]}, "extra": None} for n in range(9)]
    figures = [{"problem": "<image>Find x in <image>.", "images": [URI, URI]}]
    keys: dict[str, dict[str, Any]] = {
        "rows": {"input_key": "prompt", "label_key": "label"},
        "text": {"input_key": "question", "label_key": "answer"},
        "figures": {"input_key": "problem", "multimodal_keys": {"image": "images"}},
    }
    slices = {"rows": ("", "@[0:3]", "@[4:]", "@[-2:]", "@[:-8]"), "text": ("", "@[1:2]"), "figures": ("",)}
    cases = []
    for name, content in (("rows", rows), ("text", text), ("figures", figures)):
        files = [write(tmp_path / f"{name}.{write.__name__}", *content) for write in (jsonl, parquet)]
        cases += [(f"{file}{part}", keys[name]) for file in files for part in slices[name]]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    result = run_program(root, "prompt_data", tmp_path, timeout_s=180)
    assert len(result["rows"]) == len(cases)
    for (path, _), row in zip(cases, result["rows"], strict=True):
        assert row["ours"] == row["slime"], path
        assert row["ours"], path
