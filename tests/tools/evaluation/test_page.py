"""The page of an evaluation: its figures, its changes, and no markup from a model."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import ConfigError
from agl_slime.report.evaluation.page import write_eval_page
from agl_slime.report.evaluation.statistics import compare, sum_up
from agl_slime.report.files import dump
from tests.harness.browser import opened

HOSTILE = '</pre></details><script>alert(1)</script><img src=x onerror=alert(2)> & "quoted" \ud800'


def evaluation(directory: Path, *models: list[float | None], text: str = "words") -> None:
    """Files as ``agl-slime eval`` leaves them, a sample of each task."""
    directory.mkdir(exist_ok=True)
    rewards = [{task: [] if reward is None else [reward] for task, reward in enumerate(row)} for row in models]
    summaries: list[dict[str, Any]] = []
    for number, row in enumerate(models, 1):
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": f"{text} {number}"}]
        lines = [
            {"iteration": task + 1, "task": task, "sample": 0, "reward": reward, "messages": chat}
            | {"failure": "TimeoutError" if reward is None else None, "message": text if reward is None else ""}
            for task, reward in enumerate(row)
        ]
        (directory / f"samples-{number}.jsonl").write_bytes(b"".join(map(dump, lines)))
        about = {"model": f"/runs/{text}/model-{number}", "samples": len(row), "failed": row.count(None)}
        summaries.append({**about, "failures": {}, **sum_up(rewards[number - 1], limit=1.0, k=1)})
    tasks = [{"question": text, "n": n} for n in range(len(models[0]))]
    (directory / "tasks.jsonl").write_bytes(b"".join(map(dump, tasks)))
    report = {"tasks": len(tasks), "k": 1, "settings": {"agent": f"a:{text}"}, "models": summaries}
    if len(models) == 2:
        report["difference"] = compare(*rewards, limit=1.0)
    (directory / "eval.json").write_bytes(dump(report))


class Outline:
    """The headings with the tasks below each, every element's name, and all text."""

    def __init__(self, page: str) -> None:
        body = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
        self.elements = {*re.findall(r"<(\w+)", body)}
        self.text = html.unescape(re.sub(r"<[^>]*>", "", body))
        self.sections = {
            html.unescape(section.partition("</h2>")[0]): re.findall(r'<details[^>]* id="([^"]*)"', section)
            for section in re.split(r"<h2[^>]*>", body)[1:]
        }


def test_tasks_that_changed_come_first_with_the_conversations_of_both(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", [0.0, 1.0, 1.0, None], [1.0, 0.0, 1.0, 1.0])
    page = Outline(write_eval_page(tmp_path / "e").read_text())
    assert page.sections == {
        "From wrong to right: 1": ["task-0"],
        "From right to wrong: 1": ["task-1"],
        "The other tasks: 2": ["task-2", "task-3"],
    }
    assert "Task 0: 0 → 1" in page.text
    assert "Task 3: TimeoutError → 1" in page.text
    assert page.text.index("words 1") < page.text.index("words 2") < page.text.index("Task 1:")
    assert "difference on the same tasks" in page.text


def test_a_model_at_an_address_has_a_name_and_a_single_model_its_tasks(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", [0.0, 0.0], [1.0, 1.0])
    file = tmp_path / "e" / "eval.json"
    file.write_text(file.read_text().replace("/runs/words/model-1", "stub at http://127.0.0.1:1/v1"))
    assert "stub at http://127.0.0.1:1/v1 and model-2" in Outline(write_eval_page(tmp_path / "e").read_text()).text
    evaluation(tmp_path / "single", [0.0, 1.0])
    assert Outline(write_eval_page(tmp_path / "single").read_text()).sections == {"Tasks: 2": ["task-0", "task-1"]}


def test_model_output_is_never_markup(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", [0.0, None], [1.0, None], text=HOSTILE)
    text = write_eval_page(tmp_path / "e").read_text()
    page = Outline(text)
    assert not page.elements & {"script", "img", "iframe", "object", "link"}
    assert page.text.count("<script>alert(1)</script>") >= 8
    assert "script-src" not in text
    assert "default-src 'none'" in text


def test_large_evaluation_names_the_number_of_tasks_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.report.evaluation.page.MOST_BYTES", 40_000)
    evaluation(tmp_path / "e", [0.0] * 60, [1.0] * 60, text="x" * 300)
    page = write_eval_page(tmp_path / "e")
    outline = Outline(page.read_text())
    n_tasks = sum(map(len, outline.sections.values()))
    assert 0 < n_tasks < 60
    assert f"{60 - n_tasks} tasks are left out" in outline.text
    assert page.stat().st_size < 45_000


_NAMES = st.sampled_from(["models", "tasks", "settings", "difference", "model", "k"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=12,
)


@given(_VALUES)
def test_another_file_of_that_name_is_one_sentence(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    directory = tmp_path_factory.mktemp("e")
    (directory / "eval.json").write_bytes(dump(value))
    with pytest.raises(ConfigError, match=r"eval\.json is not as agl-slime eval writes it|there is no|no such"):
        write_eval_page(directory)


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_as_wide_as_the_screen(page: Any, tmp_path: Path, width: int) -> None:
    evaluation(tmp_path / "e", [0.0, 1.0, 0.5, None], [1.0, 0.0, 0.25, 1.0])
    page.set_viewport_size({"width": width, "height": 800})
    opened(page, write_eval_page(tmp_path / "e"))
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.click("summary >> nth=0")
    assert page.evaluate("document.documentElement.scrollWidth") == width
