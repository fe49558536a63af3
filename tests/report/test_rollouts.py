"""The record of a run's rollouts: samples, outcomes, and each figure at its token."""

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.data.results import GroupResult, MemberResult, Outcome
from agl_slime.errors import TraceError
from agl_slime.events import BatchTrained, GroupsCollected, GroupsRestored, IterationFinished, RunFinished, RunStarted
from agl_slime.report.files import IterationFile, RunDir, iter_jsonl
from agl_slime.report.rollouts import Pieces, RolloutWriter, SizeBudget, choose_rollouts, describe_tokens
from agl_slime.types import Sample
from tests.harness.examples import examples
from tests.harness.report_runs import floats
from tests.harness.vocabularies import chat_tokenizer

TOKENIZER = SimpleNamespace(decode=lambda ids: bytes(ids).decode("latin-1"))
NONE = np.float32("nan")


def a_sample(rollout_id: str = "ro-1", mask: tuple[int, ...] = (1, 1, 0, 1), **metadata: Any) -> Sample:
    return Sample(
        tokens=[*b"ask", *b"wxyz"[: len(mask)]],
        response_length=len(mask),
        loss_mask=list(mask),
        rollout_log_probs=[-0.1 * (n + 1) * trained for n, trained in enumerate(mask)],
        status=Sample.Status.COMPLETED,
        weight_versions=["3"],
        metadata={"agl_rollout_id": rollout_id, "weight_spans": [["3", 0, 2], ["4", 3, 4]], **metadata},
    )


def a_member(rollout_id: str, reward: float | None = 1.0, group_id: str = "g", **fields: Any) -> MemberResult:
    samples = () if reward is None else (a_sample(rollout_id),)
    rewards = {} if reward is None else {"primary": reward}
    return MemberResult(
        rollout_id=rollout_id, group_id=group_id, samples=samples, reward=reward, rewards=rewards, **fields
    )


def collected(iteration: int, *members: MemberResult, ready: bool = True, code: str = "") -> GroupsCollected:
    group_id = members[0].group_id
    group = GroupResult(group_id=group_id, mode="train", size=len(members), members=members, ready=ready, code=code)
    return GroupsCollected(iteration=iteration, groups=[group])


def batch(iteration: int, *members: MemberResult) -> BatchTrained:
    samples = [sample for member in members for sample in member.samples]
    log_probs = [np.arange(sum(s.loss_mask or ()), dtype=np.float32) for s in samples]
    return BatchTrained(iteration=iteration, samples=samples, log_probs=log_probs, advantages=[-p for p in log_probs])


def a_writer(path: Path, keep: Any = "all", **options: Any) -> RolloutWriter:
    writer = RolloutWriter(RunDir(path), keep=keep, **options)
    writer.tokenizer = TOKENIZER
    return writer


def tell(writer: RolloutWriter, *events: Any) -> None:
    for event in events:
        writer.handle(event)


def finished(iteration: int) -> IterationFinished:
    return IterationFinished(iteration=iteration, metrics={})


def play(writer: RolloutWriter, iteration: int, *members: MemberResult) -> None:
    """One iteration of a group that is trained."""
    tell(writer, collected(iteration, *members), batch(iteration, *members), finished(iteration))


def rows(path: Path, name: str = "rollouts") -> list[dict[str, Any]]:
    file = path / f"{name}.jsonl"
    return list(iter_jsonl(file)) if file.exists() else []


def test_each_value_is_at_its_token() -> None:
    scores = (np.array([-1, -2, -3], "f4"), np.array([5, 6, 7], "f4"))
    line = describe_tokens(a_sample(), Pieces(TOKENIZER), scores=scores)
    assert line["prompt_length"] == 3
    assert line["pieces"] == list("askwxyz")
    assert np.frombuffer(base64.b64decode(line["tokens"]), "<i4").tolist() == list(b"askwxyz")
    assert line["trained"] == [[0, 2], [3, 4]]
    assert floats(line["engine_log_probs"]) == pytest.approx([-0.1, -0.2, NONE, -0.4], nan_ok=True)
    assert floats(line["trainer_log_probs"]) == pytest.approx([-1, -2, NONE, -3], nan_ok=True)
    assert floats(line["advantages"]) == pytest.approx([5, 6, NONE, 7], nan_ok=True)
    assert line["weight_versions"] == [["3", 0, 2], ["4", 3, 4]]
    with pytest.raises(TraceError, match="the trainer 2"):
        describe_tokens(a_sample(), Pieces(TOKENIZER), scores=(np.zeros(2), np.zeros(2)))


