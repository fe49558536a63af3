"""``RolloutFile``: one recorded rollout on disk, as lines of JSON: its task, its spans, its rewards, its end.

A line is written by one call before the answer that it records is sent, so a killed process loses no answer that a
client has. A torn last line belongs to an answer that no client received; readers skip it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agl_slime.errors import GatewayRequestError, RewardError, TraceError
from agl_slime.support.agl_types import Rollout, Span
from agl_slime.support.files import disk_full_as_error
from agl_slime.support.http import json_bytes
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.converter import convert_rollout, untrained_turns
from agl_slime.tokens.reward import UNNAMED, Reward, posted_reward, select_reward
from agl_slime.tokens.segments import Segment, merge_turns
from agl_slime.tokens.span_codec import decode_turns, is_packed
from agl_slime.tokens.turn import Turn
from agl_slime.types import sample_to_json

ATTEMPT = "recorded"
"""The attempt id of every recorded rollout; a rollout has one attempt."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_UNREWARDED = Reward(math.nan, {})  # for the conversion, which asks for a reward; its Samples get None


@dataclass(frozen=True)
class RolloutFile:
    """The file of rollout ``rollout_id`` in ``directory``. As the store of a ``Recording`` it takes the spans."""

    directory: Path
    rollout_id: str

    @property
    def path(self) -> Path:
        return self.directory / f"{self.rollout_id}.jsonl"

    def create(self, *, task: Any, metadata: Mapping[str, Any], time: float) -> None:
        """Write the first line. Raises ``FileExistsError``, and ``DiskFullError``, after which the name is free."""
        with disk_full_as_error(self.path):
            self.path.touch(exist_ok=False)
            try:
                self.append({"rollout": {"task": task, "metadata": dict(metadata), "at": time}})
            except OSError:
                self.path.unlink()
                raise

    def append(self, *values: Mapping[str, Any]) -> None:
        """Append lines; after a torn line they begin a new one."""
        with disk_full_as_error(self.path), self.path.open("ab+") as file:
            torn = b""
            if file.tell() > 0:
                file.seek(-1, 2)
                torn = b"" if file.read(1) == b"\n" else b"\n"
            file.write(torn + b"".join(json_bytes(value) + b"\n" for value in values))

    async def get_many_span_sequence_ids(self, attempts: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Numbers for new spans: their order in the file decides, so all are 0."""
        return [0] * len(attempts)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        await run_in_thread(lambda: self.append(*({"span": span.model_dump(mode="json")} for span in spans)))
        return spans

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines in order, without torn ones. Raises ``FileNotFoundError``."""
        with self.path.open("rb") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

    def finished(self) -> bool:
        """Whether the rollout has ended."""
        return any("finished" in line for line in self.lines())


def first_reward_name(directory: Path) -> str | None:
    """The name that the rollouts in ``directory`` are trained on; ``None`` where none has several rewards by name."""
    files = (RolloutFile(directory, path.stem) for path in directory.glob("*.jsonl"))
    rewards = (line.get("reward") for file in files for line in file.lines())
    return next((name for reward in rewards if isinstance(reward, dict) for name in reward if name != UNNAMED), None)


@dataclass(frozen=True, kw_only=True)
class RecordedRollout:
    """The content of a ``RolloutFile``: ``spans`` in order; the last ``reward``, or ``None``; ``finished``, the reason
    of its end, or ``None``; ``running``: its conversations are in memory."""

    rollout: Rollout
    spans: Sequence[Span]
    reward: Reward | None
    finished: str | None
    running: bool

    @classmethod
    def read(cls, file: RolloutFile, *, running: bool = False) -> RecordedRollout:
        """Raises ``FileNotFoundError``."""
        first: Mapping[str, Any] = {}
        spans: list[Span] = []
        reward: Reward | None = None
        finished: str | None = None
        for line in file.lines():
            first = line.get("rollout", first)
            if "span" in line:
                spans.append(Span.model_validate({**line["span"], "sequence_id": len(spans) + 1}))
            elif "reward" in line:
                reward = read_reward_value(line["reward"])
            finished = line.get("finished", finished)
        rollout = Rollout(
            rollout_id=file.rollout_id,
            input=first.get("task"),
            start_time=first.get("at", 0.0),
            metadata=first.get("metadata") or {},
        )
        return cls(rollout=rollout, spans=spans, reward=reward, finished=finished, running=running)

    def samples(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """slime's Samples as JSON, merged, with loss masks and log-probs, and the number of forks by reason. The reward
        of a rollout without one is ``None``. Raises ``TraceError`` for damaged spans."""
        try:
            conversion = convert_rollout(self.rollout, self.spans, reward=self.reward or _UNREWARDED)
        except TraceError as error:
            if error.reason != "no_turns":
                raise
            return [], {}
        if self.reward is None:
            for sample in conversion.samples:
                sample.reward = sample.metadata["reward"] = None
        return [sample_to_json(sample) for sample in conversion.samples], dict(conversion.forks)

    def turns(self) -> list[Turn]:
        """The recorded answers."""
        return decode_turns([span for span in self.spans if is_packed(span.attributes)])

    def untrained(self) -> set[int]:
        """The turns that are context only, by index."""
        return {*untrained_turns(self.spans, self.turns())}

    def segments(self) -> list[Segment]:
        """The token sequences of the Samples."""
        return merge_turns(self.turns(), untrained=self.untrained())

    def answer_times(self) -> list[float]:
        """When each turn's answer was recorded, in seconds since 1970."""
        return [span.end_time or 0.0 for span in self.spans if is_packed(span.attributes)]

    def to_json(self) -> dict[str, Any]:
        """The rollout with its turns and Samples."""
        samples, forks = self.samples()
        return {
            "rollout_id": self.rollout.rollout_id,
            "task": self.rollout.input,
            "metadata": self.rollout.metadata,
            "status": "finished" if self.finished is not None else "running" if self.running else "lost",
            "finished": self.finished,
            "reward": self.reward.primary if self.reward is not None else None,
            "rewards": dict(self.reward.named) if self.reward is not None else {},
            "turns": [_turn(turn) for turn in self.turns()],
            "samples": samples,
            "forks": forks,
        }


def read_reward_value(value: Any, *, run_key: str | None = None) -> Reward:
    """The reward in a number, or in numbers by name, of which ``run_key``, or the first, is trained on. Raises
    ``GatewayRequestError`` for anything else: a missing reward is not 0."""
    try:
        named = posted_reward(value)
        return select_reward(named, first=next(iter(named)), run_key=run_key)
    except RewardError as error:
        raise GatewayRequestError(f"reward: {error}", param="reward") from error


def _turn(turn: Turn) -> dict[str, Any]:
    return {
        "messages": list(turn.messages or ()),
        "text": turn.text,
        "prompt_token_ids": turn.prompt_ids.tolist(),
        "token_ids": turn.response_ids.tolist(),
        "log_probs": None if turn.log_probs is None else turn.log_probs.tolist(),
        "finish_reason": turn.finish_reason,
        "weight_versions": list(dict.fromkeys(span.version for span in turn.weight_versions)),
        "latency_s": turn.latency_s,
        "untrained": turn.untrained or None,
    }
