"""Which metrics the trend page draws in one panel, by the page's own code."""

import json
import shutil
import subprocess
from importlib.resources import files

import pytest

NODE = shutil.which("node")
NAMES = ["perf/collect_s", "perf/train_s", "perf/sync_s", "perf/iteration_s", "perf/tokens_per_s"]
NAMES += ["rollout/staleness_mean", "rollout/staleness_max", "train/share/staleness_0", "train/engine_kl/staleness_0"]
NAMES += ["val/reward_mean", "val/count", "val/failed", "val/failed/timeout", "val/start_failed"]


@pytest.mark.skipif(NODE is None, reason="no node, which runs the page's code")
def test_each_panel_draws_metrics_of_its_unit() -> None:
    assert NODE is not None
    code = (files("agl_slime.report") / "web" / "trend.js").read_text(encoding="utf-8")
    program = f"{code}\nconsole.log(JSON.stringify(panels({json.dumps(NAMES)})))"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, timeout=60, check=True)
    drawn = {title: names for title, names in json.loads(done.stdout) if names}
    assert drawn["Seconds by phase"] == ["perf/collect_s", "perf/train_s", "perf/sync_s", "perf/iteration_s"]
    assert drawn["Sampled tokens per second"] == ["perf/tokens_per_s"]
    assert drawn["Staleness in weight versions"] == ["rollout/staleness_mean", "rollout/staleness_max"]
    assert drawn["Share of trained tokens by staleness"] == ["train/share/staleness_0"]
    assert drawn["Validation"] == ["val/reward_mean"]
    assert drawn["Validation rollouts that failed"] == ["val/failed", "val/start_failed", "val/failed/timeout"]
