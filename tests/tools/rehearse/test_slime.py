"""Rehearsals of slime's own launch scripts, with its own parser; and a few steps of its driver."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agl_slime.cli.main import main
from agl_slime.report.files import read_object
from agl_slime.tools.rehearse.megatron.flags import model_flags
from tests.harness.slime_programs import REPOSITORY, require_slime
from tests.tools.rehearse.test_script import needs_box, why_no_box

SCRIPTS = ("qwen3-4B", "glm4-9B", "kimi-k2-Instruct", "qwen3-235B-A22B", "moonlight-16B-A3B", "qwen3-4B-base-sft")
SMALL: dict[str, object] = dict.fromkeys(("actor-num-gpus-per-node", "num-gpus-per-node", "rollout-num-gpus"), 1)
SMALL |= {"num-rollout": 9, "rollout-batch-size": 4, "n-samples-per-prompt": 2, "global-batch-size": 8}
SMALL |= {"rollout-max-response-len": 128, "make-vocab-size-divisible-by": 4}


@pytest.mark.slime
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_slimes_is_rehearsed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = require_slime("torch", "transformers", "sglang_router")
    script = root / "scripts" / f"run-{name}.sh"
    if not script.is_file():
        pytest.skip(f"this slime has no {script.name}")
    monkeypatch.setenv("BASE_FOLDER", "/data")
    run = tmp_path / "run"
    texts = rehearse(script, run, "--slime-dir", root, "--python", sys.executable, "--nodes", 4)
    if name == "kimi-k2-Instruct":  # a line of its flags lacks the backslash
        assert any("ended with code 127 after the training command" in text for text in texts)
        return
    assert any(text.startswith("--hf-checkpoint /") for text in texts)
    assert not any("is read by no parser" in text or "slime refuses" in text for text in texts), texts
    assert bool(json.loads((run / "forecasts.json").read_text())) is not name.endswith("sft")


def rehearse(script: Path, run: Path, *words: object) -> list[str]:
    """The texts of the findings."""
    trusted = ["--without-sandbox"] if why_no_box() else []
    code = main(["rehearse", str(script), *map(str, words), *trusted, "--output-dir", str(run)])
    findings = json.loads((run / "findings.json").read_text())
    assert code == any(finding["level"] == "breaks" for finding in findings)
    return [finding["text"] for finding in findings]


def words_of(policy: Path, flags: dict[str, object]) -> list[str]:
    """The words of these flags after the policy's."""
    words = [f"--{name} {value}".strip() for name, value in flags.items()]
    return ["--hf-checkpoint", str(policy), *model_flags(policy), *words]


def hooked(agl: Path) -> dict[str, object]:
    """Flags of our hooks, with the settings of the file ``agl``."""
    hook = "agl_slime.slime_hooks.generate_rollout"
    flags: dict[str, object] = {"rollout-function-path": hook, "eval-function-path": hook}
    return {**flags, "data-source-path": "agl_slime.AGLDataSource", "custom-config-path": agl}


def script_of(directory: Path, policy: Path, flags: dict[str, object]) -> Path:
    script = directory / "run.sh"
    script.write_text(f"#!/bin/bash\nexec python3 train.py {' '.join(words_of(policy, flags))}\n")
    return script


@pytest.mark.slime
@pytest.mark.slow
def test_a_misspelt_flag_and_a_refusal_are_both_findings(policy_dir: Path, tmp_path: Path):
    root = require_slime("torch", "transformers", "sglang_router")
    (tmp_path / "eval.yaml").write_text("eval: [\n")
    sizes: dict[str, object] = {"rollout-batch-size": 4, "num-rollout": 2, "global-batch-size": 4, "colocate": ""}
    sizes |= {"save-interval": 2, "eval-interval": 5}
    sizes["eval-config"] = tmp_path / "eval.yaml"
    script = script_of(tmp_path, policy_dir, {**sizes, "rolout-temperature": 0.5})
    texts = rehearse(script, tmp_path / "run", "--slime-dir", root)
    assert any("did you mean --rollout-temperature?" in text for text in texts)
    assert "slime refuses the flags: '--save' is required when save_interval is set." in texts
    # the other checks have run, too, and not on half of the arguments
    assert not any("without --colocate" in text or "Evaluation datasets" in text for text in texts)


