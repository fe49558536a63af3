"""The report of a long run in a real browser: its size, the time to the first paint, and the frames of scrolling.

    python benchmarks/report_page.py [--iterations 1000] [--dir DIR]

Makes a run of 64 rollouts an iteration with the package's own writers (kept: sampled), writes report.html, opens it
from disk in a headless Chromium (Playwright, `pip install agl-slime[browser]`) and scrolls the table of all rollouts
from its top to its end.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.events import BatchTrained, GroupsCollected, IterationFinished, RunFinished
from agl_slime.report.files import open_run_dir
from agl_slime.report.metrics import MetricsWriter
from agl_slime.report.rollouts import RolloutWriter
from agl_slime.tokens.turn import Trajectory, Turn
from agl_slime.tools.pages.file import write_report
from agl_slime.types import Sample

WORDS = [f" word{n}" for n in range(1000)]
TOKENIZER = SimpleNamespace(decode=lambda ids: "".join(WORDS[one] for one in ids))
SCROLL = """async () => {
  const box = document.querySelector('.virtual'), frames = [];
  const end = box.scrollHeight, started = performance.now(), lasts = 3000;
  await new Promise((done) => {
    const step = (now) => {
      frames.push(now);
      box.scrollTop = (end * (now - started)) / lasts;
      now - started < lasts ? requestAnimationFrame(step) : done();
    };
    requestAnimationFrame(step);
  });
  const gaps = frames.slice(1).map((at, i) => at - frames[i]).sort((a, b) => a - b);
  const rows = document.querySelectorAll('.rows .row').length;
  const fps = (1000 * gaps.length) / (frames[frames.length - 1] - frames[0]);
  return { fps, p95_ms: gaps[Math.floor(0.95 * gaps.length)], worst_ms: gaps[gaps.length - 1], rows };
}"""
PAINT = "performance.getEntriesByType('paint').find((e) => e.name === 'first-contentful-paint')?.startTime"


def a_member(rng: random.Random, iteration: int, tokens: int) -> MemberResult:
    rollout_id = f"ro-{rng.getrandbits(48):012x}"
    if rng.random() < 0.03:
        return MemberResult(rollout_id=rollout_id, group_id="", failure=rng.choice(["timeout", "no_reward"]))
    ids = [rng.randrange(1000) for _ in range(2 * tokens)]
    turn = Turn(
        prompt_ids=ids[:tokens], response_ids=ids[tokens:], messages=({"role": "user", "content": "?"},), text="!"
    )
    sample = Sample(
        tokens=ids,
        response_length=tokens,
        loss_mask=[1] * tokens,
        rollout_log_probs=[-rng.random() for _ in range(tokens)],
        status=Sample.Status.COMPLETED,
        weight_versions=[str(iteration - 1)],
        metadata={"agl_rollout_id": rollout_id, "segment": 0, "weight_spans": [[str(iteration - 1), 0, tokens]]},
    )
    reward = float(rng.random() < iteration / 1000)
    return MemberResult(
        rollout_id=rollout_id,
        group_id="",
        samples=(sample,),
        reward=reward,
        rewards={"primary": reward},
        sampled_tokens=tokens,
        turns=1,
        trajectory=Trajectory(rollout_id=rollout_id, attempt_id="a", task={"q": 1}, turns=(turn,)),
        timeline={"enqueued": 0.0, "started": 0.1, "ended": 1.0, "calls": [[0.2, 0.9]]},
    )


def write_run(path: Path, iterations: int, tokens: int = 150) -> None:
    run = open_run_dir(path, agent="benchmark", settings={"num_iterations": iterations}, overwrite=True)
    rollouts, metrics = RolloutWriter(run), MetricsWriter(run.metrics, warn=lambda *_: None)
    rollouts.tokenizer = TOKENIZER
    rng = random.Random(0)
    for iteration in range(1, iterations + 1):
        groups = [
            GroupResult(
                group_id=f"{rng.getrandbits(128):032x}",
                mode="train",
                size=4,
                members=tuple(a_member(rng, iteration, tokens) for _ in range(4)),
                ready=True,
            )
            for _ in range(16)
        ]
        samples = [sample for group in groups for member in group.succeeded for sample in member.samples]
        scores = [np.asarray(sample.rollout_log_probs, dtype=np.float32) for sample in samples]
        rollouts.handle(GroupsCollected(iteration=iteration, groups=groups))
        rollouts.handle(BatchTrained(iteration=iteration, samples=samples, log_probs=scores, advantages=scores))
        values: dict[str, Any] = {f"train/metric_{n}": rng.gauss(0, 1) for n in range(40)}
        values |= {"rollout/reward_mean": iteration / 1000 + rng.gauss(0, 0.05), "train/entropy": 1 / iteration}
        finished = IterationFinished(iteration=iteration, metrics=values)
        metrics.handle(finished)
        rollouts.handle(finished)
    rollouts.handle(RunFinished())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--dir", type=Path, default=None, help="keep the run here, and take it where it is there")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    path = arguments.dir or Path(tempfile.mkdtemp()) / "run"
    if not (path / "metrics.jsonl").exists():
        write_run(path, arguments.iterations)
    began = time.perf_counter()
    report = write_report([path])
    told: dict[str, Any] = {"write_s": time.perf_counter() - began, "report_mb": report.stat().st_size / 1e6}
    told["rollouts_jsonl_mb"] = (path / "rollouts.jsonl").stat().st_size / 1e6
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for attempt in range(3):
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(report.as_uri())
            page.wait_for_selector("figure canvas")
            told[f"first_paint_ms_{attempt}"] = page.evaluate(PAINT)
            told[f"charts_ms_{attempt}"] = page.evaluate("performance.now()")
            if attempt == 2:
                page.evaluate("location.hash = '#rollouts/0'")
                page.wait_for_selector(".rows .row")
                told["in_table"] = page.inner_text("main p[role=status]")
                told |= page.evaluate(SCROLL)
            page.close()
        browser.close()
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
