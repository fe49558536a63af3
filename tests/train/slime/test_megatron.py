"""slime's own training loop with its own Megatron actors: Megatron-LM's code, with a CPU for CUDA."""

from __future__ import annotations

import filecmp
import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.errors import AglSlimeError
from agl_slime.report.read import RunReader
from agl_slime.tools.forensics.replay import ReplayConfig
from agl_slime.tools.forensics.replay_slime import replay_dump
from agl_slime.tools.rehearse.megatron.cuda import install
from agl_slime.tools.rehearse.megatron.sources import Sources
from agl_slime.tools.slime_dumps.runs import SlimeRuns
from tests.harness.engine_servers import real_sglang
from tests.harness.guard import guarded_child
from tests.harness.megatron import command, require_megatron, train_by_megatron
from tests.harness.report_runs import floats
from tests.harness.slime_programs import start_guarded
from tests.harness.training import model_info
from tests.harness.waiting import becomes_true

STEPS = 3
AGENT = "agl_agent: agl_slime.cli.demo.agent:LookupAgent\n"


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
def test_three_steps_agree_with_the_engine_and_with_replay(tmp_path: Path):
    (settings := tmp_path / "settings.yaml").write_text(f"{AGENT}eval_interval: {STEPS}\nagl_eval_rollouts: 8\n")
    flags = ["--num-rollout", STEPS, "--update-weight-disk-keep-files", "--custom-config-path", settings]
    output = train_by_megatron(tmp_path, *flags)
    reader = RunReader(tmp_path, SlimeRuns(LOOKUP_POLICY))
    page = reader.update()
    assert page is not None
    columns = page["metrics"]["columns"]
    assert len(columns["rollout/reward_mean"]) == STEPS
    assert columns["val/reward_mean"][-1] is not None
    assert {page["words"][word] for word in page["members"]["outcome"]} == {"trained"}
    assert page["damage"] == []
    assert any("settings" in sentence for sentence in page["absent"])  # slime does not write them
    rollouts = [json.loads(reader.rollout(name) or b"") for name in page["kept"]]
    rollout = max(rollouts, key=lambda rollout: rollout["tokens"])
    (sample,) = rollout["samples"]
    engine, trainer = (floats(sample[f"{name}_log_probs"]) for name in ("engine", "trainer"))
    assert np.isfinite(engine).sum() == rollout["tokens"] > 0
    np.testing.assert_allclose(trainer, engine, atol=1e-5)
    assert {"assistant", "environment"} <= {message["role"] for message in rollout["messages"]}
    # the engine has each update's weights: its log-probs are those that Megatron computes
    assert max(columns["train/logprob_diff_max"]) < 1e-5
    assert len([*(tmp_path / "weights").iterdir()]) == STEPS + 1
    steps = re.findall(r"step \d+: ({'train/loss.*?})", output)
    for step in range(STEPS):
        logged = dict(re.findall(r"'(train/\w+)': ([-\w.]+)", steps[step]))
        weights = tmp_path / "weights" / f"weight_v{step + 1:06d}"
        result = replay_dump(ReplayConfig(run_dir=tmp_path, step=step, model=weights))
        apart = {comparison.name: comparison.difference for comparison in result.comparisons}
        assert apart == pytest.approx(dict.fromkeys(apart, 0.0), abs=1e-5)
        for name in ("train/loss", "train/grad_norm"):
            assert result.computed[name] == pytest.approx(float(logged[name]), abs=1e-5), name


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
@pytest.mark.parametrize("script", ["train.py", "train_async.py"])
def test_each_task_is_trained_once_after_a_kill_and_past_the_end(script: str, tmp_path: Path):
    """Killed once slime names its first checkpoint; resumed to the end, and then with more steps than were planned."""
    keys = [first + second for first in "bdfgkm" for second in "pqrs"]
    tasks, settings, saved = (tmp_path / name for name in ("tasks.jsonl", "settings.yaml", "saved"))
    tasks.write_text("".join(json.dumps({"key": key, "answer": "7"}) + "\n" for key in keys))
    settings.write_text(f"{AGENT}agl_tasks: {tasks}\n")
    flags: list[object] = ["--custom-config-path", settings, "--rollout-batch-size", 4, "--global-batch-size", 16]
    flags += ["--save", saved, "--load", saved, "--save-interval", 2, "--update-weight-disk-keep-files"]

    def part(steps: int) -> list[object]:
        return [*flags, "--num-rollout", steps, "--update-weight-disk-dir", tmp_path / f"weights{steps}"]

    environ, latest = require_megatron(), saved / "latest_checkpointed_iteration.txt"
    with start_guarded(command(tmp_path, *part(5), script=script), env=environ, stdout=subprocess.DEVNULL) as process:
        assert becomes_true(latest.exists, 300)
        guarded_child(process).kill()
        process.wait()
    for steps in (4, 6):
        train_by_megatron(tmp_path, *part(steps), script=script)
    trained = Counter[str]()
    for step in range(6):
        dump = torch.load(tmp_path / "rollout_data" / f"{step}.pt", weights_only=False)
        trained.update(sample["prompt"][-1]["content"].split('"')[1] for sample in dump["samples"])
    assert trained == dict.fromkeys(keys, 4)
    assert (latest.read_text(), len([*(tmp_path / "weights6").iterdir()])) == ("5", 3)
    last, first = (tmp_path / f"weights{steps}" / f"weight_v{version:06d}" for steps, version in ((4, 3), (6, 1)))
    assert filecmp.cmpfiles(last, first, ["model-00001-of-00001.safetensors"], shallow=False)[0]


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
@pytest.mark.slow
def test_two_runs_are_equal(tmp_path: Path):
    """Whichever groups are first to end, also where the next batch is sampled during a step."""
    for run in "ab":
        flags = ["--num-rollout", STEPS, "--update-weight-disk-keep-files"]
        train_by_megatron(tmp_path / run, *flags, script="train_async.py")
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a" / "weights").rglob("*.safetensors")]
    assert len(files) == STEPS + 1
    assert filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", files, shallow=False) == (files, [], [])


