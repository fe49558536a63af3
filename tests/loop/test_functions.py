"""What the loop passes to a program's functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.loop.functions import adapt_step_function
from tests.harness.loop import HelloAgent, LoopCase, hello_engine


class Steps:
    def method(self, iteration: int) -> Any:
        return iteration

    def __call__(self, step: int) -> Any:
        return step


async def an_async_one(iteration: int, *, lr: float = 0.1) -> Any:
    return iteration, lr


def positional_only(iteration: int = 0, /) -> Any:
    return iteration


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
async def test_iteration_is_passed_only_to_functions_that_take_it(function: Callable[..., Any], result: Any) -> None:
    assert await adapt_step_function(function, "slime_train_fn")(7) == result


@pytest.mark.parametrize("function", [lambda source, batch_size: None, lambda *, batch_size: None])
def test_a_function_that_asks_for_more_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"^slime_train_fn .*batch_size"):
        adapt_step_function(function, "slime_train_fn")


def test_a_training_function_keeps_its_default_batch_size() -> None:
    sizes: list[int] = []

    def train(batch_size: int = 16) -> None:
        sizes.append(batch_size)

    with hello_engine() as engine, LoopCase(agent=HelloAgent(), url=engine.url, train=train, num_iterations=2) as case:
        case.loop.run()
    assert sizes == [16, 16]
