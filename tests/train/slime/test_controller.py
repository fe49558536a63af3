"""``agl_runners`` outside of the manager's process, for a data source that slime builds."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime import AGLDataSource
from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE
from agl_slime.runner.controller_process import agents_of
from agl_slime.support.net import free_port
from tests.gateway.agl1.test_faults import playing
from tests.harness.gateway import TEMPLATE, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.slime_source import AGENT, args_for, check, write_tasks
from tests.harness.tokenizers import small_tokenizer


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """slime's args of the model, and the tasks."""
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"{n}+2?", "label": "four"}) + "\n" for n in range(8)))
    paths = (str(Path(__file__).parents[2] / "programs" / "agents"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    with in_thread(engine_saying(tokenizer, ["four"])) as engine:
        args = {"hf_checkpoint": str(tmp_path / "model"), "agl_llm_url": engine.url, "agl_tasks": str(tasks)}
        yield {**args, "agl_runners": "controller", "agl_max_attempts": None, "rollout_max_response_len": 32}


@pytest.mark.slow
def test_workers_of_the_managers_process_run_its_agent(tmp_path: Path):
    with AGLDataSource(
        args_for(agl_agent=AGENT, agl_runners="process:1", agl_tasks=write_tasks(tmp_path / "t.jsonl", 8))
    ) as source:
        check(source.get_samples(2))


def test_a_controller_finds_the_rollouts_of_the_managers_process(served, monkeypatch):
    """The test plays the controller; a failed rollout has its group replaced."""
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    args = args_for(agl_agent="an:Agent", agl_controller_port=(port := free_port()), **served)
    with AGLDataSource(args) as source, playing(f"http://127.0.0.1:{port}", "a_reward_that_is_nan") as played:
        groups = source.get_samples(2)
        reasons = source.groups.ledger.counts().reasons
    assert [[sample.reward for sample in group] for group in groups] == [[1.0, 1.0]] * 2
    assert reasons[Outcome.FAILED, "no_reward"] == 1
    assert len(played) >= 6
    del served["agl_tasks"]
    with pytest.raises(ConfigError, match=r"an:Agent has no tasks: set agl_tasks or --prompt-data$"):
        AGLDataSource(args_for(agl_agent="an:Agent", **served))


@pytest.mark.controller
@pytest.mark.skipif(not os.environ.get(PYTHON_VARIABLE), reason=f"{PYTHON_VARIABLE} names no Python of 1.x")
def test_the_manager_starts_the_unmodified_controller_and_ends_it(served: dict[str, Any], tmp_path: Path):
    served |= {"agl_agent": "agl1_agents:TwoTurns", "agl_env_map": "QUESTION=input.question LABEL=input.label"}
    served |= {"agl_eval_tasks": served["agl_tasks"], "agl_eval_rollouts": 2, "agl_get_timeout_s": 100}
    served |= {"agl_controller_port": (port := free_port()), "agl_controller_log": str(tmp_path / "controller.log")}
    with AGLDataSource(args_for(**served)) as source:
        groups = source.get_samples(2)
        entry = source.evaluate(0)["agl"]
        closed = source.groups.ledger.counts().closed
    for sample in (sample for group in groups for sample in group):
        assert (sample.reward, sample.metadata["turns"]) == (1.0, 2)
        assert sum(sample.loss_mask or ()) == sum(log_prob != 0 for log_prob in sample.rollout_log_probs or ()) > 2
    assert entry["rewards"] == [1.0, 1.0]
    assert closed[Outcome.VALIDATED] == 2
    assert not list(agents_of(f"http://127.0.0.1:{port}"))
