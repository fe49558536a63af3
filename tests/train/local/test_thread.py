"""Whichever thread calls the local trainer, its work is done in one of its own."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import pytest

pytest.importorskip("torch")

from agl_slime.types import Sample
from tests.harness.trainers import trainer

NAME = "agl-slime-trainer"


def test_steps_and_checkpoints_share_one_thread_for_all_callers(
    policy: Path, samples: list[Sample], tmp_path: Path
) -> None:
    ours, threads = trainer(policy), set()
    ours.on_progress = lambda share: threads.add(threading.current_thread())
    ours.model.register_state_dict_pre_hook(lambda *_: threads.add(threading.current_thread()))
    calls = [lambda n=n: ours.train(samples, iteration=n) for n in range(3)]
    calls += [lambda: ours.save_weights(tmp_path / "weights"), lambda: ours.save(tmp_path / "state")]
    for call in [*calls, lambda: ours.load(tmp_path / "state")]:
        with ThreadPoolExecutor(1) as caller:
            caller.submit(call).result()
    assert [thread.name for thread in threads] == [NAME]


def test_calls_at_the_same_time_wait_for_one_another(policy: Path, samples: list[Sample], tmp_path: Path) -> None:
    """As where a run is cancelled in the middle of a step, and its checkpoint is written."""
    ours, training, go_on = trainer(policy), threading.Event(), threading.Event()

    def hold(share: float) -> None:
        training.set()
        assert go_on.wait(20)

    ours.on_progress = hold
    with ThreadPoolExecutor(2) as callers:
        trained = callers.submit(ours.train, samples, iteration=7)
        assert training.wait(20)
        saved = callers.submit(ours.save, tmp_path / "state")
        with pytest.raises(FutureTimeoutError):
            saved.result(0.2)
        go_on.set()
        trained.result(20)
        saved.result(20)
    resumed = trainer(policy)
    resumed.load(tmp_path / "state")
    assert (resumed.iteration, resumed.steps) == (7, ours.steps)


def test_the_thread_ends_with_its_trainer(policy: Path, samples: list[Sample]) -> None:
    old_threads = set(threading.enumerate())
    ours = trainer(policy)
    ours.train(samples, iteration=0)
    (thread,) = (thread for thread in set(threading.enumerate()) - old_threads if thread.name == NAME)
    del ours
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
