from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agl_slime.buffer.instance_ids import assign_instance_ids
from agl_slime.cli.main import main
from agl_slime.errors import ConfigError
from agl_slime.loop.tasks import read_tasks


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_lines_without_an_id_get_a_unique_one(tmp_path):
    file = write(
        tmp_path / "data.jsonl",
        {"prompt": "1+1"},
        {"instance_id": "instance_2", "prompt": "kept"},
        {"instance_id": None, "prompt": "2+2"},
    )
    output, lines, assigned = assign_instance_ids(input=file)
    assert (output.name, lines, assigned) == ("data_instance_id.jsonl", 3, 2)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["instance_id"] for row in rows] == ["instance_0", "instance_2", "instance_2_"]
    assert [row["prompt"] for row in rows] == ["1+1", "kept", "2+2"]


def test_a_second_run_changes_nothing(tmp_path):
    file = write(tmp_path / "data.jsonl", {"a": 1}, {"a": 2})
    first, _, _ = assign_instance_ids(input=file)
    second, _, assigned = assign_instance_ids(input=first, output=tmp_path / "again.jsonl")
    assert assigned == 0
    assert second.read_bytes() == first.read_bytes()


def test_odd_json_values_are_unchanged(tmp_path):
    file = tmp_path / "data.jsonl"
    lines = [r'{"big":123456789012345678901234567890,"half":"x\ud83d"}', '{"n":NaN,"high":1e999,"é":"ü"}']
    file.write_text("\n".join(lines), encoding="utf-8")
    output, _, _ = assign_instance_ids(input=file)
    first, second = read_tasks(output)
    assert first == {"instance_id": "instance_0", "big": 123456789012345678901234567890, "half": "x\ud83d"}
    assert math.isnan(second.pop("n"))
    assert second == {"instance_id": "instance_1", "high": math.inf, "é": "ü"}
    assert '"é":"ü"' in output.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: expected an object"),
        ('{"instance_id": 1}\n{"instance_id": "1"}', "instance_id '1'"),
    ],
)
def test_a_file_that_cannot_be_used_leaves_nothing_behind(tmp_path, text, message):
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        assign_instance_ids(input=file)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def test_command_reports_its_counts(tmp_path, capsys):
    file = write(tmp_path / "data.jsonl", {"a": 1})
    assert main(["assign-instance-id", "--input", str(file)]) == 0
    assert "1 lines, 1 got an instance_id" in capsys.readouterr().out
    assert main(["assign-instance-id", "--input", str(tmp_path / "missing.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
