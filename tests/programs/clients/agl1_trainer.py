"""Agent Lightning 1.0's trainer on a recorded rollout: python tests/programs/clients/agl1_trainer.py URL. Runs in a
Python with agentlightning 1.x; its trainer's own packages (numpy, httpx-retries) may be missing."""

import json
import sys
from typing import Any

import httpx


class Recorder:
    """Answers the trainer's requests for events with a recorder's."""

    def __init__(self, url: str) -> None:
        self._url = url

    def get(self, path: str, *, params: Any) -> httpx.Response:
        return httpx.get(self._url, params={"format": "triplet"})


def main(url: str) -> dict[str, Any]:
    try:
        from agentlightning.verl.agl_rollout_manager import AglRolloutManagerBase, EnqueuedRollout
    except ImportError as error:
        return {"missing": str(error)}
    from agentlightning.schemas import Rollout

    manager = object.__new__(AglRolloutManagerBase)  # its constructor registers at a server
    manager.client = Recorder(url)
    enqueued = EnqueuedRollout(data_id="d", rollout_id="one", step=0, sample_idx_in_step=0, enqueue_time=0.0)
    status = {"state": "succeeded", "created_at": 0.0, "updated_at": 0.0}
    rollout = Rollout.model_validate({"rollout_id": "one", "input": None, "config": {}, "status": status})
    done = manager._build_completed_rollout(enqueued, rollout)
    return {"reward": done.final_reward, "triplets": [triplet.model_dump() for triplet in done.triplets or ()]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