@pytest.mark.slime
@pytest.mark.ray
@pytest.mark.megatron
@pytest.mark.sglang
def test_a_real_sglang_samples_what_megatron_trains_and_takes_its_weights(tmp_path: Path):
    """Agent Lightning, slime, Megatron and SGLang: only CUDA is stood in for."""
    with real_sglang(LOOKUP_POLICY, tmp_path / "sglang.log") as server:
        flags = ["--num-rollout", STEPS, "--rollout-external-engine-addrs", server.url.removeprefix("http://")]
        train_by_megatron(tmp_path, *flags)
        engine = model_info(server.url)
    page = RunReader(tmp_path, SlimeRuns(LOOKUP_POLICY)).update()
    assert page is not None
    differences = page["metrics"]["columns"]["train/logprob_diff_max"]
    assert (len(differences), page["damage"]) == (STEPS, [])
    assert max(differences) < 1e-5
    # the weights before the first step are pushed, too
    assert engine["weight_version"] == f"{STEPS + 1}"
    assert engine["model_path"].endswith(f"/weights/weight_v{STEPS + 1:06d}")


def test_a_machine_with_a_gpu_is_refused():
    refused = f"from {install.__module__} import install; install()"
    program = f"import torch; torch.cuda.is_available = lambda: True; {refused}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ConfigError: this machine has a GPU: run slime's script itself" in ended.stderr


ARGUMENTS, ROUTER = "slime/backends/megatron_utils/arguments.py", "megatron/core/transformer/moe/router.py"
FILES = {
    ARGUMENTS: "def _set_default_megatron_args(args)",
    "megatron/core/package_info.py": "MINOR = 16",
    "megatron/core/tensor_parallel/inference_layers.py": "class InferenceLayerNormColumnParallelLinear",
    ROUTER: "register_routing_replay",
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({}, ""),
        ({ARGUMENTS: None}, "SLIME_DIR=.* has no slime/backends/.*arguments.py: take commit 624b824"),
        ({ARGUMENTS: "other"}, "has no 'def _set_default_megatron_args' in slime/.*: take commit 624b824"),
        ({"megatron/core/package_info.py": "MINOR = 17"}, "MEGATRON_DIR=.* 'MINOR = 16' in .*: take commit 1dcf0dafa8"),
        ({ROUTER: "other"}, "lacks slime's patches: git -C .* apply .*/docker/patch/latest/megatron"),
    ],
)
def test_another_commit_is_named_with_what_it_lacks(changes: dict[str, str | None], sentence: str, tmp_path: Path):
    for file, text in (FILES | changes).items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if text is not None:
            (tmp_path / file).write_text(text)
    environ = dict.fromkeys(("SLIME_DIR", "MEGATRON_DIR"), str(tmp_path))
    with pytest.raises(AglSlimeError, match=sentence) if changes else nullcontext():
        assert Sources.find(environ) == Sources(slime=tmp_path, megatron=tmp_path)


def test_missing_sources_name_the_script_that_fetches_them(tmp_path: Path):
    with pytest.raises(AglSlimeError, match=r"SLIME_DIR=.* is no directory: .*scripts/slime_cpu.sh"):
        Sources.find({"SLIME_DIR": str(tmp_path / "none")})
