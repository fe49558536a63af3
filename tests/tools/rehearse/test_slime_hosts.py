"""Live rehearsals on two hosts in namespaces: a server on a loopback address is out of the other host's reach."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from agl_slime.rehearse.namespaces import why_no_namespaces
from agl_slime.report.files import read_object
from tests.harness.slime_programs import require_slime
from tests.tools.rehearse.test_slime import SMALL, hooked, rehearse, words_of

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.slime, pytest.mark.ray]

SCRIPT = """#!/bin/bash
cd {directory}
ray start --head --node-ip-address 10.1.0.1 --num-gpus 1
ssh root@10.1.0.2 "ray start --address=10.1.0.1:6379 --node-ip-address=10.1.0.2 --num-gpus 1"
ray job submit --runtime-env-json='{{"env_vars": {job}}}' -- python3 train.py {flags}
"""
AGENT = {"agl_agent": "agl_slime.cli.demo.agent:LookupAgent", "agl_runners": "ray:2"}


def rehearsed(directory: Path, model: Path, *, store: str, job: dict[str, str]) -> tuple[list[str], bool]:
    """The findings that break, and whether the live steps ran to their end."""
    root = require_slime("torch", "transformers", "sglang_router", "ray")
    if reason := why_no_namespaces():
        pytest.skip(reason)
    agl = directory / "agl.yaml"
    agl.write_text(yaml.safe_dump(AGENT | {"agl_store_host": store}))
    flags = {"rollout-batch-size": 4, "rollout-max-response-len": 128, **hooked(agl)}
    script, run = directory / "run.sh", directory / "run"
    words = " ".join(words_of(model, SMALL | flags))
    script.write_text(SCRIPT.format(directory=directory, job=json.dumps(job), flags=words))
    nodes = ("--slime-dir", root, "--python", sys.executable, "--nodes", 2, "--gpus-per-node", 1)
    rehearse(script, run, *nodes, "--live-steps", 3, "--live-seconds", 6)
    rows = json.loads((run / "findings.json").read_text())
    texts = [row["text"] for row in rows if row["level"] == "breaks"]
    return texts, read_object(run / "live.json") is not None


def test_a_script_with_addresses_that_others_reach_runs_live(policy_dir: Path, tmp_path: Path) -> None:
    texts, ended = rehearsed(tmp_path, policy_dir, store="0.0.0.0", job={})
    assert texts == []
    assert ended


@pytest.mark.parametrize(
    ("store", "job", "fault"),
    [
        ("127.0.0.1", {}, "agl_store_host"),
        ("0.0.0.0", {"SLIME_HOST_IP": "127.0.0.1"}, "is each node's loopback: give the address of its host"),
    ],
)
def test_a_server_on_a_loopback_ends_the_live_steps(
    store: str, job: dict[str, str], fault: str, policy_dir: Path, tmp_path: Path
) -> None:
    texts, ended = rehearsed(tmp_path, policy_dir, store=store, job=job)
    assert not ended
    assert texts[0].startswith("slime's driver ")
    assert " in the live rehearsal: " in texts[0]
    assert fault in texts[0]
