"""Sample transcripts: a few rollouts per iteration in full, as Markdown for people (a file per iteration) and as JSON
lines for programs.

An item of a ``TranscriptsSampled`` event is a dict: ``rollout_id``,
``label`` (why it was chosen), ``reward``, and where they are known ``task``, ``messages`` (chat messages), ``samples``
(see ``describe_sample``), ``rewards``, ``outcome`` and ``reason``.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_slime.errors import TraceError
from agl_slime.report.events import Artifact, Event, TranscriptsSampled
from agl_slime.report.files import IterationFile, dump, jsonable

if TYPE_CHECKING:
    from agl_slime.types import Sample

MOST_MESSAGES, MOST_SAMPLES = 200, 8  # per rollout
MOST_TOKENS = 4000  # per segment; the middle of a longer one is left out before it is decoded
MOST_CHARACTERS = 20_000  # per text
OPEN, CLOSE = "⟦", "⟧"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def choose_rollouts(rewards: Mapping[str, float | None], *, iteration: int, seed: int = 0) -> dict[str, str]:
    """Rollout id → ``"best"``, ``"worst"``, ``"random"`` or ``"failed"`` (the first one without a reward).

    The random one depends on ``seed``, ``iteration`` and the order of ``rewards`` only.
    """
    scored = {rollout_id: reward for rollout_id, reward in rewards.items() if reward is not None}
    chosen: dict[str, str] = {}
    if scored:
        chosen[max(scored, key=scored.__getitem__)] = "best"
        chosen.setdefault(min(scored, key=scored.__getitem__), "worst")
        if others := [rollout_id for rollout_id in scored if rollout_id not in chosen]:
            chosen[random.Random(f"{seed}:{iteration}").choice(others)] = "random"
    chosen.update([(rollout_id, "failed") for rollout_id in rewards if rollout_id not in scored][:1])
    return chosen


def describe_sample(sample: Sample, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """A training sample for a transcript: prompt and response as ``segments`` of neighbouring tokens with the same loss
    mask, and its figures. Without a loss mask the whole response is trained, as in slime. Raises ``TraceError`` when
    mask and response differ in length."""
    tokens, length = sample.tokens, sample.response_length
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * length
    if len(mask) != length:
        raise TraceError(f"loss_mask has {len(mask)} entries, the response {length} tokens")
    n_prompt = len(tokens) - length
    segments = [_segment(tokens[:n_prompt], False, decode)] if n_prompt else []
    for trained, part in groupby(range(length), key=lambda at: bool(mask[at])):
        segments.append(_segment([tokens[n_prompt + at] for at in part], trained, decode))
    metadata = sample.metadata or {}
    return {
        "segments": segments,
        "prompt_tokens": n_prompt,
        "response_tokens": length,
        "trained_tokens": sum(1 for value in mask if value),
        "stop_reason": str(metadata.get("finish_reason") or sample.status.value),
        "weight_versions": [str(version) for version in sample.weight_versions],
        "token_source": str(metadata.get("token_source") or "engine"),
    }


def _segment(ids: Sequence[int], trained: bool, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    left_out, half = max(len(ids) - MOST_TOKENS, 0), MOST_TOKENS // 2
    shown = (decode(ids[:half]), f"{left_out} tokens left out", decode(ids[-half:])) if left_out else (decode(ids),)
    text = " … ".join(shown)
    return {"text": text, "trained": trained, "tokens": len(ids), "left_out": left_out}


class TranscriptWriter:
    """Writes ``transcripts.jsonl`` and ``<iteration>.md`` into ``directory``, at most ``most_bytes`` in all.

    So that a long run is covered to its end, the iterations that are written grow sparser: every time half of the room
    left is used, the stride between them doubles.
    """

    def __init__(self, directory: str | os.PathLike[str], *, most_bytes: int = 64 * 2**20) -> None:
        self._directory = Path(directory)
        self._jsonl = IterationFile(self._directory / "transcripts.jsonl")
        self._stride = 1
        self._room = most_bytes - sum(path.stat().st_size for path in self._directory.glob("*"))
        self._next_halving = self._room // 2

    def wanted(self, iteration: int) -> bool:
        """Whether transcripts of this iteration will be written."""
        return self._room > 0 and iteration % self._stride == 0

    def handle(self, event: Event) -> None:
        if not (isinstance(event, TranscriptsSampled) and event.items and self.wanted(event.iteration)):
            return
        limits = {"messages": MOST_MESSAGES, "samples": MOST_SAMPLES}
        items = [
            jsonable({key: value[: limits[key]] if key in limits else value for key, value in item.items()})
            for item in event.items
        ]
        page = to_markdown(event.iteration, items).encode("utf-8", "backslashreplace")
        records = [_shortened(item) for item in items]
        size = len(page) + sum(len(dump({"iteration": event.iteration, **record})) for record in records)
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

    def close(self) -> None:
        self._jsonl.close()

    def artifact(self) -> Artifact:
        return Artifact("transcripts", self._directory, "no rollout was sampled")


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    return _shorten(value, MOST_CHARACTERS) if isinstance(value, str) else value


def _shorten(text: str, most: int) -> str:
    half = most // 2
    left_out = len(text) - 2 * half
    return text if len(text) <= most else f"{text[:half]}\n… {left_out} characters left out …\n{text[-half:]}"


def to_markdown(iteration: int, items: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([f"# Iteration {iteration}", "", *(_rollout(item) for item in items)])


def marked(sample: Mapping[str, Any]) -> str:
    """The text of what ``describe_sample`` gives, with trained tokens between ``⟦`` and ``⟧``."""
    pieces = ((segment["text"], segment["trained"]) for segment in sample["segments"])
    return "".join(f"{OPEN}{text}{CLOSE}" if trained else text for text, trained in pieces)


def _rollout(item: Mapping[str, Any]) -> str:
    reward = "no reward" if item["reward"] is None else f"reward {item['reward']:g}"
    lines = [f"## {_inline(item['label'])}: {reward}", "", f"- rollout `{_inline(item['rollout_id'])}`"]
    if outcome := item.get("outcome"):
        lines.append(f"- outcome: {_inline(outcome)}" + (f" ({_inline(item['reason'])})" if item.get("reason") else ""))
    if rewards := item.get("rewards"):
        lines.append("- rewards: " + ", ".join(f"{_inline(name)} {value:g}" for name, value in rewards.items()))
    lines.append("")
    if item.get("task") is not None:
        lines += ["### Task", "", _fence(_json(item["task"]), "json")]
    if messages := item.get("messages"):
        lines += ["### Conversation", ""]
        for message in messages:
            lines += [f"**{_inline(str(message.get('role', '?')))}**", "", _fence(_content(message))]
    samples = item.get("samples") or ()
    for number, sample in enumerate(samples, start=1):
        which = f"Sample {number} of {len(samples)}" if len(samples) > 1 else "Sample"
        title = f"### {which}: trained tokens between {OPEN} and {CLOSE}"
        lines += [title, "", _figures(sample), "", _fence(marked(sample))]
    return "\n".join(lines)


def _figures(sample: Mapping[str, Any]) -> str:
    versions = ", ".join(dict.fromkeys(sample["weight_versions"])) or "unknown"
    return _inline(
        f"{sample['prompt_tokens']} prompt tokens, {sample['response_tokens']} response tokens, "
        f"{sample['trained_tokens']} trained; stop reason {sample['stop_reason']}; "
        f"weights {versions}; token ids: {sample['token_source']}"
    )


def _content(message: Mapping[str, Any]) -> str:
    parts = (message.get("content"), message.get("tool_calls"))
    return "\n".join(part if isinstance(part, str) else _json(part) for part in parts if part)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)


def _fence(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks in the text; control characters are spelled out."""
    body = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", _shorten(text, MOST_CHARACTERS))
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", body))])
    return f"{fence}{language}\n{body}\n{fence}\n"


def _inline(text: str) -> str:
    """One line of text that cannot end the line, the code span or the heading it stands in."""
    return re.sub(r"\s+", " ", _CONTROL.sub(" ", _shorten(text, 400))).replace("`", "'")
