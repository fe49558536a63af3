"""Damaged run directories: every command ends soon, with a page or with a sentence."""

import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_slime.cli.main import main
from agl_slime.errors import ConfigError
from agl_slime.tools.audit import audit
from agl_slime.tools.pages import file as page
from agl_slime.tools.pages.file import write_report
from tests.harness.examples import examples
from tests.harness.report_runs import write_run

FILES = ("metrics.jsonl", "groups.jsonl", "rollouts.jsonl", "config.json", "summary.json", "running.json")
VALUES: list[Any] = [None, True, -1, 1e308, 10**30, "", "\ud800", "</script>", [], [None], [[1]], {}, {"a": []}]
RAW = (
    b"",
    b"\xff\xfe\n",
    b"[" * 5000 + b"]" * 5000 + b"\n",
    b'{"iteration": 1, "a": ' + b'{"a": ' * 900 + b"1" + b"}" * 901 + b"\n",
    b'{"iteration": 1, "train/loss": NaN, "text": "\\ud800"}\n',
    b'{"iteration": ' + b"9" * 5000 + b"}\n",
    b'{"iteration": 1e999, "rollouts": 5}\n',
    b'{"iteration": true}\n',
    b"\n\n\n",
)


PLACES = [Path.mkdir, lambda path: path.symlink_to(path.name), os.mkfifo]
"""In place of a file: a directory, a loop, a pipe."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole"))


@contextmanager
def ending_soon() -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it still waits after 20 s")

    earlier = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)


@given(
    name=st.sampled_from(FILES),
    damage=st.sampled_from([*PLACES, *RAW]) | st.integers(0, 2**32),
    value=st.sampled_from(VALUES),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_damage_causes_an_internal_error(whole, tmp_path_factory, name, damage, value):
    run = shutil.copytree(whole, tmp_path_factory.mktemp("damaged") / "run")
    path = run / name
    if isinstance(damage, bytes):
        path.write_bytes(damage + (path.read_bytes() if path.exists() else b""))
    elif isinstance(damage, int):
        change_a_field(path, random.Random(damage), value)
    else:
        path.unlink(missing_ok=True)
        damage(path)
    with ending_soon():
        with suppress(ConfigError):  # a sentence, exit code 2
            assert write_report([run]).stat().st_size > 50_000
        with suppress(ConfigError):
            audit(run)


def change_a_field(path: Path, rng: random.Random, value: Any) -> None:
    """Put ``value`` in the place of a field, at any depth, of any of the file's objects."""
    if not path.exists():
        return
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    record = part = json.loads(lines[number])
    while True:
        key = rng.choice(list(part) if isinstance(part, dict) else range(len(part)))
        if not (isinstance(part[key], (dict, list)) and part[key] and rng.random() < 0.7):
            break
        part = part[key]
    part[key] = value
    lines[number] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")


def test_wrong_file_in_place_of_the_metrics_is_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for number, place in enumerate(PLACES):
        run = shutil.copytree(whole, tmp_path / str(number))
        (run / "metrics.jsonl").unlink()
        place(run / "metrics.jsonl")
        with ending_soon():
            assert main(["report", str(run)]) == 0
            assert main(["audit", str(run)]) == 1
    assert main(["report", "/" + "x" * 5000]) == 1
    output = "".join(capsys.readouterr())
    assert "File name too long" in output
    assert "should not happen" not in output


def test_groups_are_left_out_of_a_page_that_would_be_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path)
    line = json.loads((run / "groups.jsonl").read_text().splitlines()[0])
    with (run / "groups.jsonl").open("a") as file:
        for n in range(3000):
            file.write(json.dumps({**line, "iteration": 4 + n // 4, "group_id": f"g{n}"}) + "\n")
    monkeypatch.setattr(page, "MOST_BYTES", 400_000)
    report = write_report([run])
    assert report.stat().st_size <= 400_000
    assert "Groups of some iterations are left out" in report.read_text()
