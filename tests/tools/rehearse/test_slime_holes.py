"""Faults that slime's users meet on several nodes, planted into a launch script that is sound without them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness.slime_programs import require_slime
from tests.tools.rehearse.test_slime import SMALL, hooked, rehearse, words_of

pytestmark = [pytest.mark.slime, pytest.mark.slow]

SCRIPT = """#!/bin/bash
cd {directory}
ray start --head --node-ip-address 10.0.0.1 --num-gpus 1
ssh root@10.0.0.2 "ray start --address=10.0.0.1:6379 --num-gpus 1"
python3 train_async.py {flags}
"""
SOUND: dict[str, Any] = {**SMALL, "use-tis": "", "input-key": "question", "label-key": "answer"}
SOUND["custom-reward-post-process-path"] = "agl_slime.slime_hooks.normalize_rewards"
AGENT = {"agl_agent": "agl_slime.cli.demo.agent:LookupAgent", "agl_max_staleness": 1}
# Flags, settings, and the findings that both together give: the fault, and its fix or the nearest name.
PLANTED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "addresses, keys, sizes": (
        {"sglang-router-ip": "127.0.0.1", "sglang-router-port": 3000, "label-key": "label", "partial-rollout": ""}
        | {"global-batch-size": 6, "sglang-context-length": 64, "update-weights-interval": 2},
        {"agl_runners": "ray:2", "agl_store_host": "127.0.0.1", "agl_agent": "mine:Agent"},
        {
            "--sglang-router-ip 127.0.0.1 is each node's loopback": "give the address of its host",
            "agl_runners ray:2: runners on other nodes cannot reach a store on 127.0.0.1": "set agl_store_host",
            "--label-key label is missing in 8 of 8 rows": "question, answer",
            "= 8 is no multiple of --global-batch-size 6": "change one of them",
            "--partial-rollout has no effect": "take it out",
            "--rollout-max-response-len 128 is more than --sglang-context-length 64": "lower it",
            "agl_max_staleness 1 cannot be kept: train_async.py requests rollouts 2 versions": "set 2 or more",
            "agl_agent mine:Agent is importable only": "working_dir",
        },
    ),
    "a class, files, a hook, a setting": (
        {"custom-reward-post-process-path": "agl_slime.slime_hooks.normalise_rewards"},
        {
            "agl_agent": "agl_slime.cli.demo.agent:LokupAgent",
            "agl_tasks": "task.jsonl@[0:4]",
            "agl_eval_tasks": "tasks.json",
            "agl_replay_files": "/none/replay",
            "agl_max_stalenes": 1,
        },
        {
            "agl_agent agl_slime.cli.demo.agent:LokupAgent cannot be imported (AttributeError": "agent:LookupAgent?",
            "agl_tasks task.jsonl@[0:4] does not": "did you mean tasks.jsonl?",
            "agl_eval_tasks tasks.json does": "mean tasks.jsonl?",
            "agl_replay_files /none/replay does": "put it there",
            "slime_hooks.normalise_rewards cannot be imported": "did you mean agl_slime.slime_hooks.normalize_rewards?",
            "agl_max_stalenes is no setting": "did you mean agl_max_staleness?",
        },
    ),
}


def findings(directory: Path, model: Path, flags: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """The findings of a rehearsal on two nodes, without notes."""
    root = require_slime("torch", "transformers", "sglang_router")
    (directory / "mine.py").write_text("class Agent: ...\n")
    (directory / "tasks.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 8)
    agl = directory / "agl.yaml"
    agl.write_text(yaml.safe_dump({name: value for name, value in (AGENT | settings).items() if value is not None}))
    script, run = directory / "run.sh", directory / "run"
    data = {"prompt-data": directory / "tasks.jsonl", "ref-load": directory}
    words = " ".join(words_of(model, SOUND | hooked(agl) | data | flags))
    script.write_text(SCRIPT.format(directory=directory, flags=words))
    rehearse(script, run, "--slime-dir", root, "--python", sys.executable, "--nodes", 2, "--gpus-per-node", 1)
    rows = json.loads((run / "findings.json").read_text())
    return [row["text"] for row in rows if row["level"] != "note"]


def test_the_sound_script_has_no_findings(policy_dir: Path, tmp_path: Path) -> None:
    assert findings(tmp_path, policy_dir, {}, {}) == []


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_fault_is_one_sentence_with_its_fix(name: str, policy_dir: Path, tmp_path: Path) -> None:
    flags, settings, faults = PLANTED[name]
    texts = findings(tmp_path, policy_dir, flags, settings)
    for fault, fix in faults.items():
        matching = [text for text in texts if fault in text]
        assert len(matching) == 1, (fault, texts)
        assert fix in matching[0]


def test_settings_of_the_jobs_environment_count(policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGL_SLIME_AGENT", "mine:Agnt")
    (fault,) = (text for text in findings(tmp_path, policy_dir, {}, {"agl_agent": None}) if "Agnt cannot" in text)
    assert fault.endswith("did you mean mine:Agent?")
