"""Cases of resuming an aborted generation that the properties of test_client_resume_properties.py do not draw."""

from __future__ import annotations

from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams
from agl_slime.engine.client.resumable import ResumableGeneration


def part(ids: list[int], text: str, reason: FinishReason = "abort", *, tokens: int = 0) -> Generation:
    return Generation(
        output_ids=tuple(ids),
        log_probs=tuple(-float(token) for token in ids),
        text=text,
        finish_reason=reason,
        prompt_tokens=tokens,
        cached_tokens=tokens,
    )


def resumed(*parts: Generation, **sampling: object) -> tuple[ResumableGeneration, list[int]]:
    """The generation after these parts, and the budget of each request."""
    generation = ResumableGeneration(prompt_ids=[7, 8], sampling=SamplingParams(**{"max_new_tokens": 10} | sampling))  # pyright: ignore[reportArgumentType]
    budgets = []
    for added in parts:
        budgets.append(generation.next_request().sampling.max_new_tokens)
        generation.add(added)
    return generation, budgets


def test_token_counts_are_the_first_parts_that_has_any() -> None:
    generation, _ = resumed(part([], ""), part([1], "a", tokens=1), part([2], "b", "stop", tokens=2))
    result = generation.result(latency_s=0)
    assert (result.prompt_tokens, result.cached_tokens, result.resumed) == (1, 1, 2)


def test_a_false_start_of_a_stop_string_resumes_at_full_length() -> None:
    """A possible beginning of a stop string is followed token by token."""
    generation, budgets = resumed(part([1, 2], "hello </"), part([3], "b>", "length"), stop=("</end>",))
    assert not generation.done
    assert (budgets, generation.next_request().sampling.max_new_tokens) == ([10, 1], 7)


def test_ignore_eos_ignores_stop_tokens_at_the_abort_too() -> None:
    for ignore_eos in (True, False):
        generation, _ = resumed(part([1, 5], "x"), stop_token_ids=(5,), extra={"ignore_eos": ignore_eos})
        assert generation.done != ignore_eos


def test_a_grammar_is_sampled_again_from_its_start() -> None:
    generation, budgets = resumed(part([1, 2], "aa", tokens=1), part([3], "a", "stop", tokens=1), extra={"regex": "a+"})
    assert budgets == [10, 10]
    result = generation.result(latency_s=0)
    assert (result.output_ids, result.log_probs, result.text, result.resumed) == ((3,), (-3.0,), "a", 1)


def test_min_new_tokens_shrinks() -> None:
    for parts, least in (([], 5), ([2], 3), ([2, 4], 0)):
        generation, _ = resumed(*(part([1] * n, "a" * n) for n in parts), extra={"min_new_tokens": 5})
        assert generation.next_request().sampling.extra["min_new_tokens"] == least


def test_given_up_generation_returns_its_tokens() -> None:
    generation, _ = resumed(part([1, 2], "ab"))
    generation.give_up("abort")
    result = generation.result(latency_s=0)
    assert (result.finish_reason, result.output_ids, result.resumed) == ("abort", (1, 2), 0)
