"""Sample transcripts: a few rollouts per iteration in full, as Markdown for people (a file per iteration) and as JSON
lines for programs."""

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
from agl_slime.events import Event, GroupsCollected
from agl_slime.report.files import IterationFile, jsonable, size_of

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


def describe_rollout(member: Any, label: str, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """An ``agl_slime.groups.results.MemberResult`` for a transcript; ``label`` says why it was chosen."""
    return {
        "rollout_id": member.rollout_id,
        "label": label,
        "task": member.task,
        "messages": member.trajectory.messages[:MOST_MESSAGES] if member.trajectory is not None else [],
        "samples": [describe_sample(sample, decode) for sample in member.samples[:MOST_SAMPLES]],
        "reward": member.reward,
        "rewards": member.rewards,
        "outcome": "succeeded" if member.ok else member.outcome_if_failed.value,
        "reason": member.failure_message or member.failure or "",
    }


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


class Room:
    """How much may still be written. So that a long run is covered to its end, the iterations that are written grow
    sparser: every time half of the room left is used, the stride between them doubles."""

    def __init__(self, n_bytes: int) -> None:
        self._left, self._stride = n_bytes, 1
        self._next_halving = n_bytes // 2

    def open(self, iteration: int) -> bool:
        """Whether this iteration is one that is written."""
        return self._left > 0 and iteration % self._stride == 0

    def take(self, n_bytes: int) -> bool:
        """Use so many; False when they do not fit, and then it opens ever more rarely: a smaller one may still fit."""
        if n_bytes > self._left:
            self._stride *= 2
            return False
        self._left -= n_bytes
        while self._left < self._next_halving:
            self._next_halving //= 2
            self._stride *= 2
        return True


class TranscriptWriter:
    """Writes ``transcripts.jsonl`` and ``<iteration>.md`` into ``directory``, at most ``most_bytes`` in all (see
    ``Room``); nothing before it has a ``tokenizer``."""

    note = "no rollout was sampled"

    def __init__(self, directory: str | os.PathLike[str], *, seed: int = 0, most_bytes: int = 64 * 2**20) -> None:
        self.path = Path(directory)
        self.tokenizer: Any = None
        self._seed = seed
        self._jsonl = IterationFile(self.path / "transcripts.jsonl")
        self._room = Room(most_bytes - sum(path.stat().st_size for path in self.path.glob("*")))

    def handle(self, event: Event) -> None:
        if not isinstance(event, GroupsCollected) or self.tokenizer is None:
            return
        if not self._room.open(event.iteration):
            return
        members = {member.rollout_id: member for group in event.groups for member in group.members}
        rewards = {rollout_id: member.reward for rollout_id, member in members.items()}
        chosen = choose_rollouts(rewards, iteration=event.iteration, seed=self._seed)
        items = [
            jsonable(describe_rollout(members[rollout_id], label, self.tokenizer.decode))
            for rollout_id, label in chosen.items()
        ]
        page = to_markdown(event.iteration, items).encode("utf-8", "backslashreplace")
        records = [shortened(item) for item in items]
        size = len(page) + size_of(event.iteration, records)
        if not self._room.take(size):
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._jsonl.append(event.iteration, records)
        (self.path / f"{event.iteration:05d}.md").write_bytes(page)

    def close(self) -> None:
        self._jsonl.close()


def shortened(value: Any, most: int = MOST_CHARACTERS, *, whole: re.Pattern[str] | None = None) -> Any:
    """``value`` with texts of more than ``most`` characters cut in their middle, but those that are ``whole``."""
    if isinstance(value, dict):
        return {key: shortened(item, most, whole=whole) for key, item in value.items()}
    if isinstance(value, list):
        return [shortened(item, most, whole=whole) for item in value]
    if not isinstance(value, str) or len(value) <= most or (whole is not None and whole.fullmatch(value)):
        return value
    half = most // 2
    return f"{value[:half]}\n… {len(value) - 2 * half} characters left out …\n{value[-half:]}"


def to_markdown(iteration: int, items: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join([f"# Iteration {iteration}", "", *(_rollout(item) for item in items)])


def marked(sample: Mapping[str, Any]) -> str:
    """The text of what ``describe_sample`` gives, with trained tokens between ``⟦`` and ``⟧``."""
    pieces = ((segment["text"], segment["trained"]) for segment in sample["segments"])
    return "".join(f"{OPEN}{text}{CLOSE}" if trained else text for text, trained in pieces)


def _rollout(item: Mapping[str, Any]) -> str:
    reward = "no reward" if item["reward"] is None else f"reward {item['reward']:g}"
    reason = f" ({_inline(item['reason'])})" if item["reason"] else ""
    lines = [f"## {item['label']}: {reward}", "", f"- rollout `{_inline(item['rollout_id'])}`"]
    lines.append(f"- outcome: {item['outcome']}{reason}")
    if rewards := item["rewards"]:
        lines.append("- rewards: " + ", ".join(f"{_inline(name)} {value:g}" for name, value in rewards.items()))
    lines.append("")
    if item["task"] is not None:
        lines += ["### Task", "", _fence(_json(item["task"]), "json")]
    if item["messages"]:
        lines += ["### Conversation", ""]
        for message in item["messages"]:
            lines += [f"**{_inline(str(message.get('role', '?')))}**", "", _fence(_content(message))]
    samples = item["samples"]
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
    body = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", shortened(text))
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`+", body))])
    return f"{fence}{language}\n{body}\n{fence}\n"


def _inline(text: str) -> str:
    """One line of text that cannot end the line, the code span or the heading it stands in."""
    return re.sub(r"\s+", " ", _CONTROL.sub(" ", shortened(text, 400))).replace("`", "'")
