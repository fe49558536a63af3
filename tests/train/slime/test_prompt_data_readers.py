"""slime's own reader of data sets and ours give the same prompts, labels and tools, its evaluation the same samples."""

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
    own = {"repetition_penalty": 1.1, "skip_special_tokens": True, "no_stop_trim": True, "min_new_tokens": 2}
    own |= {"metadata_overrides": {"n": 70, "level": "x"}, "top_k": 9, "max_response_len": 5, "stop_token_ids": [3]}
    file, more = {"path": f"{tmp_path}/rows.jsonl", "input_key": "prompt"}, {"n_samples_per_eval_prompt": 2}
    sets = [{"name": "own", **file, **own, **more}, {"name": "none", **file, "no_stop_trim": True, "temperature": 0.5}]
    (tmp_path / "cases.json").write_text(json.dumps({"rows": cases, "sets": sets}))
    result = run_program(root, "prompt_data", tmp_path, timeout_s=180)
    assert len(result["rows"]) == len(cases)
    for (path, _), row in zip(cases, result["rows"], strict=True):
        assert row["ours"] == row["slime"], path
        assert row["ours"], path
    assert result["unread"] == ["apply_chat_template"]  # refused where it is off
    rollouts = [
        [index, {name: task[name] for name in ("n", "level", "tools") if name in task}, sampling]
        for tasks, samples, sampling in result["evaluated"]["ours"]
        for index, task in enumerate(task for task in tasks for _ in range(samples))
    ]
    assert len(rollouts) == 27
    for sample, rollout in zip(result["evaluated"]["slime"], rollouts, strict=True):
        sampling = {name: value for name, value in sample.pop().items() if value not in (None, False)}
        assert [*sample, sampling] == rollout