def test_each_rollout_has_its_outcome(tmp_path: Path) -> None:
    good, bad = a_member("good"), a_member("bad", None, failure="timeout", failure_message="600 s")
    late = a_member("late", None, failure="group_timeout", outcome_if_failed=Outcome.CANCELLED)
    same = a_member("same", group_id="h")
    writer = a_writer(tmp_path)
    tell(writer, collected(1, good, bad, late), collected(1, same, ready=False, code="zero_variance"))
    tell(writer, batch(1, good), finished(1))
    assert {row["rollout_id"]: (row["outcome"], row["reason"]) for row in rows(tmp_path)} == {
        "good": ("trained", ""),
        "bad": ("failed", "timeout"),
        "late": ("cancelled", "group_timeout"),
        "same": ("filtered", "zero_variance"),
    }
    scores = floats(rows(tmp_path)[0]["samples"][0]["trainer_log_probs"])
    assert scores == pytest.approx([0, 1, NONE, 2], nan_ok=True)
    first, second = rows(tmp_path, "groups")
    assert first["outcomes"] == ["trained", "failed", "cancelled"]
    assert first["kept"] == first["rollouts"] == ["good", "bad", "late"]
    assert (second["ready"], second["code"]) == (False, "zero_variance")


def test_rollout_trained_later_is_written_then(tmp_path: Path) -> None:
    early, never = a_member("early", group_id="e"), a_member("never", group_id="n")
    writer = a_writer(tmp_path)
    tell(writer, collected(1, early), collected(1, never), finished(1), batch(3, early), finished(3))
    assert [(r["iteration"], r["collected"], r["rollout_id"]) for r in rows(tmp_path)] == [(3, 1, "early")]
    tell(writer, RunFinished(reason="interrupted"))
    assert [(r["iteration"], r["outcome"]) for r in rows(tmp_path)] == [(3, "trained"), (4, "ready")]


def test_sampled_keeps_four_per_iteration_within_the_byte_bound(tmp_path: Path) -> None:
    writer = a_writer(tmp_path, keep="sampled", most_bytes=200_000)
    for iteration in range(1, 101):
        members = [a_member(f"{iteration}-{n}", n / 8, group_id=f"g{iteration}") for n in range(8)]
        members.append(a_member(f"{iteration}-f", None, group_id=f"g{iteration}", failure="timeout"))
        tell(writer, collected(iteration, *members), batch(iteration, *members[:8]), finished(iteration))
    assert (tmp_path / "rollouts.jsonl").stat().st_size <= 200_000
    lines = rows(tmp_path)
    assert lines[0]["iteration"] == 1
    assert lines[-1]["iteration"] > 90
    assert {row["label"] for row in lines if row["iteration"] == 1} == {"best", "worst", "random", "failed"}
    groups = rows(tmp_path, "groups")
    assert [len(group["rollouts"]) for group in groups] == [9] * 100
    assert {name for group in groups for name in group["kept"]} == {row["rollout_id"] for row in lines}


def test_none_keeps_the_groups_alone(tmp_path: Path) -> None:
    play(a_writer(tmp_path, keep="none"), 1, a_member("a"))
    assert not (tmp_path / "rollouts.jsonl").exists()
    assert rows(tmp_path, "groups")[0]["outcomes"] == ["trained"]


