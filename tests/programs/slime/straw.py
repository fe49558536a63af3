"""A manager that gives its batches to straw's durable queue, killed again and again; our data source is in front of it.

    python -m tests.programs.slime.straw DIRECTORY STORE_URL GROUPS KILLS SEED

slime's manager cannot be had whole (docs/slime-versions.md), so its part is retold here, with the real queue: a
collection per step is begun, published and completed as slime/data/{transport,queue_data_source}.py at 13b347f8 do it,
and noted in a journal as slime/ray/training_recovery.py at 0b0c277d does, which restores no data source of others'
under straw. This process forks the managers and kills them: at any moment, or between two of these writes.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

from straw.coordinator import Coordinator
from straw.protocol import Lease, Record, TaskSpec
from straw.store import SharedFilesystemStore

from agl_slime import AGLDataSource, slime_hooks
from agl_slime.support.files import write_file
from tests.harness.slime_programs import report

BATCH, SIZE = 10, 2
POINTS = ("generated", "published", "completed", "journalled")


def main(directory: Path, store_url: str, groups: int, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    steps = groups // BATCH
    died = 0
    while True:
        plan = {}
        if died < kills:
            first = read_journal(directory)
            plan = {"step": rng.randrange(first, min(first + 2 * steps // kills, steps)), "point": rng.choice(POINTS)}
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run_manager(directory, store_url, steps, plan)
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)  # never back into the parent's code
        if died < kills and rng.random() < 0.5:
            time.sleep(rng.uniform(0.05, 1.0))  # any moment will do, also one after it has died of itself
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        died += 1
    report({"kills": died, **json.loads((directory / "result.json").read_text())})


def read_journal(directory: Path) -> int:
    journal = directory / "journal.json"
    return json.loads(journal.read_text())["next"] if journal.exists() else 0


def run_manager(directory: Path, store_url: str, steps: int, plan: dict[str, Any]) -> None:
    args = Namespace(
        rollout_data_transport="straw",
        rollout_data_dir=str(directory / "pool"),
        rollout_batch_size=BATCH,
        n_samples_per_prompt=SIZE,
        reward_key=None,
        agl_store_url=store_url,
        agl_get_timeout_s=60,
    )
    source = AGLDataSource(args)
    source.state_dict()  # what the manager does at its start, also where it gives it back to nobody
    pool = directory / "pool"
    made = (pool / "control" / "journal.log").exists()
    if not made:  # a manager that is killed while it makes the pool leaves a part of it, with nothing inside
        shutil.rmtree(pool, ignore_errors=True)
    store = SharedFilesystemStore(str(pool), "rollout")
    queue = Coordinator(
        store,
        exclusive_owner="the manager before this one was killed",
        recover=made,
    )
    first = read_journal(directory)
    if not (directory / "journal.json").exists():  # loaded once in the life of a journal
        source.load(-1)
        write_file(directory / "journal.json", json.dumps({"next": 0}))

    def maybe_die(step: int, point: str) -> None:
        if plan == {"step": step, "point": point}:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(first, steps):
        samples = slime_hooks.generate_rollout(args, step, source).samples  # type: ignore[union-attr]
        maybe_die(step, "generated")
        lease = begin_collection(queue, step)
        payload = json.dumps([[sample.to_dict() for sample in group] for group in samples]).encode()
        metadata = {"task_id": lease.task_id, "attempt_id": lease.attempt_id}
        record = Record("batch", payload, metadata=metadata)
        ref = store.publish([record], submission_id=f"collection:{lease.attempt_id}")
        maybe_die(step, "published")
        queue.complete_task(lease, submission_id=f"result:{lease.attempt_id}", result_ref=ref, result_digest=ref.digest)
        maybe_die(step, "completed")
        write_file(directory / "journal.json", json.dumps({"next": step + 1}))
        maybe_die(step, "journalled")
    counts = source.groups.ledger.counts()
    batches = [accepted(store, queue, step) for step in range(steps)]
    names = [sample["metadata"]["agl_rollout_id"] for batch in batches for group in batch for sample in group]
    result = {
        "groups": sum(map(len, batches)),
        "rollouts": len(names),
        "distinct": len({*names}),
        "ledger": {outcome.value: n for outcome, n in counts.closed.items()},
        "open": counts.open + counts.ready,
    }
    write_file(directory / "result.json", json.dumps(result))
    source.close()


def begin_collection(queue: Coordinator, step: int) -> Lease:
    task_id = f"collection:{step}"
    queue.submit_tasks(task_id, [TaskSpec(task_id, allow_empty=True, control=True, estimated_records=0)])
    status = queue.task_status(task_id)
    if status["state"] in ("leased", "completed"):
        return Lease(**status["lease"])
    [assignment] = queue.acquire("manager", 1, task_ids=[task_id], control=True).assignments
    return assignment.lease


def accepted(store: SharedFilesystemStore, queue: Coordinator, step: int) -> list[Any]:
    lease = begin_collection(queue, step)
    receipt = queue.lookup_submission(f"result:{lease.attempt_id}")
    return json.loads(next(iter(store.read(receipt.result_ref))).payload)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))  # type: ignore[call-arg]
