"""However often and wherever the engine aborts, the joined generation is the one that was never aborted."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams, parse_generation
from agl_slime.engine.client.resumable import ResumableGeneration
from tests.harness.engine_faults import PIECES, Abort, NewVersion
from tests.harness.examples import examples
from tests.harness.scripted_engine import ScriptedEngine

# the bytes of each id, with halves of characters among them, as in byte-level vocabularies
BYTES = [piece.encode() for piece in PIECES] + [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"a\xe6\xb0", b"\xb4b"]


def decode(ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    return b"".join(BYTES[token % len(BYTES)] for token in ids).decode(errors="replace")


# a prompt ends in a whole character, as chat templates do
prompts = st.lists(st.integers(0, len(BYTES) - 1), max_size=5).map(lambda ids: [*ids, 0])
# few letters, so that they begin in one token and end in another, are contained in each other, and repeat themselves
stop_strings = st.lists(st.text(alphabet="abc</x>é水", min_size=1, max_size=5), max_size=3, unique=True)
stop_tokens = st.lists(st.integers(0, len(BYTES) - 1), max_size=1)
aborts = st.lists(st.integers(0, 6), max_size=8)


async def run(
    prompt: list[int], sampling: SamplingParams, faults: list[Abort | NewVersion], *, engine: ScriptedEngine
) -> tuple[Generation, list[int]]:
    """The client's loop without HTTP; also the size of each request's budget."""
    generation = ResumableGeneration(
        prompt_ids=prompt,
        sampling=sampling,
        eos_token_ids=[] if engine.eos_id is None else [engine.eos_id],
        decode=decode,
    )
    budgets = []
    script = list(faults)
    while not generation.done:
        request = generation.next_request()
        budgets.append(request.sampling.max_new_tokens)
        payload = {
            "rid": str(len(budgets)),
            "input_ids": list(request.input_ids),
            "sampling_params": request.sampling.to_payload(),
        }
        generation.add(parse_generation(await engine.sample(payload, script.pop(0) if script else None)))
    return generation.result(latency_s=0.0), budgets


@given(
    prompt=prompts,
    stop=stop_strings,
    stop_ids=stop_tokens,
    eos=st.none() | st.integers(0, len(BYTES) - 1),
    limit=st.integers(1, 24),
    cuts=aborts,
    trim=st.booleans(),
)
@settings(max_examples=examples(400))
@example(prompt=[0], stop=["éa"], stop_ids=[], eos=None, limit=24, cuts=[1] * 8, trim=True)
@example(prompt=[0], stop=["ab"], stop_ids=[], eos=None, limit=24, cuts=[1] * 8, trim=True)
def test_the_joined_generation_is_the_unaborted_one(prompt, stop, stop_ids, eos, limit, cuts, trim):
    sampling = SamplingParams(
        max_new_tokens=limit,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        extra={} if trim else {"no_stop_trim": True},
    )
    engine = ScriptedEngine(vocab_size=len(BYTES), decode=decode, eos_id=eos)
    whole, _ = asyncio.run(run(prompt, sampling, [], engine=engine))
    joined, budgets = asyncio.run(run(prompt, sampling, [Abort(n_tokens=n) for n in cuts], engine=engine))

    for name in ("output_ids", "log_probs", "text", "finish_reason", "matched_stop"):
        assert getattr(joined, name) == getattr(whole, name), name
    assert joined.prompt_tokens == len(prompt)
    assert joined.resumed <= len(cuts)
    assert all(1 <= budget <= limit for budget in budgets)


@given(
    prompt=prompts,
    limit=st.integers(1, 24),
    faults=st.lists(
        st.builds(Abort, n_tokens=st.integers(0, 6))
        | st.builds(NewVersion, n_tokens=st.integers(0, 6), version=st.sampled_from("123")),
        max_size=8,
    ),
    lists_versions=st.booleans(),
)
def test_weight_spans_tile_the_output(prompt, limit, faults, lists_versions):
    engine = ScriptedEngine(weight_version="0", lists_versions=lists_versions)
    joined, _ = asyncio.run(run(prompt, SamplingParams(max_new_tokens=limit), faults, engine=engine))
    assert len(joined.output_ids) == len(joined.log_probs) == limit
    end = 0
    for span, following in zip(joined.weight_versions, (*joined.weight_versions[1:], None), strict=True):
        assert span.start == end < span.end
        assert following is None or following.version != span.version  # neighbours of one version are one span
        end = span.end
    assert end == limit


@given(
    prompt=prompts,
    text=st.text(alphabet="ab é水😀日語。", max_size=12),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    step=st.integers(1, 9),
    lossy=st.booleans(),
)
@settings(max_examples=examples(300))
def test_the_text_of_a_stream_only_grows_wherever_its_parts_are_cut(prompt, text, cuts, step, lossy):
    """For each replacement of a character that is cut: U+FFFD on both sides, or nothing."""
    ids, errors = list(text.encode()), "replace" if lossy else "ignore"
    generation = ResumableGeneration(
        prompt_ids=[97, *prompt[:1]],
        sampling=SamplingParams(max_new_tokens=100),
        decode=lambda ids, skip_special_tokens=False: bytes(ids).decode(errors="replace"),
    )
    streamed = ""
    for start, end in pairwise(sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})):
        generation.next_request()
        read, text_of_part = generation.reader(), ""
        for n in (*range(start + step, end, step), end):
            text_of_part = bytes(ids[start:n]).decode(errors=errors)
            pairs = [[-0.5, token, None] for token in ids[start:n]]
            now = read({"text": text_of_part, "meta_info": {"output_token_logprobs": pairs}}).rstrip("\ufffd")
            assert text.startswith(now)
            assert now.startswith(streamed)
            streamed = now
        made = Generation(
            output_ids=tuple(ids[start:end]),
            log_probs=(-0.5,) * (end - start),
            text=text_of_part,
            finish_reason="abort",
        )
        generation.add(made)
    assert streamed == text


# -- cases that the properties do not draw --------------------------------------------------------------------------


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
