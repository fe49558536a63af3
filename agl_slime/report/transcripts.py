"""Sample transcripts: a few rollouts per iteration in full, as Markdown for people (a file per iteration) and as JSON
lines for programs.

The loop asks ``TranscriptWriter.wanted(iteration)``, picks rollouts with ``choose_rollouts``, describes only these
(``transcript_sample``) and passes them on in a ``TranscriptsSampled`` event.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_slime.errors import TraceError
from agl_slime.report.artifact import Artifact
from agl_slime.report.events import Event, Mode, TranscriptsSampled
from agl_slime.report.jsonl import IterationFile, dump_line, jsonable
from agl_slime.report.transcript_markdown import shorten, to_markdown

if TYPE_CHECKING:
    from agl_slime.types import Sample

MOST_MESSAGES, MOST_SAMPLES = 200, 8  # per rollout
MOST_TOKENS = 4000  # per segment; the middle of a longer one is left out before it is decoded


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Neighbouring tokens with the same loss mask, as text. ``left_out`` tokens in the middle are not shown."""

    text: str
    trained: bool
    tokens: int
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class TranscriptSample:
    """One training sample of a rollout: prompt and response as segments, in order."""

    segments: Sequence[Segment]
    prompt_tokens: int
    response_tokens: int
    trained_tokens: int
    stop_reason: str
    weight_versions: Sequence[str]
    token_source: str


@dataclass(frozen=True, kw_only=True)
class TranscriptItem:
    """One rollout to show.

    ``label`` says why it was chosen, ``messages`` are chat messages (role, content), ``rewards`` the named rewards
    where there are several.
    """

    rollout_id: str
    label: str
    task: Any = None
    messages: Sequence[Mapping[str, Any]] = ()
    samples: Sequence[TranscriptSample] = ()
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    outcome: str = ""
    reason: str = ""
    mode: Mode = "train"


def choose_rollouts(rewards: Mapping[str, float | None], *, iteration: int, seed: int = 0) -> dict[str, str]:
    """Rollout id → ``"best"``, ``"worst"``, ``"random"`` or ``"failed"`` (the first one without a reward).

    The first of equals is taken, and the random one depends on ``seed``, ``iteration`` and the order of ``rewards``
    only.
    """
    scored = [(rollout_id, reward) for rollout_id, reward in rewards.items() if reward is not None]
    chosen: dict[str, str] = {}
    if scored:
        chosen[max(scored, key=lambda item: item[1])[0]] = "best"
        chosen.setdefault(min(scored, key=lambda item: item[1])[0], "worst")
        others = [rollout_id for rollout_id, _ in scored if rollout_id not in chosen]
        if others:
            chosen[random.Random(f"{seed}:{iteration}").choice(others)] = "random"
    failed = next((rollout_id for rollout_id, reward in rewards.items() if reward is None), None)
    if failed is not None:
        chosen[failed] = "failed"
    return chosen


def transcript_sample(sample: Sample, decode: Callable[[Sequence[int]], str]) -> TranscriptSample:
    """Describe a training sample; ``decode`` turns token ids into text, special tokens included.

    Without a loss mask the whole response is trained, as in slime. Raises ``TraceError`` when mask and response differ
    in length.
    """
    tokens, length = sample.tokens, sample.response_length
    prompt = tokens[: len(tokens) - length]
    response = tokens[len(tokens) - length :]
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * length
    if len(mask) != length:
        raise TraceError(
            f"loss_mask has {len(mask)} entries, the response {length} tokens; a transcript cannot show which were trained"
        )
    segments = [_segment(prompt, False, decode)] if prompt else []
    start = 0
    for end in range(1, length + 1):
        if end == length or bool(mask[end]) != bool(mask[start]):
            segments.append(_segment(response[start:end], bool(mask[start]), decode))
            start = end
    metadata = sample.metadata or {}
    return TranscriptSample(
        segments=segments,
        prompt_tokens=len(prompt),
        response_tokens=length,
        trained_tokens=sum(1 for value in mask if value),
        stop_reason=str(metadata.get("finish_reason") or sample.status.value),
        weight_versions=tuple(str(version) for version in sample.weight_versions),
        token_source=str(metadata.get("token_source") or "engine"),
    )


def _segment(ids: Sequence[int], trained: bool, decode: Callable[[Sequence[int]], str]) -> Segment:
    left_out = max(len(ids) - MOST_TOKENS, 0)
    if left_out:
        half = MOST_TOKENS // 2
        text = f"{decode(ids[:half])} … {left_out} tokens left out … {decode(ids[-half:])}"
    else:
        text = decode(ids)
    return Segment(text=text, trained=trained, tokens=len(ids), left_out=left_out)


class TranscriptWriter:
    """Writes ``transcripts.jsonl`` and ``<iteration>.md`` into ``directory``, at most ``most_bytes`` in all.

    So that a long run is covered to its end, the iterations that are written grow sparser: every time half of the room
    left is used, the stride between them doubles.
    """

    def __init__(self, directory: str | os.PathLike[str], *, most_bytes: int = 64 * 2**20) -> None:
        self._directory = Path(directory)
        self._jsonl = IterationFile(self._directory / "transcripts.jsonl")
        self._stride = 1
        self._room = most_bytes - _size(self._directory)
        self._next_halving = self._room // 2

    def wanted(self, iteration: int) -> bool:
        """Whether transcripts of this iteration will be written; may be called from any thread."""
        return self._room > 0 and iteration % self._stride == 0

    def handle(self, event: Event) -> None:
        if isinstance(event, TranscriptsSampled) and event.items and self.wanted(event.iteration):
            self._write(event)

    def close(self) -> None:
        self._jsonl.close()

    def artifact(self) -> Artifact:
        return Artifact("transcripts", self._directory, "no rollout was sampled")

    def _write(self, event: TranscriptsSampled) -> None:
        items = [
            replace(item, messages=item.messages[:MOST_MESSAGES], samples=item.samples[:MOST_SAMPLES])
            for item in event.items
        ]
        page = to_markdown(event.iteration, items).encode("utf-8", "backslashreplace")
        records = [_shortened(jsonable(item)) for item in items]
        size = len(page) + sum(len(dump_line({"iteration": event.iteration, **record})) for record in records)
        if size > self._room:  # ask ever more rarely: a smaller one may still fit
            self._stride *= 2
            return
        self._directory.mkdir(parents=True, exist_ok=True)
        self._jsonl.append(event.iteration, records)
        (self._directory / f"{event.iteration:05d}.md").write_bytes(page)
        self._room -= size
        while self._room < self._next_halving:
            self._next_halving //= 2
            self._stride *= 2


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return shorten(value)
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    return [_shortened(item) for item in value] if isinstance(value, list) else value


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*") if path.is_file()) if directory.is_dir() else 0
