"""slime's classes where slime is installed, else structural twins of them.

The twins have the fields, defaults and status values of slime v0.3.1; ``sample_from_fields`` drops fields that the
installed slime does not have. Importing this module raises ``UnknownVersionError`` with a slime that has one of these
classes elsewhere, or whose Samples have no ``rollout_id``.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from agl_slime.errors import UnknownVersionError
from agl_slime.support.arrays import array_from_json, array_to_json, images_from_json, images_to_json
from agl_slime.support.slime import KNOWN, find, installed
from agl_slime.support.slime import version as slime_version

HAS_SLIME = not TYPE_CHECKING and installed()
if not TYPE_CHECKING and HAS_SLIME:
    Sample, DataSource = find("Sample"), find("DataSource")
    RolloutFnTrainOutput, RolloutFnEvalOutput = find("RolloutFnTrainOutput"), find("RolloutFnEvalOutput")
else:

    @dataclass
    class Sample:
        """One training sample: prompt tokens followed by response tokens, with loss mask, log-probs and reward.

        ``tokens`` has ``len(prompt) + response_length`` ids; ``loss_mask`` and ``rollout_log_probs`` (natural log, at
        the sampling temperature) have ``response_length`` entries. ``rollout_id`` is shared by the samples that one
        rollout was split into.
        """

        class Status(Enum):
            PENDING = "pending"
            COMPLETED = "completed"
            TRUNCATED = "truncated"
            ABORTED = "aborted"
            FAILED = "failed"

        @dataclass
        class SpecInfo:
            spec_accept_token_num: int = 0
            spec_draft_token_num: int = 0
            spec_verify_ct: int = 0
            completion_token_num: int = 0

        @dataclass
        class PrefixCacheInfo:
            cached_tokens: int = 0
            total_prompt_tokens: int = 0

        group_index: int | None = None
        index: int | None = None
        rollout_id: int | None = None
        prompt: str | list[dict[str, str]] = ""
        tokens: list[int] = field(default_factory=list)
        multimodal_inputs: dict[str, Any] | None = None
        multimodal_train_inputs: dict[str, Any] | None = None
        multimodal_train_input_id: str | None = None
        apply_chat_template_kwargs: dict = field(default_factory=dict)
        response: str = ""
        response_length: int = 0
        label: str | None = None
        reward: float | dict[str, Any] | None = None
        loss_mask: list[int] | None = None
        weight_versions: list[str] = field(default_factory=list)
        rollout_log_probs: list[float] | None = None
        rollout_top_p_token_ids: Any = None
        rollout_top_p_token_offsets: Any = None
        rollout_routed_experts: Any = None
        remove_sample: bool = False
        teacher_log_probs: list[float] | None = None
        status: Status = Status.PENDING
        metadata: dict = field(default_factory=dict)
        generate_function_path: str | None = None
        custom_rm_path: str | None = None
        train_metadata: dict | None = None
        session_id: str | None = None
        non_generation_time: float = 0.0
        spec_info: SpecInfo = field(default_factory=SpecInfo)
        prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

        def to_dict(self) -> dict[str, Any]:
            counts = {"spec_info": {**vars(self.spec_info)}, "prefix_cache_info": {**vars(self.prefix_cache_info)}}
            return {**self.__dict__, **counts, "status": self.status.value}

        @staticmethod
        def from_dict(data: dict[str, Any]) -> Sample:
            values = {**data, "status": Sample.Status(data["status"])}
            for name, kind in (("spec_info", Sample.SpecInfo), ("prefix_cache_info", Sample.PrefixCacheInfo)):
                counts = data.get(name, {})  # other versions may lack or add fields
                values[name] = kind(**{count: counts[count] for count in kind.__dataclass_fields__ if count in counts})
            sample = Sample()
            sample.__dict__.update(values)  # keeps fields of another version, as slime does
            return sample

    class DataSource(abc.ABC):
        """The source of samples of slime's RolloutManager."""

        @abc.abstractmethod
        def get_samples(self, num_samples: int) -> list[list[Sample]]: ...

        @abc.abstractmethod
        def add_samples(self, samples: list[list[Sample]]) -> None: ...

        @abc.abstractmethod
        def save(self, rollout_id: Any) -> None: ...

        @abc.abstractmethod
        def load(self, rollout_id: Any = None) -> None: ...

        @abc.abstractmethod
        def __len__(self) -> int: ...

    @dataclass
    class RolloutFnTrainOutput:
        samples: list[list[Sample]]
        metrics: dict[str, Any] | None = None

    @dataclass
    class RolloutFnEvalOutput:
        data: dict[str, dict[str, Any]]
        metrics: dict[str, Any] | None = None


ARRAY_FIELDS = ("rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")
"""Fields of a ``Sample`` that are arrays here and tensors in slime."""


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """A ``Sample`` as JSON values."""
    values = sample.to_dict()
    for name in ARRAY_FIELDS:
        if values.get(name) is not None:
            values[name] = array_to_json(values[name])
    if values.get("multimodal_inputs"):  # the trainer's inputs are recomputed from them
        values |= {"multimodal_inputs": images_to_json(values["multimodal_inputs"]), "multimodal_train_inputs": None}
    return values


def sample_from_json(values: dict[str, Any]) -> Sample:
    """A ``Sample`` from the values of ``sample_to_json``."""
    packed = {name: values[name] for name in ARRAY_FIELDS if isinstance(values.get(name), dict)}
    arrays: dict[str, Any] = {name: array_from_json(array) for name, array in packed.items()}
    if values.get("multimodal_inputs"):
        arrays["multimodal_inputs"] = images_from_json(values["multimodal_inputs"])
    return Sample.from_dict({**values, **arrays})


_SAMPLE_FIELDS = frozenset(Sample.__dataclass_fields__)
if "rollout_id" not in _SAMPLE_FIELDS:  # up to v0.3.0
    raise UnknownVersionError(f"Sample of {slime_version()} has no rollout_id, new in v0.3.1; supported are {KNOWN}")


def sample_from_fields(**fields: Any) -> Sample:
    """A ``Sample`` with these fields, except ones that the installed slime does not have."""
    return Sample(**{name: value for name, value in fields.items() if name in _SAMPLE_FIELDS})


def flat_samples(samples: Iterable[Any]) -> Iterator[Sample]:
    """The samples of a flat list, of groups, or of groups of siblings, in order."""
    for item in samples:
        if isinstance(item, list | tuple):
            yield from flat_samples(item)
        else:
            yield item


def staleness_spans(sample: Any, policy: int | None) -> Iterator[tuple[int, int, int]]:
    """Spans (staleness, start, end) of a response: the number of weight versions that sampled tokens are behind
    ``policy``. Spans whose version is not a whole number are left out."""
    for version, start, end in (sample.metadata or {}).get("weight_spans") or ():
        if policy is not None and str(version).isdecimal() and end > start:
            yield max(0, policy - int(version)), start, end


def staleness_of(samples: Iterable[Any], policy_of: Callable[[Any], int | None]) -> tuple[float, int] | None:
    """Mean over tokens and maximum of the staleness behind the policy that ``policy_of`` returns for each sample;
    ``None`` when it is unknown for all."""
    behind = [
        (age, end - start) for sample in samples for age, start, end in staleness_spans(sample, policy_of(sample))
    ]
    if not behind:
        return None
    mean = sum(age * tokens for age, tokens in behind) / sum(tokens for _, tokens in behind)
    return mean, max(age for age, _ in behind)
