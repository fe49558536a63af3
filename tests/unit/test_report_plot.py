"""reward.png: what is drawn, when, and what happens without matplotlib."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from agl_slime.cli import main
from agl_slime.errors import MissingDependencyError
from agl_slime.events import IterationFinished, MetricValue, RunFinished
from agl_slime.report import RewardPlot, plot_metrics
from tests.unit.report_cases import hide, write_rows


def colours(image: Path) -> dict[tuple[int, ...], int]:
    pillow = pytest.importorskip("PIL.Image")
    with pillow.open(image) as opened:
        picture = opened.convert("RGB")
        assert picture.size[0] == 1200
        assert picture.size[1] in (585, 780)
        return {colour: count for count, colour in picture.getcolors(maxcolors=1 << 16)}


def test_the_image_shows_reward_validation_and_health(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_rows(tmp_path / "metrics.jsonl")
    assert plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    found = colours(tmp_path / "reward.png")
    assert found[(0x21, 0x66, 0xAC)] > 2000  # the reward line
    assert found[(0x7B, 0x6C, 0xA8)] > 300  # the panel below
    assert (0xD6, 0x60, 0x4D) not in found  # no validation was run
    write_rows(tmp_path / "metrics.jsonl", metrics={"val/reward_mean": 0.5})
    assert plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    assert colours(tmp_path / "reward.png")[(0xD6, 0x60, 0x4D)] > 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "reward.png"]


@pytest.mark.parametrize(
    "metrics",
    [
        {"rollout/reward_std": None},
        {"train/logprob_diff_max": 0.0, "rollout/response_tokens_mean": 20},
        {"train/logprob_diff_max": None},
        {"rollout/reward_std": None, "rollout/reward_min": None},
        {"rollout/reward_mean": None, "val/reward_mean": 0.3},
        {"val/start_reward_mean": 0.3, "train/logprob_diff_max": 1.0},
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_whatever_metrics_there_are_can_be_drawn(tmp_path: Path, metrics: dict[str, MetricValue], count: int) -> None:
    pytest.importorskip("matplotlib")
    write_rows(tmp_path / "metrics.jsonl", count, metrics)
    assert plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    assert len(colours(tmp_path / "reward.png")) > 50


def test_without_a_reward_nothing_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_rows(tmp_path / "metrics.jsonl", 2, {"rollout/reward_mean": None})
    assert not plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    assert not (tmp_path / "reward.png").exists()


def test_plot_is_redrawn_rarely_and_for_a_small_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[int] = []
    monkeypatch.setattr("agl_slime.report.plot.plot_metrics", lambda *args, **kwargs: drawn.append(1))
    clock = [1000.0]
    monkeypatch.setattr("agl_slime.report.plot.time.monotonic", lambda: clock[0])
    (tmp_path / "metrics.jsonl").touch()
    plot = RewardPlot(metrics_path=tmp_path / "metrics.jsonl", image_path=tmp_path / "reward.png")

    def after(iteration: int, cost: float = 0.0) -> int:
        monkeypatch.setattr(
            "agl_slime.report.plot.plot_metrics",
            lambda *args, **kwargs: (drawn.append(1), clock.__setitem__(0, clock[0] + cost)),
        )
        plot.handle(IterationFinished(iteration=iteration, metrics={}))
        if plot._thread is not None:
            plot._thread.join(10)
        return len(drawn)

    assert [after(9), after(10, cost=2.0), after(11), after(20)] == [
        0,
        1,
        1,
        1,
    ]  # two seconds of drawing: no other within forty
    clock[0] += 39.0
    assert after(30) == 1
    clock[0] += 2.0
    assert after(40) == 2
    plot.handle(RunFinished())
    assert len(drawn) == 3


def test_a_missing_matplotlib_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "matplotlib")
    write_rows(tmp_path / "metrics.jsonl", 2)
    with pytest.raises(MissingDependencyError, match=r'pip install "agl-slime\[local\]"'):
        plot_metrics(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
    plot = RewardPlot(metrics_path=tmp_path / "metrics.jsonl", image_path=tmp_path / "reward.png")
    plot.handle(RunFinished())
    assert plot.note == 'matplotlib is not installed; pip install "agl-slime[local]" draws reward.png as well.'


def test_what_was_not_drawn_in_time_is_drawn_by_the_command_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # fault 33
    pytest.importorskip("matplotlib")
    write_rows(tmp_path / "metrics.jsonl")
    monkeypatch.setattr("agl_slime.report.plot.INTERRUPTED_TIMEOUT_S", 0.01)
    plot = RewardPlot(metrics_path=tmp_path / "metrics.jsonl", image_path=tmp_path / "reward.png")
    busy = threading.Event()
    monkeypatch.setattr(plot, "_draw", busy.wait)
    plot.handle(RunFinished(reason="interrupted"))
    busy.set()
    _, _, command = plot.note.partition("agl-slime ")
    assert not (tmp_path / "reward.png").exists()
    assert main(command.removesuffix(" draws it").split()) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'reward.png'}\n"
    assert len(colours(tmp_path / "reward.png")) > 50


@pytest.mark.parametrize("rows", [None, 2])
def test_a_run_without_anything_to_draw_is_named(
    tmp_path: Path, rows: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    if rows is not None:
        write_rows(tmp_path / "metrics.jsonl", rows, {"rollout/reward_mean": None})
    assert main(["plot", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert str(tmp_path) in said.replace("\n", "")
