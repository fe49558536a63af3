"""What a run says of agents behind the gateway."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.loop.metrics import collect_metrics, fork_examples
from agl_slime.report.summary import summary_rows


def member(number: int, *kinds: str | None, **seen: int) -> MemberResult:
    metadata = {"gateway": {"answers": 2, "POST /chat/completions": 2, **seen}, "token_source": "engine"}
    fields: dict[str, Any] = {"loss_mask": [1], "status": None, "response_length": 1}
    samples: Any = tuple(SimpleNamespace(metadata={**metadata, "fork_reason": kind}, **fields) for kind in kinds)
    return MemberResult(rollout_id=f"ro-{number}", group_id="g", samples=samples, reward=1.0, sampled_tokens=1)


def test_each_class_of_forks_has_one_example() -> None:
    members = [member(1, None), member(2, None, "compaction"), member(3, None, "compaction", "branch")]
    assert fork_examples(members) == {
        "compaction": "conversations fork (compaction), first seen in rollout ro-2: Sample 2 of 2",
        "branch": "conversations fork (branch), first seen in rollout ro-3: Sample 3 of 3",
    }


def test_gateway_counts_are_in_the_metrics() -> None:
    members = (member(1, None, **{"overridden/temperature": 2}), member(2, None, **{"overridden/temperature": 1}))
    group = GroupResult(group_id="g", mode="train", size=2, members=members, ready=True)
    metrics = collect_metrics([group], collect_s=1.0)
    found = {name: value for name, value in metrics.items() if name.startswith("gateway/")}
    assert found == {"gateway/answers": 4, "gateway/overridden/temperature": 3}


def test_a_rollout_with_refused_requests_is_counted_and_named() -> None:
    members = (member(1, None), member(2, None, **{"refused/400": 2}), member(3, None, **{"refused/413": 1}))
    group = GroupResult(group_id="g", mode="train", size=3, members=members, ready=True)
    metrics = collect_metrics([group], collect_s=1.0)
    assert {name: value for name, value in metrics.items() if name.startswith("gateway/refused")} == {
        "gateway/refused/400": 2,
        "gateway/refused/413": 1,
        "gateway/refused/rollouts": 2,
    }
    assert fork_examples(members) == {"refused": "requests were refused (2 x refused/400), first seen in rollout ro-2"}


def test_a_ratio_that_both_sides_computed_is_called_meaningless() -> None:
    figures = {"reason": "finished", "first_ratio_dev_max": 1e-6, "forks": 0}
    assert dict(summary_rows({**figures, "retokenized": 0}))["first ratio"] == "within 1.0e-06 of 1"
    assert "; meaningless for retokenized samples" in dict(summary_rows({**figures, "retokenized": 3}))["first ratio"]
