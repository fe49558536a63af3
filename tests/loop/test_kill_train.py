"""Short runs of ``end_train``, whose 24 ends take minutes; and the tokens that are sampled after a kill."""

import asyncio
import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.loop.checkpoint import Checkpoint, read_checkpoints
from agl_slime.report.files import iter_jsonl
from agl_slime.tokens.codec import unpack_token_ids
from tests.harness.training import model_info, needs_torch
from tests.programs.end_train import PHASES, SIGNALS, Scene, run

pytestmark = needs_torch


MIXED = list(zip(PHASES, SIGNALS + SIGNALS[2:], strict=True))
KILLS = [(phase, signal.SIGKILL) for phase in PHASES]
# with groups enough that some group of three iterations in a row has two different rewards
DROPPING = "--drop-zero-variance --rollout-batch-size 6 --group-min-ratio 0.6"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "max_staleness", "planned", "flags"),
    [
        ("local", 0, MIXED, ""),
        ("local", 2, MIXED, ""),
        ("slime", 2, MIXED, ""),
        ("local", 0, KILLS, ""),
        ("local", 2, KILLS, ""),
        ("local", 0, KILLS, DROPPING),
        ("local", 2, KILLS, DROPPING),
        ("local", 0, KILLS, f"{DROPPING} --task-sampling learnable --group-pilot 2"),
        ("local", 2, MIXED, "--task-sampling learnable"),
    ],
    ids=[
        "mixed",
        "mixed-2",
        "slime",
        "killed",
        "killed-2",
        "dropping",
        "dropping-2",
        "pilot",
        "learnable-2",
    ],
)
def test_tasks_are_trained_once_and_files_agree_after_each_end(tmp_path, trainer, max_staleness, planned, flags):
    """``python -m tests.programs.end_train`` has all pairs of a phase and a signal."""
    settings: dict[str, Any] = {"max_staleness": max_staleness, "trainer": trainer, "flags": flags}
    result = run(tmp_path, planned=planned, rng=random.Random(5), limit_s=600, **settings)
    assert result.findings == []
    assert result.by_phase.total() == len(PHASES)
    assert result.tasks > 0


@pytest.mark.slow
async def test_tokens_sampled_before_a_kill_are_not_sampled_again(tmp_path: Path) -> None:
    """Every token that the resumed run trains on was in the checkpoint or was sampled once since."""
    flags = "--rollout-batch-size 4 --n-samples-per-prompt 4 --max-staleness 2 --weight-pause retract --save-interval 1"
    with EmbeddedEngine(LOOKUP_POLICY) as engine:
        scene = Scene(tmp_path, flags=f"{flags} --eval-interval 0", limit_s=200, engine_url=engine.url)
        calls: list[dict[str, Any]] = []
        # until a checkpoint has a call that was aborted within its answer
        while not any(call["finish_reason"] == "abort" for call in calls):
            await asyncio.to_thread(train_and_kill, scene)
            newest = read_checkpoints(scene.output / "checkpoints")[0]
            lines = [json.loads(line) for line in newest.partial.read_text().splitlines()]
            calls = [call for line in lines for call in line["calls"]]
        saved = tokens_in(newest)
        async with SGLangClient(base_url=engine.url) as client:
            await client.abort()  # what the killed process has left
        earlier = model_info(engine.url)["tokens_sampled"]
        last, _ = await asyncio.to_thread(scene.begin, newest.loop.iteration + 4, cold=False)
        await asyncio.to_thread(last.join, 150)
        assert last.exitcode == 0, scene.last_words()
        sampled = model_info(engine.url)["tokens_sampled"] - earlier - 1  # one was a probe for weight versions
    trained = [row["train/tokens_trained"] for row in scene.rows() if row["iteration"] > newest.loop.iteration]
    groups = [row for row in iter_jsonl(scene.output / "groups.jsonl") if row["iteration"] > newest.loop.iteration]
    lost = [(group["outcomes"], group["reasons"]) for group in groups if {*group["outcomes"]} != {"trained"}]
    assert len(trained) == 4
    assert (sum(trained), lost) == (saved + sampled, [])
    assert saved > 100


def tokens_in(checkpoint: Checkpoint) -> int:
    """The sampled tokens in a checkpoint: of its ready groups, and of rollouts outside of them."""
    ready = [sample for group in checkpoint.data_source["groups"] for sample in group]
    instances = {sample["metadata"]["instance_id"] for sample in ready}
    rows = [json.loads(line) for line in checkpoint.partial.read_text().splitlines()]
    calls = [call for row in rows if row["instance_id"] not in instances for call in row["calls"]]
    return sum(sum(sample["loss_mask"]) for sample in ready) + sum(
        len(unpack_token_ids(c["output_ids"])) for c in calls
    )


def train_and_kill(scene: Scene) -> None:
    process, reader = scene.begin(1000, cold=False)
    try:
        scene.wait_for_phase(process, reader, "train", times=2)
        time.sleep(0.5)  # the kill comes in the middle of something
    finally:
        process.kill()
        process.join()
        reader.close()
