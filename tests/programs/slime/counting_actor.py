"""A train actor in Megatron's place for ``kill_slime_overlap``; its checkpoints list the prompts of each step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray

from agl_slime.support.files import write_file
from benchmarks.slime_actor import SleepingActor


class CountingActor(SleepingActor):
    """``trained.json`` of a checkpoint has, by prompt, in which steps how many of its samples were trained on."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        super().init(args, role, with_ref, with_opd_teacher)
        self.trained: list[list[Any]] = []
        latest = Path(args.load or "") / "latest_checkpointed_iteration.txt"  # Megatron's name
        if not latest.is_file():
            return 0
        step = int(latest.read_text())
        self.trained = json.loads((Path(args.load) / f"iter_{step:07d}" / "trained.json").read_text())
        return step + 1

    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> None:
        super().train(rollout_id, rollout_data_ref, external_data)
        data: Any = ray.get(rollout_data_ref[self._rank].inner)
        for tokens, response in zip(data["tokens"], data["response_lengths"], strict=True):
            ids = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
            self.trained.append([rollout_id, ids[: len(ids) - int(response)]])

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        directory = Path(self.args.save) / f"iter_{rollout_id:07d}"
        directory.mkdir(parents=True, exist_ok=True)
        write_file(directory / "trained.json", json.dumps(self.trained))
        write_file(Path(self.args.save) / "latest_checkpointed_iteration.txt", str(rollout_id))
