"""Episodes of environments through a store: packages that the worker finds, a scripted engine, and the members."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agl_slime.data.read import read_rollout
from agl_slime.data.results import MemberResult
from agl_slime.environments.environment import Environment, load_environment
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from tests.harness.environments import env_python
from tests.harness.gateway import TEMPLATE, engine_saying
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

needs_bubblewrap = pytest.mark.skipif(
    shutil.which("bwrap") is None, reason="bubblewrap is not installed: bwrap is not on the PATH"
)


def on_path(directory: Path, patch: pytest.MonkeyPatch) -> None:
    """Workers find the packages in ``directory``."""
    patch.setenv("PYTHONPATH", os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", ""))))


def answering_engine(directory: Path, answer: Callable[[str], str], log: dict[str, list[int]]) -> ScriptedEngine:
    """An engine that gives each prompt its ``answer`` and logs the sampled ids by prompt; ``directory`` gets its
    tokenizer."""
    tokenizer: Any = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(directory)

    def say(prompt: str) -> str:
        text = answer(prompt)
        log[prompt] = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        return text

    return engine_saying(tokenizer, say)


def load(name: str, **settings: Any) -> Environment:
    return load_environment(name, python=env_python(), **settings)


def play(env: Environment, tasks: Sequence[dict[str, Any]], llm: LLM, log: Path) -> list[MemberResult]:
    store = BridgeStore()
    run_blocking(store.add_resources({"main_llm": llm}))
    ids = [run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id for task in tasks]
    with ControllerPool(plan=env.plan(log=log), store=store):
        ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=200))
        assert len(ended) == len(ids), log.read_text()
    return [run_blocking(read_rollout(store, rollout_id)) for rollout_id in ids]


def in_order(env: Environment) -> list[dict[str, Any]]:
    return sorted([*env.tasks, *(env.val_tasks or ())], key=lambda task: task["idx"])
