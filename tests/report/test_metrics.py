"""metrics.jsonl after a kill, a NaN and a resume."""

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.events import IterationFinished, MetricValue
from agl_slime.metric_names import REQUIRED_KEYS
from agl_slime.report import MetricsWriter, read_metrics
from agl_slime.report.files import cut
from agl_slime.report.records import broken_lines
from tests.report.cases import METRICS


def write(
    path: Path,
    *iterations: int,
    warnings: list[tuple[str, str]] | None = None,
    metrics: Mapping[str, MetricValue] | None = None,
) -> None:
    heard = [] if warnings is None else warnings
    writer = MetricsWriter(path, warn=lambda text, key: heard.append((text, key)))
    for iteration in iterations:
        writer.handle(IterationFinished(iteration=iteration, metrics={**METRICS, **(metrics or {})}))
    writer.close()


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_one_valid_object_per_iteration_with_the_required_keys(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, 1, 2, 3)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[0]) == {"iteration": 1, **METRICS, "crc": zlib.crc32(lines[0].split(', "crc"')[0].encode())}
    content = path.read_bytes()
    writer = MetricsWriter(path, warn=lambda text, key: None)
    assert path.read_bytes() == content  # opening changes nothing
    writer.handle(IterationFinished(iteration=4, metrics={"val/reward_mean": 0.25}))
    writer.close()
    assert read_metrics(path)[-1] == {"iteration": 4, "val/reward_mean": 0.25, **dict.fromkeys(REQUIRED_KEYS)}


def test_values_are_plain_numbers_or_null_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    scalars = {"train/loss": np.float32(0.5), "rollout/count": np.int64(3), "train/grad_norm": np.array(2.0)}
    write(path, 1, metrics=scalars)
    for value, word in ((math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")):
        warnings: list[tuple[str, str]] = []
        cut(1, path)
        write(path, 7, warnings=warnings, metrics={"train/loss": value})
        text = f"train/loss is {word} in iteration 7; metrics.jsonl has null there."
        assert warnings == [(text, "not_finite:train/loss")]
        first, second = (json.loads(line, parse_constant=reject_constant) for line in path.read_text().splitlines())
        assert second["train/loss"] is None
    assert (first["train/loss"], first["rollout/count"], first["train/grad_norm"]) == (0.5, 3, 2.0)


def test_torn_and_broken_lines_are_read_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert [row["iteration"] for row in read_metrics(path)] == [1]
    write(path, 2, 3)  # after the torn line
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{nothing\n", *lines[2:]]))
    write(path, 4)
    assert [row["iteration"] for row in read_metrics(path)] == [1, 3, 4]
    assert path.read_bytes().splitlines()[1] == b"{nothing"  # stays for people to read
    assert "line 2 is not JSON" in caplog.text


def test_resume_after_a_torn_line_leaves_no_duplicate_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)
    path.write_bytes(path.read_bytes()[:-20])
    cut(2, path)
    write(path, 3, 4, 5, metrics={"train/loss": 9.0})
    losses = {row["iteration"]: row["train/loss"] for row in read_metrics(path)}
    assert losses == {1: -0.012, 2: -0.012, 3: 9.0, 4: 9.0, 5: 9.0}
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.booleans())
def test_the_file_always_holds_each_iteration_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, iterations: list[int], resumed: bool
) -> None:
    """An append that is not after the last one is refused, and only a resume makes room for it."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    expected: list[int] = []
    for iteration in iterations:
        if resumed:
            cut(iteration - 1, path)
            expected = [earlier for earlier in expected if earlier < iteration]
        if expected and iteration <= expected[-1]:
            content = path.read_bytes()
            with pytest.raises(ValueError, match=f"has records of iteration {expected[-1]} already; iteration"):
                write(path, iteration)
            assert path.read_bytes() == content
        else:
            write(path, iteration)
            expected.append(iteration)
    assert [row["iteration"] for row in read_metrics(path)] == expected
    assert [*broken_lines(path)] == []