@pytest.mark.slime
@pytest.mark.slow
@pytest.mark.parametrize("name", ["run_agent_buffer.sh", "run_agent.sbatch"])
def test_a_recipe_of_ours_is_sound(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, recipe = require_slime("torch", "transformers", "sglang_router"), REPOSITORY / "examples" / "slime" / name
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1 + 1?", "label": "2"}\n' * 64)
    for variable, value in {"SLIME_DIR": root, "MODEL": "/shared/model", "MODEL_TORCH_DIST": "/shared/dist"}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("DATA", str(tmp_path / "tasks.jsonl"))
    monkeypatch.chdir(REPOSITORY)
    run = tmp_path / "run"
    rehearse(recipe, run, "--python", sys.executable, "--nodes", 1 + name.endswith("sbatch"))
    rows = json.loads((run / "findings.json").read_text())
    texts = [row["text"].partition(": ")[0] for row in rows if row["level"] == "breaks"]
    assert texts == [
        f"--{flag} does not exist on this machine" for flag in ("hf-checkpoint /shared/model", "ref-load /shared/dist")
    ]
    assert not any("has no effect" in row["text"] for row in rows)


@needs_box
@pytest.mark.slime
@pytest.mark.slow
def test_code_that_flags_name_stays_in_the_box(policy_dir: Path, tmp_path: Path) -> None:
    root = require_slime("torch", "transformers", "sglang_router")
    evil = f"open({str(tmp_path / 'harm')!r}, 'w').write('')\n"
    for module in ("mine", "argparse_extra"):
        (tmp_path / f"{module}.py").write_text(f"{evil}def rm(): ...\n")
    (python := tmp_path / "python").write_text(f"#!/bin/sh\ntouch {tmp_path}/harm\n")
    python.chmod(0o755)
    agl = tmp_path / "agl.yaml"
    agl.write_text(f"agl_agent: mine:Agent\nagl_runners: controller\nagl_controller_python: {python}\n")
    flags = {**SMALL, **hooked(agl), "custom-rm-path": "mine.rm"}
    script = script_of(tmp_path, policy_dir, flags)
    script.write_text(script.read_text().replace("exec", f"cd {tmp_path}; PYTHONPATH={tmp_path} exec"))
    rehearse(script, tmp_path / "run", "--slime-dir", root)
    assert not (tmp_path / "harm").exists()


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("hooks", [False, True])
def test_slimes_driver_runs_on_logical_nodes_of_one_host(hooks: bool, policy_dir: Path, tmp_path: Path):
    root = require_slime("torch", "transformers", "sglang_router", "ray")
    run = tmp_path / "run"
    if hooks:
        agl = tmp_path / "agl.yaml"
        agl.write_text("agl_agent: agl_slime.cli.demo.agent:LookupAgent\nagl_max_staleness: 1\n")
        flags = SMALL | hooked(agl)
    else:
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text('{"prompt": "1 + 1?", "label": "2"}\n' * 8)
        flags = SMALL | {"prompt-data": tasks, "input-key": "prompt", "label-key": "label", "rm-type": "math"}
    nodes = ("--slime-dir", root, "--nodes", 2, "--gpus-per-node", 1, "--live-steps", 3, "--live-seconds", 6)
    rehearse(script_of(tmp_path, policy_dir, flags), run, *nodes)
    live = read_object(run / "live.json")
    assert live is not None
    assert live["steps"] == 3
    assert "Live: 3 steps of slime's driver" in (run / "rehearsal.txt").read_text()
