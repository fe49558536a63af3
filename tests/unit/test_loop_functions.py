"""What the loop passes to a program's functions, and what it takes under old names."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.loop.functions import taking_iteration
from agl_slime.loop.old_names import observer_and_runners
from agl_slime.report.events import GroupsCollected, RunStarted
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import RunnerSettings
from tests.loop_cases import HelloAgent, LoopCase, Recorder, hello_engine


class Steps:
    def method(self, iteration: int) -> Any:
        return iteration

    def __call__(self, step: int) -> Any:
        return step


async def an_async_one(iteration: int, *, lr: float = 0.1) -> Any:
    return iteration, lr


def positional_only(iteration: int = 0, /) -> Any:
    return iteration


# fault 13
@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda: "nothing", "nothing"),
        (lambda batch_size=16: batch_size, 16),
        (lambda *, batch_size=16: batch_size, 16),
        (lambda **settings: settings, {}),
        (lambda iteration: iteration, 7),
        (lambda step: step, 7),
        (lambda step, batch_size=16: (step, batch_size), (7, 16)),
        (lambda batch_size=16, iteration=0: (batch_size, iteration), (16, 7)),
        (lambda batch_size=16, *, rollout_id=0: (batch_size, rollout_id), (16, 7)),
        (lambda *arguments: arguments, (7,)),
        (lambda *arguments, iteration=0: (arguments, iteration), ((), 7)),
        (positional_only, 0),
        (partial(lambda batch_size, iteration: (batch_size, iteration), 16), (16, 7)),
        (Steps(), 7),
        (Steps().method, 7),
        (an_async_one, (7, 0.1)),
        (dict, {}),
    ],
)
async def test_the_iteration_goes_only_to_who_asks_for_it(function: Callable[..., Any], result: Any) -> None:
    assert await taking_iteration(function, "slime_train_fn")(7) == result


@pytest.mark.parametrize("function", [lambda source, batch_size: None, lambda *, batch_size: None])
def test_a_function_that_asks_for_more_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"^slime_train_fn .*batch_size"):
        taking_iteration(function, "slime_train_fn")


def test_a_training_function_keeps_its_default_batch_size() -> None:
    # fault 13
    sizes: list[int] = []

    def train(batch_size: int = 16) -> None:
        sizes.append(batch_size)

    with hello_engine() as engine, LoopCase(agent=HelloAgent(), url=engine.url, train=train, num_iterations=2) as case:
        case.loop.run()
    assert sizes == [16, 16]


def test_old_names_go_on_working_and_name_the_new_ones(tmp_path: Path) -> None:
    recorder, collected, settings = Recorder(), list[Any](), RunnerSettings(max_concurrent=3)
    old = {
        "reporter": recorder,
        "on_groups": lambda iteration, groups: collected.append((iteration, groups)),
        "run_settings": {"lr": 1},
        "output_dir": tmp_path,
        "began": time.monotonic() - 5,
        "runner_settings": settings,
        "store_host": "10.0.0.1",
    }
    with pytest.warns(FutureWarning, match=r"^OnlineRLLoop\(") as warned:
        observer, plan = observer_and_runners(None, "process:2", old)
    new = [str(warning.message).partition(" is now ")[2] for warning in warned]
    assert [name[:8] for name in new] == [*["observer"] * 5, *["runners="] * 2]
    assert plan == RunnerPlan("process", 2, settings=settings, store_host="10.0.0.1")
    assert observer is not None
    observer.handle(RunStarted())
    observer.handle(GroupsCollected(iteration=1, groups=["a group"]))
    assert collected == [(1, ["a group"])]
    [started] = recorder.of(RunStarted)
    assert (started.settings, started.output_dir, started.at) == ({"lr": 1}, tmp_path, old["began"])


def test_a_name_that_there_never_was_is_refused() -> None:
    with pytest.raises(TypeError, match="reporters"):
        observer_and_runners(None, "inproc", {"reporters": None})
