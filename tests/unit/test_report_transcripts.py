"""Transcripts: which rollouts, which tokens are marked, and that the files stay bounded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import TraceError
from agl_slime.events import GroupsCollected
from agl_slime.groups.results import GroupResult, MemberResult
from agl_slime.report.files import cut
from agl_slime.report.transcripts import (
    TranscriptWriter,
    choose_rollouts,
    describe_rollout,
    describe_sample,
    marked,
    to_markdown,
)
from agl_slime.trace.trajectory import Trajectory
from agl_slime.types import Sample


def decode(ids: object) -> str:
    return bytes(ids).decode("latin-1")  # type: ignore[arg-type]


def sample(prompt: str, *parts: tuple[str, int], **fields: object) -> Sample:
    response = "".join(text for text, _ in parts)
    mask = [value for text, value in parts for _ in text]
    return Sample(
        tokens=list((prompt + response).encode("latin-1")),
        response_length=len(response),
        loss_mask=mask,
        status=Sample.Status.COMPLETED,
        **fields,  # type: ignore[arg-type]
    )


def member(
    rollout_id: str = "ro-1", *, messages: list[dict[str, object]] | None = None, **fields: object
) -> MemberResult:
    trajectory = None if messages is None else talk(messages)
    values: dict[str, Any] = {"reward": 1.0, "trajectory": trajectory, **fields}
    return MemberResult(rollout_id=rollout_id, group_id="g", **values)


def talk(messages: list[dict[str, object]]) -> Trajectory:
    """A trajectory that is known by its messages only."""
    return cast(Trajectory, SimpleNamespace(messages=messages))


def collected(iteration: int, *members: MemberResult) -> GroupsCollected:
    group = GroupResult(group_id="g", mode="train", size=len(members), members=members, ready=True)
    return GroupsCollected(iteration=iteration, groups=[group])


def a_writer(path: Path, **settings: Any) -> TranscriptWriter:
    writer = TranscriptWriter(path, **settings)
    writer.tokenizer = SimpleNamespace(decode=decode)
    return writer


def test_choice_is_best_worst_random_failed() -> None:
    rewards = {"a": 0.5, "b": 1.0, "c": None, "d": 0.0, "e": 1.0, "f": 0.4}
    chosen = choose_rollouts(rewards, iteration=3)
    assert {label: rollout_id for rollout_id, label in chosen.items() if label != "random"} == {
        "best": "b",
        "worst": "d",
        "failed": "c",
    }
    assert next(rollout_id for rollout_id, label in chosen.items() if label == "random") in {"a", "e", "f"}
    assert chosen == choose_rollouts(rewards, iteration=3)
    assert len({tuple(choose_rollouts(rewards, iteration=iteration)) for iteration in range(30)}) == 3


@given(st.dictionaries(st.text(max_size=3), st.none() | st.floats(0, 1), max_size=8), st.integers(0, 5))
def test_choice_is_among_the_rollouts_and_as_many_as_there_are(
    rewards: dict[str, float | None], iteration: int
) -> None:
    chosen = choose_rollouts(rewards, iteration=iteration)
    assert set(chosen) <= set(rewards)
    scored = sum(reward is not None for reward in rewards.values())
    equal = len({reward for reward in rewards.values() if reward is not None}) == 1
    expected = min(scored, 2 if equal else 3)  # of equals, the best is the worst
    assert len(chosen) == expected + (scored < len(rewards))


def test_trained_tokens_are_marked() -> None:
    shown = describe_sample(
        sample(
            "Q?",
            ("call", 1),
            ("[obs]", 0),
            ("answer", 1),
            weight_versions=["3", "4"],
            metadata={"finish_reason": "length"},
        ),
        decode,
    )
    assert marked(shown) == "Q?⟦call⟧[obs]⟦answer⟧"
    figures = {name: value for name, value in shown.items() if name != "segments"}
    assert figures == {
        "prompt_tokens": 2,
        "response_tokens": 15,
        "trained_tokens": 10,
        "stop_reason": "length",
        "weight_versions": ["3", "4"],
        "token_source": "engine",
    }
    without_mask = sample("Q?", ("abc", 0))
    without_mask.loss_mask = None
    assert marked(describe_sample(without_mask, decode)) == "Q?⟦abc⟧"


@given(
    st.text(st.characters(codec="latin-1"), max_size=5),
    st.lists(st.tuples(st.text(st.characters(codec="ascii"), max_size=5), st.integers(0, 1))),
)
def test_segments_hold_every_token_once(prompt: str, parts: list[tuple[str, int]]) -> None:
    shown = describe_sample(sample(prompt, *parts), decode)
    assert "".join(segment["text"] for segment in shown["segments"]) == prompt + "".join(text for text, _ in parts)
    trained = "".join(segment["text"] for segment in shown["segments"] if segment["trained"])
    assert trained == "".join(text for text, value in parts if value)
    assert shown["trained_tokens"] == len(trained)


def test_a_mask_of_another_length_is_an_error() -> None:
    bad = sample("Q", ("abc", 1))
    bad.loss_mask = [1]
    with pytest.raises(TraceError, match="loss_mask has 1 entries, the response 3 tokens"):
        describe_sample(bad, decode)


def test_long_segments_are_cut_before_they_are_decoded() -> None:
    lengths: list[int] = []

    def counting(ids: object) -> str:
        lengths.append(len(ids))  # type: ignore[arg-type]
        return decode(ids)

    shown = describe_sample(sample("p" * 100_000, ("r", 1)), counting)
    assert max(lengths) == 2000
    assert shown["segments"][0]["left_out"] == 96_000
    assert "… 96000 tokens left out …" in shown["segments"][0]["text"]


def test_the_page_can_be_read_whatever_the_model_wrote() -> None:
    text = "```` \x1b[2J\n# not a heading\ud800"
    page = to_markdown(
        2,
        [
            describe_rollout(
                member(task={"q": 1}, messages=[{"role": "user", "content": text}, {"role": "tool", "content": None}]),
                "best",
                decode,
            )
        ],
    )
    fence = re.search(r"^(`{5,})text$", page, re.MULTILINE)
    assert fence is not None
    assert "\x1b" not in page
    assert "\\x1b[2J" in page
    body = page.split(fence.group(0), 1)[1].split(fence.group(1))[0]
    assert "# not a heading" in body
    assert page.startswith("# Iteration 2\n\n## best: reward 1\n\n- rollout `ro-1`\n- outcome: succeeded\n\n### Task\n")


def test_a_failed_rollout_says_why() -> None:
    failed = member(reward=None, failure="timeout", failure_message="no answer\nwithin 5 s", rewards={"style": 0.5})
    page = to_markdown(1, [describe_rollout(failed, "failed", decode)])
    assert "## failed: no reward\n\n- rollout `ro-1`\n- outcome: failed (no answer within 5 s)\n" in page
    assert "- rewards: style 0.5\n" in page


def test_files_for_people_and_for_programs(tmp_path: Path) -> None:
    writer = a_writer(tmp_path / "t")
    first = member(samples=(sample("Q", ("A", 1)),), messages=[{"content": "\ud800"}])
    writer.handle(collected(1, first, member("ro-2", reward=None, failure="timeout")))
    writer.handle(collected(2, member()))
    writer.close()
    cut(1, tmp_path / "t" / "transcripts.jsonl")
    resumed = a_writer(tmp_path / "t")
    resumed.handle(collected(2, member("again")))
    resumed.close()
    records = [
        json.loads(line) for line in (tmp_path / "t" / "transcripts.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [(record["iteration"], record["rollout_id"]) for record in records] == [
        (1, "ro-1"),
        (1, "ro-2"),
        (2, "again"),
    ]
    assert records[0]["samples"][0]["segments"][1] == {"text": "A", "trained": True, "tokens": 1, "left_out": 0}
    assert "Q⟦A⟧" in (tmp_path / "t" / "00001.md").read_text(encoding="utf-8")
    assert "`again`" in (tmp_path / "t" / "00002.md").read_text(encoding="utf-8")


def test_a_long_run_is_covered_to_its_end_within_the_limit(tmp_path: Path) -> None:
    limit = 200_000
    writer = a_writer(tmp_path, most_bytes=limit)
    asked: list[object] = []
    writer.tokenizer = SimpleNamespace(decode=lambda ids: asked.append(ids) or "")
    for iteration in range(1, 5001):
        writer.handle(collected(iteration, member(task="x" * 300, samples=(sample("Q"),))))
    writer.close()
    pages = sorted(int(path.stem) for path in tmp_path.glob("*.md"))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= limit
    assert pages[:20] == list(range(1, 21))
    assert pages[-1] > 400  # about 150 pages fit
    assert 100 < len(pages) <= len(asked) < len(pages) + 10


def test_one_huge_message_does_not_fill_the_limit(tmp_path: Path) -> None:
    writer = a_writer(tmp_path)
    huge = member(messages=[{"role": "user", "content": "x" * 5_000_000}], task={"deep": ["y" * 5_000_000]})
    writer.handle(collected(1, huge))
    writer.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 200_000
    assert "4980000 characters left out" in (tmp_path / "00001.md").read_text(encoding="utf-8")


def test_before_there_is_a_tokenizer_nothing_is_written(tmp_path: Path) -> None:
    writer = TranscriptWriter(tmp_path / "t")
    writer.handle(collected(1, member()))
    writer.close()
    assert not (tmp_path / "t").exists()
