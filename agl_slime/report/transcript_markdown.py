"""Transcripts as Markdown: what the agent was asked, what was said, and which tokens were trained."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agl_slime.report.jsonl import jsonable

if TYPE_CHECKING:
    from agl_slime.report.transcripts import TranscriptItem, TranscriptSample

OPEN, CLOSE = "⟦", "⟧"
MOST_CHARACTERS = 20_000  # per text; the middle of a longer one is left out
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def to_markdown(iteration: int, items: Sequence[TranscriptItem]) -> str:
    """The page of one iteration."""
    return "\n".join([f"# Iteration {iteration}", "", *(_rollout(item) for item in items)])


def marked(sample: TranscriptSample) -> str:
    """The sample's text with trained tokens between ``⟦`` and ``⟧``."""
    return "".join(f"{OPEN}{segment.text}{CLOSE}" if segment.trained else segment.text for segment in sample.segments)


def shorten(text: str, most: int = MOST_CHARACTERS) -> str:
    """At most ``most`` characters of ``text`` and a note of how many were left out of its middle."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… {len(text) - 2 * half} characters left out …\n{text[-half:]}"


def _rollout(item: TranscriptItem) -> str:
    reward = "no reward" if item.reward is None else f"reward {item.reward:g}"
    lines = [f"## {_inline(item.label)}: {reward}", "", f"- rollout `{_inline(item.rollout_id)}`, {item.mode}"]
    if item.outcome or item.reason:
        lines.append(f"- outcome: {_inline(item.outcome)}" + (f" ({_inline(item.reason)})" if item.reason else ""))
    if item.rewards:
        lines.append("- rewards: " + ", ".join(f"{_inline(name)} {value:g}" for name, value in item.rewards.items()))
    lines.append("")
    if item.task is not None:
        lines += ["### Task", "", _fence(json.dumps(jsonable(item.task), ensure_ascii=False, indent=2), "json")]
    if item.messages:
        lines += ["### Conversation", ""]
        for message in item.messages:
            lines += [f"**{_inline(str(message.get('role', '?')))}**", "", _fence(_content(message))]
    for number, sample in enumerate(item.samples, start=1):
        which = f"Sample {number} of {len(item.samples)}" if len(item.samples) > 1 else "Sample"
        lines += [
            f"### {which}: trained tokens between {OPEN} and {CLOSE}",
            "",
            _figures(sample),
            "",
            _fence(marked(sample)),
        ]
    return "\n".join(lines)


def _figures(sample: TranscriptSample) -> str:
    versions = ", ".join(dict.fromkeys(sample.weight_versions)) or "unknown"
    return (
        f"{sample.prompt_tokens} prompt tokens, {sample.response_tokens} response tokens, {sample.trained_tokens} trained; "
        f"stop reason {_inline(sample.stop_reason)}; weights {_inline(versions)}; token ids: {_inline(sample.token_source)}"
    )


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = (
        content
        if isinstance(content, str)
        else ""
        if content is None
        else json.dumps(jsonable(content), ensure_ascii=False, indent=2)
    )
    calls = message.get("tool_calls")
    return (
        text
        + ("\n" if text and calls else "")
        + (json.dumps(jsonable(calls), ensure_ascii=False, indent=2) if calls else "")
    )


def _fence(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks in the text; control characters are spelled out."""
    body = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", shorten(text))
    longest = max((len(run) for run in re.findall(r"`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{body}\n{fence}\n"


def _inline(text: str) -> str:
    """One line of text that cannot end the line, the code span or the heading it stands in."""
    return re.sub(r"\s+", " ", _CONTROL.sub(" ", shorten(text, 400))).replace("`", "'")