def test_crash_between_the_two_files_leaves_no_dangling_kept_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    append = IterationFile.append

    def die_after_the_first(self: IterationFile, *args: Any) -> None:
        append(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(IterationFile, "append", die_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        play(a_writer(tmp_path), 1, a_member("a"))
    rollouts = {row["rollout_id"] for row in rows(tmp_path)}
    assert {name for group in rows(tmp_path, "groups") for name in group["kept"]} <= rollouts


def test_resumed_run_keeps_earlier_rows_and_repeats_none(tmp_path: Path) -> None:
    """Iteration 3 is run twice, and the second resume ends at once."""
    writer = a_writer(tmp_path)
    for iteration in (1, 2, 3):
        play(writer, iteration, a_member(f"m{iteration}", group_id=f"g{iteration}"))
    writer.close()
    RunDir(tmp_path).rewind(2)
    writer = a_writer(tmp_path)
    play(writer, 3, a_member("second", group_id="second"))
    writer.close()
    assert [row["rollout_id"] for row in rows(tmp_path)] == ["m1", "m2", "second"]
    RunDir(tmp_path).rewind(2)
    writer = a_writer(tmp_path)
    tell(writer, RunStarted(iteration=2), collected(3, a_member("late", group_id="late")), RunFinished(reason="x"))
    writer.close()
    for name in ("rollouts", "groups"):
        assert [row["iteration"] for row in rows(tmp_path, name)] == [1, 2, 3]


def test_a_group_that_was_ready_before_a_restart_is_there_once(tmp_path: Path) -> None:
    waits, written = a_member("waits", group_id="w"), a_member("written", group_id="x")
    first = a_writer(tmp_path)
    tell(first, collected(1, waits), finished(1), collected(2, a_member("late", group_id="l")), RunFinished())
    first.close()
    assert [row["rollout_id"] for row in rows(tmp_path)] == ["waits", "late"]  # it ended in iteration 1
    RunDir(tmp_path).rewind(1)
    second = a_writer(tmp_path)
    groups = [collected(1, member).groups[0] for member in (waits, written)]
    tell(second, GroupsRestored(iteration=1, groups=groups), finished(2))
    assert rows(tmp_path) == rows(tmp_path, "groups") == []  # cut rows are gone, the waiting group is to come
    tell(second, batch(3, waits), finished(3))
    (line,) = rows(tmp_path, "groups")
    assert (line["rollouts"], line["outcomes"], line["iteration"]) == (["waits"], ["trained"], 3)
    assert floats(rows(tmp_path)[0]["samples"][0]["trainer_log_probs"])[:2].tolist() == [0.0, 1.0]
    # a group that was written without its fate is written once
    tell(second, batch(4, written), finished(4))
    second.close()
    third = a_writer(tmp_path)
    tell(third, GroupsRestored(iteration=4, groups=groups), batch(5, waits, written), finished(5))
    assert [row["rollouts"] for row in rows(tmp_path, "groups")] == [["waits"], ["written"]]


@pytest.mark.parametrize("vocabulary", ["anthropic", "deepseek"])
@settings(max_examples=examples(30), deadline=None)
@given(text=st.text(max_size=30) | st.sampled_from(["👩‍👩‍👧 naïve 漢字", "a  b\n\n c", "<think>é</think>"]))
def test_pieces_join_to_the_text(vocabulary: str, text: str) -> None:
    tokenizer = chat_tokenizer(vocabulary)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = Pieces(tokenizer)(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_choice_is_best_worst_random_failed() -> None:
    rewards = {"a": 0.5, "b": 1.0, "c": None, "d": 0.0, "e": 1.0, "f": 0.4}
    chosen = choose_rollouts(rewards, iteration=3)
    by_label = {label: rollout_id for rollout_id, label in chosen.items()}
    assert by_label.pop("random") in {"a", "e", "f"}
    assert by_label == {"best": "b", "worst": "d", "failed": "c"}
    assert chosen == choose_rollouts(rewards, iteration=3)
    assert len({tuple(choose_rollouts(rewards, iteration=iteration)) for iteration in range(30)}) == 3
    # of equals, the best is the worst
    for few, n in (([], 0), ([None], 1), ([1.0], 1), ([1.0, 0.0], 2), ([1.0] * 3, 2), ([1.0, 0.0, 1.0, None], 4)):
        assert len(choose_rollouts(dict(zip("abcd", few, strict=False)), iteration=3)) == n


def test_a_budget_lasts_to_the_end_of_a_run_and_skips_records_above_it() -> None:
    budget, size = SizeBudget(200_000), 1_300
    offered = [iteration for iteration in range(1, 5001) if budget.allows(iteration) and budget.take(size)]
    assert offered[:20] == list(range(1, 21))
    assert offered[-1] > 400
    assert 100 < len(offered) <= 200_000 // size
    small = SizeBudget(1_000)
    assert not small.take(1_001)
    assert not small.allows(1)
    assert small.allows(2)
    assert small.take(900)
