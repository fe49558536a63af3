"""Single cases of taking up an aborted generation; the rule itself is in test_client_resume_properties.py."""

from __future__ import annotations

from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams
from agl_slime.engine.client.resumable import ResumableGeneration


def part(
    ids: list[int],
    text: str,
    reason: FinishReason = "abort",
    *,
    prompt_tokens: int = 0,
    cached_tokens: int = 0,
    matched: int | str | None = None,
) -> Generation:
    return Generation(
        output_ids=tuple(ids),
        log_probs=tuple(-float(token) for token in ids),
        text=text,
        finish_reason=reason,
        matched_stop=matched,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
    )


def start(
    prompt: list[int] | None = None, *, context_length: int | None = None, **sampling: object
) -> ResumableGeneration:
    return ResumableGeneration(
        prompt_ids=prompt or [9], sampling=SamplingParams(**sampling), context_length=context_length
    )  # pyright: ignore[reportArgumentType]


def test_the_next_part_gets_prompt_plus_ids_and_the_rest_of_the_budget() -> None:
    wanted = start([7, 8], max_new_tokens=10)
    wanted.next_request()
    wanted.add(part([1, 2, 3], "abc", prompt_tokens=2))
    request = wanted.next_request()
    assert request.input_ids == (7, 8, 1, 2, 3)
    assert request.sampling.max_new_tokens == 7


def test_token_counts_are_those_of_the_first_part_that_has_any() -> None:
    wanted = start(max_new_tokens=10)
    wanted.next_request()
    wanted.add(part([], ""))
    wanted.next_request()
    wanted.add(part([1], "a", prompt_tokens=1, cached_tokens=1))
    wanted.next_request()
    wanted.add(part([2], "b", "stop", prompt_tokens=2, cached_tokens=2))
    result = wanted.result(latency_s=0)
    assert (result.prompt_tokens, result.cached_tokens, result.resumed) == (1, 1, 2)


def test_a_budget_used_up_at_the_abort_is_length() -> None:
    wanted = start(max_new_tokens=2)
    wanted.next_request()
    wanted.add(part([1, 2], "ab"))
    assert wanted.done
    assert wanted.result(latency_s=0).finish_reason == "length"
    assert wanted.result(latency_s=0).resumed == 0


def test_a_stop_string_across_the_boundary_is_followed_token_by_token() -> None:
    wanted = start(max_new_tokens=10, stop=("</end>",))
    wanted.next_request()
    wanted.add(part([1, 2], "hello </"))
    request = wanted.next_request()
    assert request.sampling.max_new_tokens == 1
    wanted.add(part([3], "en", "length"))
    assert wanted.next_request().sampling.max_new_tokens == 1
    wanted.add(part([4], "d>!", "length"))
    result = wanted.result(latency_s=0)
    assert result.output_ids == (1, 2, 3, 4)
    assert (result.text, result.finish_reason, result.matched_stop, result.resumed) == ("hello ", "stop", "</end>", 1)


def test_false_start_of_a_stop_string_resumes_at_full_length() -> None:
    wanted = start(max_new_tokens=10, stop=("</end>",))
    wanted.next_request()
    wanted.add(part([1, 2], "hello </"))
    wanted.next_request()
    wanted.add(part([3], "b>", "length"))
    assert not wanted.done
    assert wanted.next_request().sampling.max_new_tokens == 7


def test_a_stop_that_the_abort_overtook() -> None:
    wanted = start(max_new_tokens=10, stop=("</end>",), stop_token_ids=(5,))
    wanted.next_request()
    wanted.add(part([1, 5], "x"))
    result = wanted.result(latency_s=0)
    assert (result.finish_reason, result.matched_stop) == ("stop", 5)

    wanted = start(max_new_tokens=10, stop=("</end>",))
    wanted.next_request()
    wanted.add(part([1, 4], "x</end>"))
    result = wanted.result(latency_s=0)
    assert (result.finish_reason, result.matched_stop, result.text) == ("stop", "</end>", "x")


def test_ignore_eos_ignores_stop_tokens_at_the_abort_too() -> None:
    wanted = start(max_new_tokens=10, stop_token_ids=(5,), extra={"ignore_eos": True})
    wanted.next_request()
    wanted.add(part([1, 5], "x"))
    assert not wanted.done


def test_a_grammar_starts_again_from_nothing() -> None:
    wanted = start([7], max_new_tokens=10, extra={"regex": "a+"})
    wanted.next_request()
    wanted.add(part([1, 2], "aa", prompt_tokens=1))
    request = wanted.next_request()
    assert request.input_ids == (7,)
    assert request.sampling.max_new_tokens == 10
    wanted.add(part([3], "a", "stop", prompt_tokens=1))
    result = wanted.result(latency_s=0)
    assert (result.output_ids, result.log_probs, result.text, result.resumed) == ((3,), (-3.0,), "a", 1)


def test_min_new_tokens_shrinks() -> None:
    wanted = start(max_new_tokens=10, extra={"min_new_tokens": 5})
    assert wanted.next_request().sampling.extra["min_new_tokens"] == 5
    wanted.add(part([1, 2], "ab"))
    assert wanted.next_request().sampling.extra["min_new_tokens"] == 3
    wanted.add(part([1, 2, 3, 4], "abcd"))
    assert wanted.next_request().sampling.extra["min_new_tokens"] == 0


def test_the_context_length_is_part_of_the_budget() -> None:
    wanted = start([7, 8], max_new_tokens=10, context_length=6)
    assert wanted.next_request().sampling.max_new_tokens == 4
    wanted.add(part([1, 2, 3, 4], "abcd"))
    assert wanted.result(latency_s=0).finish_reason == "length"


def test_given_up_generation_returns_its_tokens() -> None:
    wanted = start(max_new_tokens=10)
    wanted.next_request()
    wanted.add(part([1, 2], "ab"))
    wanted.give_up("abort")
    result = wanted.result(latency_s=0)
    assert (result.finish_reason, result.output_ids, result.resumed) == ("abort", (1, 2), 0)
