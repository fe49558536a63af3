"""slime's debug dumps, read as untrusted files: ``torch.load`` with ``weights_only`` on regular files, an inert
stand-in for every unknown class, and no field of another type than slime's."""

from __future__ import annotations

import math
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from agl_slime.errors import missing_as_error
from agl_slime.report.records import misfit
from agl_slime.types import Sample, sample_from_fields

MOST_SAMPLES = 1_000_000  # in a file
_METADATA: dict[str, Any] = {"weight_spans": [[str, int, int]], "turn_spans": [[int, int]]}
_METADATA |= {"segment": int, "turns": int}
_METADATA |= {"fork_reason": str, "token_source": str, "stop_reason": str, "finish_reason": str, "source_name": str}
_METADATA |= {"instance_id": str}
_METADATA["tools"] = {"offered": [str], "calls": {str: int}, "malformed": int, "failed": {str: int}}
_METADATA["tools"] |= {"failures": {str: str}, "example": str}
_STATUS = {status.value: status for status in Sample.Status}
_reading = threading.Lock()  # torch has one list of safe classes per process


class _Absent:
    """A stand-in for an object of a class that is not loaded, such as an image or a user's class."""

    def __new__(cls, *_: Any, **__: Any) -> _Absent:
        return object.__new__(cls)

    def __setstate__(self, _: Any) -> None: ...


class _DType(_Absent):
    name: str

    def __new__(cls, name: Any = "", *_: Any) -> _DType:
        dtype = object.__new__(cls)
        dtype.name = name if name in ("f4", "f8", "i4", "i8", "b1") else ""
        return dtype


def _scalar(kind: Any = None, raw: Any = b"", *_: Any) -> Any:
    """A little-endian scalar of numpy."""
    name = getattr(kind, "name", "")
    valid = name and isinstance(raw, bytes) and len(raw) == int(name[1])
    return np.frombuffer(raw, name if name == "b1" else f"<{name}")[0].item() if valid else None


_STAND_INS: dict[str, Any] = {"numpy.dtype": _DType}
_STAND_INS |= dict.fromkeys(("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"), _scalar)


def load(path: Path) -> Mapping[str, Any]:
    """The dictionary that ``torch.save`` wrote. Any other file is a ``ValueError`` about it."""
    with missing_as_error("slime's files need torch: pip install 'agl-slime[local]'"):
        import torch
    if not path.is_file():  # reading a FIFO would hang
        raise ValueError("is not a regular file")
    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("is compressed, as torch.save never does")
        with _reading:
            unknown = torch.serialization.get_unsafe_globals_in_checkpoint(path)
            stand_ins: list[Any] = [(_STAND_INS.get(name, _Absent), name) for name in unknown]
            with torch.serialization.safe_globals(stand_ins):
                # no mmap: a file that shrinks while it is read would kill this process
                value = torch.load(path, map_location="cpu", weights_only=True)
    except zipfile.BadZipFile:
        raise ValueError("is not a whole file of torch.save") from None
    except ValueError:
        raise
    except Exception as error:  # a file can make the loader raise anything
        text = " ".join(str(error).split(". ")[0].split())
        raise ValueError(f"cannot be loaded ({type(error).__name__}: {text:.160})") from None
    if not isinstance(value, dict):
        raise ValueError(f"holds a {type(value).__name__}, no dictionary")
    return value


