"""The page of an evaluation: its figures, what changed, and no word of a model taken for markup."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import ConfigError
from agl_slime.report.evaluation.page import write_eval_page
from agl_slime.report.evaluation.statistics import compare, sum_up
from agl_slime.report.files import dump

HOSTILE = '</pre></details><script>alert(1)</script><img src=x onerror=alert(2)> & "quoted" \ud800'


def evaluation(directory: Path, *models: list[float | None], said: str = "words") -> None:
    """Files as ``agl-slime eval`` leaves them, a sample of each task."""
    directory.mkdir(exist_ok=True)
    rewards = [{task: [] if one is None else [one] for task, one in enumerate(own)} for own in models]
    told: list[dict[str, Any]] = []
    for number, (own, of_tasks) in enumerate(zip(models, rewards, strict=True), 1):
        lines = [
            {
                "iteration": task + 1,
                "task": task,
                "sample": 0,
                "reward": reward,
                "failure": None if reward is not None else "TimeoutError",
                "message": "" if reward is not None else said,
                "messages": [{"role": "user", "content": said}, {"role": "assistant", "content": f"{said} {number}"}],
            }
            for task, reward in enumerate(own)
        ]
        (directory / f"samples-{number}.jsonl").write_bytes(b"".join(map(dump, lines)))
        failed = sum(one is None for one in own)
        about = {"model": f"/runs/{said}/model-{number}", "samples": len(own), "failed": failed, "failures": {}}
        told.append({**about, **sum_up(of_tasks, limit=1.0, k=1)})
    tasks = [{"question": said, "n": n} for n in range(len(models[0]))]
    (directory / "tasks.jsonl").write_bytes(b"".join(map(dump, tasks)))
    found = {"tasks": len(tasks), "k": 1, "settings": {"agent": f"a:{said}"}, "models": told}
    if len(models) == 2:
        found["difference"] = compare(*rewards, limit=1.0)
    (directory / "eval.json").write_bytes(dump(found))


class Outline(HTMLParser):
    """The headings with the tasks below each, every element's name, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: dict[str, list[str]] = {}
        self.elements: set[str] = set()
        self.text = ""
        self._in: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.add(tag)
        self._in.append(tag)
        if tag == "details":
            next(reversed(self.sections.values())).append(dict(attrs)["id"] or "")

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" in self._in:
            return
        self.text += data
        if "h2" in self._in:
            self.sections[data] = []


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


def test_a_difference_has_a_sign_and_a_model_at_an_address_its_name(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", [0.0, 0.0], [1.0, 1.0])
    found = json.loads((tmp_path / "e" / "eval.json").read_text())
    found["models"][0]["model"] = "stub at http://127.0.0.1:1/v1"
    (tmp_path / "e" / "eval.json").write_bytes(dump(found))
    text = Outline(write_eval_page(tmp_path / "e").read_text()).text
    assert "+1.000" in text
    assert "+0.000" not in text
    assert "stub at http://127.0.0.1:1/v1 and model-2" in text
    assert "2 tasks, 1 sample of each." in text


def test_one_models_page_lists_its_tasks(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", [0.0, 1.0])
    assert Outline(write_eval_page(tmp_path / "e").read_text()).sections == {"Tasks: 2": ["task-0", "task-1"]}


def test_model_output_is_never_markup(tmp_path: Path) -> None:
    evaluation(tmp_path / "e", [0.0, None], [1.0, None], said=HOSTILE)
    text = write_eval_page(tmp_path / "e").read_text()
    page = Outline(text)
    assert not page.elements & {"script", "img", "iframe", "object", "link"}
    assert page.text.count("<script>alert(1)</script>") >= 8
    assert "script-src" not in text
    assert "default-src 'none'" in text


def test_large_evaluation_names_the_number_of_tasks_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.report.evaluation.page.MOST_BYTES", 40_000)
    evaluation(tmp_path / "e", [0.0] * 60, [1.0] * 60, said="x" * 300)
    page = write_eval_page(tmp_path / "e")
    shown = Outline(page.read_text())
    kept = sum(map(len, shown.sections.values()))
    assert 0 < kept < 60
    assert f"{60 - kept} tasks are left out" in shown.text
    assert page.stat().st_size < 45_000


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["models", "tasks", "settings", "difference", "model", "k"]), inner, max_size=5
            )
        ),
        max_leaves=12,
    )
)
def test_another_file_of_that_name_is_one_sentence(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    directory = tmp_path_factory.mktemp("e")
    (directory / "eval.json").write_bytes(dump(value))
    with pytest.raises(ConfigError, match=r"eval\.json is not as agl-slime eval writes it|there is no|no such"):
        write_eval_page(directory)
