"""A program's own functions: which arguments the loop passes, and whose fault a batch of failures is."""

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.errors import ConfigError, LoopError
from agl_slime.loop.failures import Failures
from agl_slime.loop.functions import adapt_step_function
from agl_slime.loop.metrics import collect_metrics
from agl_slime.loop.settings import LoopSettings
from agl_slime.support.agl_types import LLM
from tests.harness.loop import HelloAgent, LoopCase, hello_engine
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer


class Steps:
    def method(self, iteration: int) -> Any:
        return iteration

    def __call__(self, step: int) -> Any:
        return step


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (lambda: "nothing", "nothing"),
        (lambda *, batch_size=16: batch_size, 16),
        (lambda **settings: settings, {}),
        (lambda step: step, 7),
        (lambda batch_size=16, iteration=0: (batch_size, iteration), (16, 7)),
        (lambda batch_size=16, *, rollout_id=0: (batch_size, rollout_id), (16, 7)),
        (lambda *arguments: arguments, (7,)),
        (lambda *arguments, iteration=0: (arguments, iteration), ((), 7)),
        (lambda iteration=0, /: iteration, 0),
        (partial(lambda batch_size, iteration: (batch_size, iteration), 16), (16, 7)),
        (Steps(), 7),
        (Steps().method, 7),
        (dict, {}),
    ],
)
async def test_iteration_is_passed_only_to_functions_that_take_it(function: Callable[..., Any], result: Any) -> None:
    assert await adapt_step_function(function, "slime_train_fn")(7) == result


@pytest.mark.parametrize("function", [lambda source, batch_size: None, lambda *, batch_size: None])
def test_a_function_with_another_argument_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"^slime_train_fn .*batch_size"):
        adapt_step_function(function, "slime_train_fn")


def test_loop_calls_async_functions_on_its_thread_and_others_in_a_pool(engine: ScriptedEngine) -> None:
    calls: list[Any] = []

    def in_main_thread() -> bool:
        return threading.current_thread() is threading.main_thread()

    class Train:
        async def __call__(self, iteration: int, *, lr: float = 0.1) -> dict[str, float]:
            calls.append(("train", iteration, lr, in_main_thread()))
            return {"train/loss": 1.0}

    def sync() -> int:
        calls.append(("sync", in_main_thread()))
        return 7

    with LoopCase(agent=HelloAgent(), url=engine.url, train=Train(), sync=sync) as case:
        case.loop.run()
    assert calls == [("train", 1, 0.1, True), ("sync", False)]
    assert case.recorder.metrics[0]["weights/version"] == "7"


@pytest.mark.parametrize(
    ("patience_s", "failures", "error"),
    [
        (60, ("agent_lost", "agent_lost", "agent_failed"), None),
        (60, ("controller_shutdown", "agent_failed"), None),
        (60, ("agent_failed", "agent_failed"), "all 2 rollouts failed"),
        (0, ("agent_lost",), "agent_lost"),
    ],
)
def test_a_first_batch_is_tried_again_only_when_a_controller_lost_it(patience_s, failures, error):
    members = tuple(MemberResult(rollout_id=f"ro-{n}", group_id="g", failure=name) for n, name in enumerate(failures))
    batch = [GroupResult(group_id="g", mode="train", size=2, members=members, ready=False, reason="incomplete")]
    assert collect_metrics(batch, collect_s=1.0)["rollout/reward_mean"] is None
    judged = Failures(LoopSettings(failure_patience_s=patience_s), worked=False)
    if error is None:
        assert judged.pause_after(1, batch) is not None
    else:
        with pytest.raises(LoopError, match=error):
            judged.pause_after(1, batch)


def test_the_programs_of_the_readme_run_as_printed(tmp_path: Path) -> None:
    """The agent, and the loop around it; two iterations in place of fifty."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    agent, program = (
        page.partition(f"## {heading}\n")[2].partition("```python\n")[2].partition("```")[0]
        for heading in ("Write your agent", "In a program")
    )
    batches: list[list[Any]] = []
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    names: dict[str, Any] = {"tokenizer": tokenizer, "train_on": batches.append, "push_weights": str}
    exec(agent, names)
    names["tasks"] = [names["MyAgent"]().make_task(random.Random(seed)) for seed in range(40)]
    with hello_engine() as engine:
        names["llm"] = LLM(endpoint=engine.url, model=str(tmp_path), sampling_parameters={"max_new_tokens": 8})
        exec(program.replace("num_iterations=50", "num_iterations=2"), names)
    names["source"].stop()
    assert [[len(group) for group in batch] for batch in batches] == [[8] * 16] * 2
    assert {sample.reward for batch in batches for group in batch for sample in group} == {0.0}