@dataclass(frozen=True, kw_only=True)
class DumpedSample:
    """A Sample of a dump; ``rewards`` by name where slime has several, ``messages`` of the prompt."""

    sample: Sample
    reward: float | None
    rewards: dict[str, float]
    messages: tuple[dict[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class TrainedRow:
    """The trainer's figures of one Sample, arrays per response token; ``None`` where the file has none."""

    mask: np.ndarray
    engine: np.ndarray | None = None
    log_probs: np.ndarray | None = None
    advantages: np.ndarray | None = None
    returns: np.ndarray | None = None
    kl: np.ndarray | None = None
    """The KL term that slime shapes rewards with."""
    ref_log_probs: np.ndarray | None = None
    teacher_log_probs: np.ndarray | None = None
    values: np.ndarray | None = None
    """The critic's."""
    reward: float | None = None
    """After slime's normalisation."""
    raw_reward: float | None = None


_COLUMNS = {name: name for name in ("log_probs", "advantages", "returns", "kl", "ref_log_probs", "teacher_log_probs")}
_COLUMNS |= {"engine": "rollout_log_probs", "values": "values"}


def samples_of(value: Mapping[str, Any]) -> Iterator[DumpedSample | str]:
    """The Samples of a rollout dump; for an invalid one, its error text."""
    rows = value.get("samples")
    if not isinstance(rows, list) or len(rows) > MOST_SAMPLES:
        raise ValueError("holds no samples of slime")
    for row in rows:
        yield _sample(row) if isinstance(row, dict) else "is no dictionary"


def is_train_dump(value: Mapping[str, Any]) -> bool:
    return "dp_shards" in value or "rollout_data" in value


def trained_rows(value: Mapping[str, Any]) -> Iterator[tuple[bytes, TrainedRow]]:
    """The rows of a train dump, each with the key of its Sample (``key_of``), from files of 624b824 and from older ones
    with columns per rank. Invalid rows are left out."""
    data = value.get("rollout_data")
    rows, raw_rewards = value.get("samples"), value.get("raw_reward")
    if isinstance(data, dict):
        length = len(lengths) if isinstance(lengths := data.get("response_lengths"), list) else 0
        columns = {name: column for name, column in data.items() if isinstance(column, list) and len(column) == length}
        rows = [{name: column[index] for name, column in columns.items()} for index in range(length)]
        for row, place in zip(rows, columns.get("partition", ()), strict=False):
            row["rollout_position"] = place
        raw_rewards = data.get("raw_reward")
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, dict) or (tokens := numbers(row.get("tokens"), "iu")) is None:
            continue
        length, place = row.get("response_lengths"), row.get("rollout_position")
        mask = numbers(row.get("loss_masks"), "iub")
        if type(length) is not int or mask is None or len(mask) != length or length > len(tokens):
            continue
        raw = None
        if isinstance(raw_rewards, list) and type(place) is int and 0 <= place < len(raw_rewards):
            raw = raw_rewards[place]
        figures: dict[str, Any] = {name: numbers(row.get(key), "f", length=length) for name, key in _COLUMNS.items()}
        figures |= {"reward": _number(row.get("rewards")), "raw_reward": _finite(raw)}
        yield key_of(tokens, length), TrainedRow(mask=mask.astype(bool), **figures)


def optimizer_steps(value: Mapping[str, Any]) -> int:
    """The optimizer steps of a train dump; 0 if the file does not say."""
    shards = value.get("dp_shards")
    data = shards[0] if isinstance(shards, list) and shards else value.get("rollout_data")
    sizes = data.get("global_batch_sizes") if isinstance(data, dict) else None
    return len(sizes) if isinstance(sizes, list) else 0


def key_of(tokens: Any, length: int) -> bytes:
    """The ids and response length, which a Sample and its row of the train dump share."""
    return length.to_bytes(8, "little") + np.asarray(tokens, dtype="<i8").tobytes()


def numbers(value: Any, kinds: str, *, length: int | None = None) -> np.ndarray | None:
    """A list of numbers or a valid tensor of one dimension as an array; ``None`` for anything else. ``kinds``
    are numpy's letters; ``f`` accepts integers as well."""
    if type(value) is list:
        types = {float, int} if kinds == "f" else {int}
        if not {*map(type, value)} <= types:
            return None
        try:
            array = np.asarray(value, dtype="f8" if kinds == "f" else "i8")
        except OverflowError:
            return None
    else:
        array = _array(value)
    if array is None or array.ndim != 1 or (len(array) and array.dtype.kind not in (kinds if kinds != "f" else "fiu")):
        return None
    if kinds == "f":
        with np.errstate(over="ignore"):
            array = array.astype("f4")
    return array if length is None or len(array) == length else None


def _array(value: Any) -> np.ndarray | None:
    """A valid tensor as an array; ``None`` for anything else."""
    import torch

    if type(value) is not torch.Tensor or value.layout != torch.strided or value.is_quantized:
        return None
    if not value.is_contiguous() or value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return None  # a view larger than its storage
    if value.dtype == torch.bfloat16 or value.is_complex():
        return value.float().numpy() if value.dtype == torch.bfloat16 else None
    return value.detach().numpy()


def _sample(row: Mapping[str, Any]) -> DumpedSample | str:
    length, tokens = row.get("response_length"), numbers(row.get("tokens"), "iu")
    if tokens is None:
        return "has no tokens"
    if len(tokens) and (tokens.min() < 0 or tokens.max() >= 2**31):
        return "has tokens that are not ids"
    if type(length) is not int or not 0 <= length <= len(tokens):
        return f"has response_length {_short(length)} for {len(tokens)} tokens"
    mask, scores = row.get("loss_mask"), numbers(row.get("rollout_log_probs"), "f", length=length)
    if mask is not None and (mask := numbers(mask, "iu", length=length)) is None:
        return f"has a loss_mask that does not fit its {length} tokens"
    fields = row["metadata"] if isinstance(row.get("metadata"), dict) else {}
    metadata = {
        name: fields[name] for name, shape in _METADATA.items() if name in fields and _fits(fields[name], shape)
    }
    versions = [version for version in _list(row.get("weight_versions")) if type(version) is str]
    if "weight_spans" not in metadata and len(set(versions)) == 1:
        metadata["weight_spans"] = [[versions[0], 0, length]]
    reward, rewards = _rewards(row.get("reward"))
    sample = sample_from_fields(
        group_index=_whole(row.get("group_index")),
        index=_whole(row.get("index")),
        rollout_id=_whole(row.get("rollout_id", row.get("group_id"))),
        tokens=tokens.tolist(),
        response=text if type(text := row.get("response")) is str else "",
        response_length=length,
        loss_mask=None if mask is None else (mask != 0).astype(int).tolist(),
        rollout_log_probs=None if scores is None else scores.tolist(),
        weight_versions=versions,
        remove_sample=row.get("remove_sample") is True,
        reward=reward,
        status=_STATUS.get(row["status"] if type(row.get("status")) is str else "", Sample.Status.FAILED),
        metadata=metadata,
        rollout_routed_experts=_experts(row.get("rollout_routed_experts"), rows=len(tokens) - 1),
        multimodal_train_inputs=_train_inputs(row.get("multimodal_train_inputs")),
    )
    return DumpedSample(sample=sample, reward=reward, rewards=rewards, messages=tuple(_messages(row.get("prompt"))))


def _experts(value: Any, *, rows: int) -> np.ndarray | None:
    """Routed experts ``[rows, layers, experts per token]``."""
    array = _array(value)
    fits = array is not None and array.ndim == 3 and len(array) == rows and array.dtype.kind in "iu"
    return array if fits and array is not None and array.min(initial=0) >= 0 else None


def _train_inputs(value: Any) -> dict[str, np.ndarray] | None:
    """The tensors that a processor made of images, by name."""
    if not isinstance(value, dict):
        return None
    arrays = {name: _array(tensor) for name, tensor in value.items() if type(name) is str}
    return {name: array for name, array in arrays.items() if array is not None} or None


def _fits(value: Any, shape: Any) -> bool:
    try:
        return not misfit(value, shape) and bool(orjson.dumps(value))  # refuses integers above 64 bits
    except TypeError:
        return False


def _messages(prompt: Any) -> Iterator[dict[str, str]]:
    """The messages of a prompt; a rendered text becomes one message."""
    if type(prompt) is str and prompt:
        yield {"role": "prompt", "content": prompt}
    for message in _list(prompt):
        if isinstance(message, dict):
            content = message.get("content")
            items = (item for item in _list(content) if isinstance(item, dict))
            texts = (item.get("text") or f"[{_short(item.get('type'))}]" for item in items)
            text = content if type(content) is str else "\n".join(map(_short, texts))
            yield {"role": _short(message.get("role") or "?"), "content": text}


def _rewards(value: Any) -> tuple[float | None, dict[str, float]]:
    """The reward, and rewards by name. Of several, the first counts as the trained one: the file does not say."""
    if isinstance(value, dict):
        numbers = {name: _finite(reward) for name, reward in value.items() if type(name) is str}
        named = {name: reward for name, reward in numbers.items() if reward is not None}
        return next(iter(named.values()), None), named
    reward = _finite(value)
    return reward, {} if reward is None else {"primary": reward}


def _finite(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _number(value: Any) -> float | None:
    """The number, which may be NaN, as slime's normalised reward of a group of one Sample."""
    import torch

    if type(value) is torch.Tensor and value.dim() == 0 and not value.is_complex():
        value = value.item()
    valid = type(value) in (int, float, bool) and not 1e300 <= abs(value) < math.inf
    return float(value) if valid else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and abs(value) < 2**63 else None


def _list(value: Any) -> Sequence[Any]:
    return value if type(value) is list else ()


def _short(value: Any) -> str:
    if type(value) is str:
        return f"{value:.20000}"
    return f"{value}"[:40] if type(value) is float or _whole(value) is not None else type(value).__name__
