"""Files as slime's --dump-details writes them (624b824)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_slime.types import Sample


def write_dump(
    directory: Path, number: int, samples: Sequence[Sample], columns: Mapping[str, Sequence[Any]] | None = None
) -> Path:
    """The dump of a rollout id; ``columns`` are the train data by slime's names, an entry per Sample."""
    import torch

    save(directory / "rollout_data" / f"{number}.pt", {"rollout_id": number, "samples": [s.to_dict() for s in samples]})
    if columns is None:
        return directory
    rows = []
    for place, sample in enumerate(samples):
        row = {"tokens": torch.tensor(sample.tokens), "response_lengths": sample.response_length}
        row |= {"loss_masks": torch.tensor(sample.loss_mask, dtype=torch.int), "rollout_position": place}
        row |= {"sample_index": sample.index, "data_parallel_rank": 0}
        row["rollout_log_probs"] = torch.tensor(sample.rollout_log_probs, dtype=torch.float32)
        values = {name: column[place] for name, column in columns.items()}
        row |= {n: v if isinstance(v, float) else torch.tensor(v, dtype=torch.float32) for n, v in values.items()}
        rows.append(row)
    layout = {"rank": 0, "data_parallel_rank": 0, "global_batch_sizes": [len(samples)]}
    whole = {"format_version": 2, "rollout_id": number, "rank": 0, "samples": rows, "dp_shards": [layout]}
    save(directory / "train_data" / f"{number}.pt", {**whole, "raw_reward": [sample.reward for sample in samples]})
    return directory


def save(path: Path, value: Any) -> Path:
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path
