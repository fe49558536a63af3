"""Faults that slime's users meet on several nodes, each planted into a launch script that is sound without it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agl_slime.cli.main import main
from tests.harness.slime_programs import model_flags, require_slime

pytestmark = [pytest.mark.slime, pytest.mark.slow]

HOOK = "agl_slime.slime_hooks.generate_rollout"
SCRIPT = """#!/bin/bash
cd {directory}
ray start --head --node-ip-address 10.0.0.1 --num-gpus 1
ssh root@10.0.0.2 "ray start --address=10.0.0.1:6379 --num-gpus 1"
python3 train_async.py {flags}
"""
SOUND: dict[str, Any] = {
    "actor-num-gpus-per-node": 1,
    "num-gpus-per-node": 1,
    "rollout-num-gpus": 1,
    "num-rollout": 4,
    "rollout-batch-size": 4,
    "n-samples-per-prompt": 2,
    "global-batch-size": 8,
    "rollout-max-response-len": 128,
    "use-tis": "",
    "rollout-function-path": HOOK,
    "eval-function-path": HOOK,
    "custom-reward-post-process-path": "agl_slime.slime_hooks.normalize_rewards",
    "data-source-path": "agl_slime.AGLDataSource",
    "input-key": "question",
    "label-key": "answer",
}
AGENT = {"agl_agent": "agl_slime.cli.demo.agent:LookupAgent", "agl_max_staleness": 1}
HOLES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "a store's address": (
        {},
        {"agl_agent": None, "agl_store_url": "http://127.0.0.1:9"},
        "agl_store_url http://127.0.0.1:9 is each node's loopback",
        "give the address of its host",
    ),
    "a store that runners cannot reach": (
        {},
        {"agl_runners": "ray:2", "agl_store_host": "127.0.0.1"},
        "agl_runners ray:2: runners on other nodes cannot reach a store on 127.0.0.1",
        "set agl_store_host",
    ),
    "the router's host": (
        {"sglang-router-ip": "127.0.0.1", "sglang-router-port": 3000},
        {},
        "--sglang-router-ip 127.0.0.1 is each node's loopback",
        "give the address of its host",
    ),
    "a key": ({"label-key": "label"}, {}, "--label-key label is missing in 8 of 8 rows", "question, answer"),
    "a batch": ({"global-batch-size": 6}, {}, "= 8 is no multiple of --global-batch-size 6", "change one of them"),
    "a name of one node": ({}, {"agl_agent": "mine:Agent"}, "agl_agent mine:Agent is importable only", "working_dir"),
    "a flag without effect": ({"partial-rollout": ""}, {}, "--partial-rollout has no effect", "take it out"),
    "a context length": (
        {"sglang-context-length": 64},
        {},
        "--rollout-max-response-len 128 is more than --sglang-context-length 64",
        "lower it",
    ),
    "memory of replay": (
        {"use-rollout-routing-replay": "", "moe-router-topk": 2},
        {},
        "routed experts of a batch take up to",
        "lower --rollout-max-response-len",
    ),
    "staleness": (
        {"update-weights-interval": 2},
        {},
        "agl_max_staleness 1 cannot be kept: train_async.py requests rollouts 2 versions ahead",
        "set 2 or more",
    ),
}

# kinds of names of code and files, each misspelt, with the likely one
MISSPELT: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "an agent's class": (
        {},
        {"agl_agent": "agl_slime.cli.demo.agent:LokupAgent"},
        "agl_agent agl_slime.cli.demo.agent:LokupAgent cannot be imported (AttributeError",
        "did you mean agl_slime.cli.demo.agent:LookupAgent?",
    ),
    "an agent's module": (
        {},
        {"agl_agent": "agl_slime.cli.demo.agnt:LookupAgent"},
        "agl_agent agl_slime.cli.demo.agnt:LookupAgent cannot be imported (ModuleNotFoundError",
        "did you mean agl_slime.cli.demo.agent:LookupAgent?",
    ),
    "an agent's file": (
        {},
        {"agl_agent": "mne.py:Agent"},
        "agl_agent mne.py:Agent cannot",
        "did you mean mine.py:Agent?",
    ),
    "an agent without a class": (
        {},
        {"agl_agent": "agl_slime.cli.demo.agent.LookupAgent"},
        "cannot be imported (expected module:Class or file.py:Class)",
        "did you mean agl_slime.cli.demo.agent:LookupAgent?",
    ),
    "an agent of a controller": (
        {},
        {"agl_runners": "controller", "agl_agent": "mine:Agnt", "agl_controller_python": sys.executable},
        "agl_agent mine:Agnt cannot be imported (AttributeError",
        "did you mean mine:Agent?",
    ),
    "a controller's Python": (
        {},
        {"agl_runners": "controller", "agl_controller_python": "tasks.json"},
        "agl_controller_python tasks.json does not exist",
        "did you mean tasks.jsonl?",
    ),
    "tasks": (
        {},
        {"agl_tasks": "task.jsonl@[0:4]"},
        "agl_tasks task.jsonl@[0:4] does not",
        "did you mean tasks.jsonl?",
    ),
    "evaluation tasks": ({}, {"agl_eval_tasks": "tasks.json"}, "agl_eval_tasks tasks.json does", "mean tasks.jsonl?"),
    "a job's template": (
        {},
        {"agl_runners": "controller", "agl_agent": None, "agl_job_template": "none.yaml"},
        "agl_job_template none.yaml does not exist",
        "put it there",
    ),
    "a directory": ({}, {"agl_replay_files": "/none/replay"}, "agl_replay_files /none/replay does", "put it there"),
    "a log": ({}, {"agl_controller_log": "/none/log"}, "agl_controller_log /none/log does", "put it there"),
    "a hook": (
        {"custom-reward-post-process-path": "agl_slime.slime_hooks.normalise_rewards"},
        {},
        "--custom-reward-post-process-path agl_slime.slime_hooks.normalise_rewards cannot be imported",
        "did you mean agl_slime.slime_hooks.normalize_rewards?",
    ),
    "a setting": ({}, {"agl_max_stalenes": 1}, "agl_max_stalenes is no setting", "did you mean agl_max_staleness?"),
}


def found_in(directory: Path, model: Path, flags: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """The findings of a rehearsal on two nodes, without notes."""
    root = require_slime("torch", "transformers", "sglang_router")
    (directory / "mine.py").write_text("class Agent: ...\n")
    (directory / "tasks.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 8)
    agl = directory / "agl.yaml"
    agl.write_text(yaml.safe_dump({name: value for name, value in (AGENT | settings).items() if value is not None}))
    given = SOUND | {"hf-checkpoint": model, "prompt-data": directory / "tasks.jsonl", "custom-config-path": agl}
    words = [f"--{name} {value}".strip() for name, value in (given | flags).items()]
    script, run = directory / "run.sh", directory / "run"
    script.write_text(SCRIPT.format(directory=directory, flags=" ".join([*model_flags(model), *words])))
    where = ["--slime-dir", str(root), "--python", sys.executable, "--nodes", "2", "--gpus-per-node", "1"]
    assert main(["rehearse", str(script), *where, "--output-dir", str(run)]) == 0
    return [one["text"] for one in json.loads((run / "findings.json").read_text()) if one["level"] != "note"]


def test_the_sound_script_has_no_findings(policy_dir: Path, tmp_path: Path) -> None:
    assert found_in(tmp_path, policy_dir, {}, {}) == []


@pytest.mark.parametrize("hole", MISSPELT)
def test_a_misspelt_name_is_one_sentence_with_the_likely_one(hole: str, policy_dir: Path, tmp_path: Path) -> None:
    flags, settings, fault, fix = MISSPELT[hole]
    texts = [one for one in found_in(tmp_path, policy_dir, flags, settings) if fault in one]
    assert len(texts) == 1
    assert fix in texts[0]


def test_settings_of_the_jobs_environment_count(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGL_SLIME_AGENT", "mine:Agnt")
    (fault,) = (one for one in found_in(tmp_path, policy_dir, {}, {"agl_agent": None}) if "Agnt cannot" in one)
    assert fault.endswith("did you mean mine:Agent?")


@pytest.mark.parametrize("hole", HOLES)
def test_a_planted_hole_is_one_sentence_with_its_fix(hole: str, policy_dir: Path, tmp_path: Path) -> None:
    flags, settings, fault, fix = HOLES[hole]
    texts = [one for one in found_in(tmp_path, policy_dir, flags, settings) if fault in one]
    assert len(texts) == 1
    assert fix in texts[0]
