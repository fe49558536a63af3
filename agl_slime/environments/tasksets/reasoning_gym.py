"""reasoning-gym's generated tasks: one or several weighted datasets, at a fixed or rising level of difficulty.

A task stores its dataset and position only. The entry is generated again for scoring, since JSON would not preserve
every value that the library's ``score_answer`` compares. Training and evaluation are disjoint for all seeds: a
question's digest decides its split.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

try:
    from reasoning_gym.factory import CURRICULA, DATASETS, create_curriculum, create_dataset
    from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer
except ImportError as e:
    raise ImportError("The taskset reasoning-gym needs its package: pip install reasoning-gym") from e

CHUNK = 500
"""Entries per seed of a dataset: some datasets generate all entries at once."""
CHUNKS = 100_003
"""Chunks per seed of the configuration, so that their seeds do not overlap: most datasets generate entry i from seed +
i."""
UNSTEADY = {"list_functions"}
"""Datasets whose entries cannot be repeated: they also draw from the process-wide generator."""


class ReasoningGymTaskConfig(vf.TaskConfig):
    unreadable: float | None = Field(None, ge=0, le=1)
    """The score of an answer on which the dataset's scorer raises (`prime_factorization` does on any text that is not
    numbers). Unset: such a rollout fails with the scorer's error."""


class ReasoningGymConfig(vf.TasksetConfig):
    datasets: dict[str, float] = Field(default_factory=dict)
    """Weights by the name of a dataset: `{"chain_sum": 2, "leg_counting": 1}`."""
    split: Literal["train", "eval"] = "train"
    """The split; no question is in both."""
    eval_share: float = Field(0.1, gt=0, lt=1)
    """The share of questions in `eval`."""
    size: int = Field(1000, gt=0)
    """Number of tasks; fewer if the datasets have fewer questions."""
    seed: int = 0
    level: int | None = Field(None, ge=0)
    """The level of each dataset's curriculum; unset: the dataset's defaults."""
    to_level: int | None = Field(None, ge=0)
    """With `level`: tasks rise from `level` to this one, in equal parts."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of each dataset's configuration, by dataset."""
    instructions: str = "default"
    """The name of one of reasoning-gym's system prompts."""
    task: ReasoningGymTaskConfig = ReasoningGymTaskConfig()


class ReasoningGymData(vf.TaskData):
    dataset: str
    options: str
    """The dataset's options, as JSON."""
    position: int
    level: int | None = None
    entry: dict[str, Any] | None = None
    """The entry itself, for datasets that cannot generate it again."""


@functools.lru_cache(maxsize=256)
def dataset_of(name: str, options: str, level: int | None) -> Any:
    """A dataset, shared by all of its tasks."""
    settings = json.loads(options)
    if level is None:
        return create_dataset(name, **settings)
    curriculum = create_curriculum(name)
    last = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=1) - 1
    if level > last:
        raise ValueError(f"reasoning-gym's {name} has no level {level}; its last is {last}")
    curriculum.set_global_level(level)
    return DATASETS[name][0](config=curriculum.generate_configuration(settings))


def entry_of(data: ReasoningGymData) -> tuple[Any, dict[str, Any]]:
    dataset = dataset_of(data.dataset, data.options, data.level)
    return dataset, data.entry or dataset[data.position]


class ReasoningGymTask(vf.Task[ReasoningGymData, vf.State, ReasoningGymTaskConfig]):
    @vf.reward
    async def correct(self, trace) -> float:
        """The library's score of the text between the last `<answer>` tags, in [0, 1]."""

        def score() -> float:
            dataset, entry = entry_of(self.data)
            answer = extract_answer(trace.last_reply or "")
            try:
                return float(dataset.score_answer(answer, entry))
            except Exception:
                if self.config.unreadable is None:
                    raise
                return self.config.unreadable

        return await asyncio.to_thread(score)


class ReasoningGymTaskset(vf.Taskset[ReasoningGymTask, ReasoningGymConfig]):
    def load(self) -> Iterator[ReasoningGymTask]:
        config = self.config
        if not config.datasets:  # verifiers' command line first builds a configuration from the id alone
            raise ValueError("reasoning-gym: name its datasets, such as --env reasoning-gym:chain_sum")
        for name in config.datasets:
            if name not in DATASETS:
                raise ValueError(f"reasoning-gym has no dataset {name!r}; it has {', '.join(sorted(DATASETS))}")
            if config.level is not None and name not in CURRICULA:
                raise ValueError(f"reasoning-gym's {name} has no curriculum; leave `level` out")
        if config.instructions not in SYSTEM_PROMPTS:
            raise ValueError(f"instructions {config.instructions!r}: one of {', '.join(SYSTEM_PROMPTS)}")
        draw = random.Random(f"{config.seed} {config.split}")
        names, weights = list(config.datasets), list(config.datasets.values())
        positions = dict.fromkeys(names, 0)
        digests: set[bytes] = set()
        made = 0
        while made < config.size and names:
            name = draw.choices(names, weights)[0]
            task = self._next(name, self._level(made), positions, digests)
            if task is None:  # this dataset has no more questions
                weights.pop(names.index(name))
                names.remove(name)
                continue
            made += 1
            yield task

    def _level(self, made: int) -> int | None:
        config = self.config
        if config.level is None or config.to_level is None:
            return config.level
        return config.level + made * (config.to_level - config.level + 1) // config.size

    def _next(
        self, name: str, level: int | None, positions: dict[str, int], digests: set[bytes]
    ) -> ReasoningGymTask | None:
        config = self.config
        for place in range(positions[name], positions[name] + 100 + int(20 / config.eval_share)):
            chunk, position = divmod(place, CHUNK)
            seed = (config.seed * CHUNKS + chunk) * CHUNK % 2**31
            options = json.dumps({"size": CHUNK, **config.options.get(name, {}), "seed": seed}, sort_keys=True)
            entry = dataset_of(name, options, level)[position]
            question = entry["question"]
            digest = hashlib.sha256(f"{name}\n{question}".encode()).digest()
            held_out = int.from_bytes(digest[:8], "big") < config.eval_share * 2**64
            if held_out != (config.split == "eval") or digest in digests:
                continue
            digests.add(digest)
            positions[name] = place + 1
            data = ReasoningGymData(
                name=f"{name}#{place}",
                prompt=question,
                system_prompt=SYSTEM_PROMPTS[config.instructions],
                dataset=name,
                options=options,
                position=position,
                level=level,
                entry=entry if name in UNSTEADY else None,
            )
            return ReasoningGymTask(data, config.task)
        return None
