"""Fast digests of a model's files, by which a changed model is recognized."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_WEIGHTS = ("*.safetensors", "*.bin")
_READ_WHOLE = ("config.json", "generation_config.json", "*processor_config.json", "*.index.json", "tokenizer*")
_READ_WHOLE += ("vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*")
_BLOCK = 4096  # bytes of each sample of a tensor
_MOST_HEADER = 100_000_000  # bytes, by the format's definition
_SAMPLES = 256  # of a file of weights that is not safetensors


def model_digests(directory: Path) -> dict[str, str]:
    """A digest of each file of the model by its name. Weights are sampled: the header, and the beginning, middle and
    end of every tensor, because a training step changes all tensors. Configuration, tokenizer and chat template are
    read whole."""
    digests = {}
    for pattern in (*_READ_WHOLE, *_WEIGHTS):
        for path in directory.glob(pattern):
            if not path.is_file():
                continue
            size = path.stat().st_size
            digest = hashlib.blake2b(str(size).encode(), digest_size=16)
            with path.open("rb") as file:
                whole = pattern in _READ_WHOLE
                for block in [file.read()] if whole else _sampled(file, size, header=path.suffix == ".safetensors"):
                    digest.update(block)
            digests[path.name] = digest.hexdigest()
    return dict(sorted(digests.items()))


def _sampled(file: IO[bytes], size: int, *, header: bool) -> Iterator[bytes]:
    length = int.from_bytes(file.read(8), "little")
    if header and length <= min(size, _MOST_HEADER):
        yield (text := file.read(length))
        try:
            tensors = json.loads(text)
            offsets = [tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"]
            spans = [(8 + length + int(start), 8 + length + int(end)) for start, end in offsets]
        except (ValueError, TypeError, KeyError, AttributeError):  # not safetensors: loading it will fail
            spans = []
    else:
        spans = [(size * n // _SAMPLES, size * (n + 1) // _SAMPLES) for n in range(_SAMPLES)]
    for start, end in sorted(spans):
        for position in sorted({start, (start + end) // 2, max(start, end - _BLOCK)}):
            file.seek(position)
            yield file.read(min(_BLOCK, end - position))
