"""A turn, its span attributes and the trajectory of turns: refusals, other readers, size."""

import json
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from agl_slime.engine.client.generation import Generation, WeightSpan
from agl_slime.errors import TraceError
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder, decode_turns
from agl_slime.tokens.turn import Trajectory, Turn
from tests.harness.conversations import linked
from tests.harness.samples import encode, turn
from tests.harness.trace_strategies import conversations


def json_size(attributes: dict[str, Any]) -> int:
    return len(json.dumps(attributes))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt_ids": [1, -1]}, "prompt_ids .*-1"),
        ({"response_ids": [2**31]}, "response_ids .*2147483648"),
        ({"log_probs": [-0.5]}, "1 log-probs for 2 ids"),
        ({"log_probs": [-0.5, float("nan")]}, "log_probs .*nan"),
        ({"weight_versions": [WeightSpan("3", 0, 5)]}, "'3' .*0 to 5 .*2"),
        ({"token_source": "guessed"}, "token_source .*'guessed'"),
        ({"kept_tokens": 1}, "kept_tokens .*1"),
        ({"base_turn": 0, "kept_tokens": 2}, "kept_tokens .*2"),
    ],
)
def test_a_turn_that_does_not_fit_together_is_refused(fields: dict[str, Any], sentence: str):
    with pytest.raises(TraceError, match=sentence):
        Turn(**{"prompt_ids": [1], "response_ids": [2, 3], "log_probs": [-1.0, -1.0], **fields})


def test_a_generation_becomes_a_turn():
    fields: dict[str, Any] = {"text": "hi", "finish_reason": "length", "cached_tokens": 3, "resumed": 1}
    fields |= {"weight_versions": (WeightSpan("2", 0, 2),), "log_probs": (-0.5, -0.25)}
    messages = [{"role": "user", "content": "x"}]
    made = Turn.from_generation([1, 2, 3], Generation(output_ids=(5, 6), **fields), messages=messages)
    assert made == Turn(prompt_ids=[1, 2, 3], response_ids=[5, 6], messages=messages, **fields)
    assert made.token_ids.tolist() == [1, 2, 3, 5, 6]


def test_attributes_carry_opentelemetrys_names():
    attributes = TurnEncoder(model="tiny").encode(
        turn([1, 2], [3], finish_reason="length", text="ü", request_id="r1", cached_tokens=1)
    )
    message = {"role": "assistant", "parts": [{"type": "text", "content": "ü"}], "finish_reason": "length"}
    assert json.loads(attributes["gen_ai.output.messages"]) == [message]
    expected = {
        names.CHECKSUM: zlib.crc32(struct.pack("<3if", 1, 2, 3, -0.5)),
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "r1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 1,
    }
    assert {name: attributes[name] for name in expected} == expected


def test_opentelemetry_accepts_every_attribute(caplog: pytest.LogCaptureFixture):
    attributes = TurnEncoder(model="m").encode(
        turn([1, 2], [3, 4], messages=[{"role": "user", "content": "\ud800"}], text="\ud800")
    )
    span = TracerProvider().get_tracer("t").start_span(names.GENERATE_SPAN, attributes=attributes)
    span.end()
    assert not caplog.records  # it warns about a value that it drops
    exported = dict(span.attributes)  # type: ignore[attr-defined]
    assert exported.keys() == attributes.keys()
    assert decode_turns([SimpleNamespace(attributes=exported)])[0].text == "\ud800"


def test_span_size_depends_on_new_tokens_not_on_the_number_of_turns():
    turns: list[Turn] = []
    for number in range(20):  # each prompt is all that came before and 1,400 tokens more
        earlier = turns[-1].token_ids.tolist() if turns else []
        turns.append(turn([*earlier, *range(number, number + 140_000, 100)], range(number, number + 140_000, 700)))
    sizes = [json_size(span.attributes) for span in encode(linked(turns))]
    assert max(sizes[1:]) < 1.05 * min(sizes[1:])  # no turn costs more for coming later
    numbers = 20 * (1_400 + 2 * 200)
    assert sum(sizes) < 16 / 3 * numbers + 20 * 1_000  # 5⅓ characters a number, under 1,000 for the rest of a span


def test_messages_are_stored_once_too():
    history = [{"role": "user", "content": "x" * 1_000}]
    turns = []
    for index in range(20):
        turns.append(turn(list(range(10 * (index + 1))), messages=list(history)))
        history.append({"role": "tool", "content": chr(97 + index) * 1_000})
    turns = linked(turns)
    written = encode(turns)
    assert decode_turns(written) == turns
    assert sum(json_size(span.attributes) for span in written) < 20 * 1_000 * 2.2  # quadratic would be ten times that


def test_message_mutated_after_sending_does_not_change_the_record():
    message = {"role": "user", "content": "first"}
    encoder = TurnEncoder()
    first = encoder.encode(turn([1, 2], messages=[message]))
    message["content"] = "second"
    second = encoder.encode(turn([1, 2, 7, 3], messages=[message], base_turn=0, kept_tokens=3))
    read = decode_turns([SimpleNamespace(attributes=a) for a in (first, second)])
    assert [[m["content"] for m in each.messages or ()] for each in read] == [["first"], ["second"]]


def test_branches_may_share_an_encoder_from_several_threads():
    encoder = TurnEncoder()
    written = [SimpleNamespace(attributes=encoder.encode(turn([1, 2, 3])))]
    branches = [[turn([1, 2, 3, 7, branch, *range(step)], [branch, step]) for step in range(25)] for branch in range(8)]
    start = threading.Barrier(len(branches))

    def run(branch: list[Turn]) -> list[SimpleNamespace]:
        start.wait(timeout=10)
        return [SimpleNamespace(attributes=encoder.encode(each)) for each in branch]

    with ThreadPoolExecutor(len(branches)) as pool:
        for spans in pool.map(run, branches, timeout=20):
            written += spans
    read = decode_turns(written)
    assert len(read) == 201
    for number, branch in enumerate(branches):
        assert [each for each in read if len(each.response_ids) == 2 and each.response_ids[0] == number] == branch


def test_a_doubled_turn_and_an_unknown_format_are_refused():
    written = encode([turn([1]), turn([1, 7, 2])])
    with pytest.raises(TraceError, match=r"turn 1 .*twice"):
        decode_turns([*written, written[1]])
    written[0].attributes[names.FORMAT] = 2
    with pytest.raises(TraceError, match="format 2"):
        decode_turns(written)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (names.PROMPT_BASE, 5, "base_turn.* 5"),
        (names.PROMPT_KEPT, 99, "kept_tokens.* 99"),
        (names.PROMPT_KEPT, 1, "2 ids .*input_tokens says 3"),
        (names.PROMPT_FORK, "whim", "prompt.fork .*'whim'"),
        (names.RESPONSE_IDS, None, "response.ids .*None"),
        (names.USAGE_OUTPUT_TOKENS, 9, "output_tokens .*9"),
        (names.CHECKSUM, 0, "checksum"),
        (names.MESSAGES_KEPT, 7, "messages.kept .*7"),
        (names.MESSAGES_NEW, "[", "messages.new"),
        (names.WEIGHT_VERSIONS, "[[1]]", "weight_versions"),
        (names.OUTPUT_MESSAGES, "{}x", "output.messages"),
    ],
)
def test_damage_is_named(name: str, value: Any, sentence: str):
    message = {"role": "user", "content": "x"}
    written = encode(linked([turn([1], messages=[message]), turn([1, 7, 2], messages=[message, message])]))
    written[1].attributes[name] = value
    with pytest.raises(TraceError, match=f"turn 1 .*{sentence}"):
        decode_turns(written)


@given(conversations(), st.randoms(use_true_random=False))
def test_any_tree_of_turns_is_read_back_from_json_in_any_order(turns: list[Turn], random: Any):
    spans = [SimpleNamespace(attributes=json.loads(json.dumps(span.attributes))) for span in encode(turns, model="m")]
    random.shuffle(spans)
    assert decode_turns(spans) == turns


MESSAGES = st.sampled_from([{"content": "a"}, {"content": "b"}, {"content": 1}, {"content": True}])


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(MESSAGES, max_size=4)), max_size=8))
def test_turns_with_any_base_keep_their_messages(calls: list[tuple[int, list[dict[str, object]]]]):
    turns = [
        Turn(prompt_ids=[1], response_ids=[2], messages=tuple(messages), base_turn=base % number if number else None)
        for number, (base, messages) in enumerate(calls)
    ]
    read = decode_turns(encode(turns))
    assert [json.dumps(turn.messages) for turn in read] == [json.dumps(turn.messages) for turn in turns]


@given(conversations(max_turns=4), conversations(max_turns=4), st.data())
def test_encoders_interleave(first: list[Turn], second: list[Turn], data: st.DataObject):
    spans = {0: encode(first), 1: encode(second)}
    order = data.draw(st.permutations([0] * len(first) + [1] * len(second)))
    places: dict[int, list[int]] = {0: [], 1: []}
    for place, stream in enumerate(order):
        places[stream].append(place)
    read = decode_turns([spans[stream][places[stream].index(place)] for place, stream in enumerate(order)])
    for stream, turns in ((0, first), (1, second)):
        written = [read[place] for place in places[stream]]
        # base turns are numbered over both streams
        numbered = [None if turn.base_turn is None else places[stream][turn.base_turn] for turn in turns]
        assert [turn.base_turn for turn in written] == numbered
        assert [replace(turn, base_turn=None, kept_tokens=0) for turn in written] == [
            replace(turn, base_turn=None, kept_tokens=0) for turn in turns
        ]


@given(conversations(max_turns=5).filter(lambda turns: len(turns) > 1), st.data())
def test_a_lost_turn_before_the_last_is_noticed(turns: list[Turn], data: st.DataObject):
    spans = encode(turns)
    del spans[data.draw(st.integers(0, len(spans) - 2))]
    with pytest.raises(TraceError, match="missing"):
        decode_turns(spans)


@given(conversations(max_turns=4, min_response=1), st.data())
def test_another_token_or_log_prob_is_noticed(turns: list[Turn], data: st.DataObject):
    spans = encode(turns)
    keys = (names.PROMPT_IDS, names.RESPONSE_IDS, names.LOG_PROBS)
    span, key = data.draw(st.sampled_from([(span, key) for span in spans for key in keys if span.attributes[key]]))
    text, index = span.attributes[key], data.draw(st.integers(0, 3))
    span.attributes[key] = text[:index] + ("A" if text[index] != "A" else "B") + text[index + 1 :]
    with pytest.raises(TraceError):
        decode_turns(spans)


# -- trajectories -----------------------------------------------------------------------------------------------------


def answered(text: str, **fields: object) -> Turn:
    return Turn(prompt_ids=[1], response_ids=[2, 3], log_probs=[-1.0, -1.0], text=text, **fields)  # type: ignore[arg-type]


def trajectory(*turns: Turn, **fields: object) -> Trajectory:
    return Trajectory(rollout_id="ro", attempt_id="at", task={"q": 1}, turns=turns, **fields)  # type: ignore[arg-type]


def test_response_and_messages_are_those_of_the_last_call():
    messages = [{"role": "user", "content": "?"}]
    a, b = ({"role": "assistant", "content": text} for text in "ab")
    two = trajectory(answered("a"), answered("b", messages=messages))
    assert (two.response, two.messages, two.sampled_tokens) == ("b", (*messages, b), 4)
    assert trajectory(answered("a"), answered("b")).messages == (a, b)  # the answers, if no call has messages
    assert (trajectory().response, trajectory().messages) == ("", ())


def test_a_rollout_is_truncated_when_it_or_its_last_call_was_cut_off():
    for last, stop_reason, truncated in (
        ("stop", "", 0),
        ("length", "", 1),
        ("stop", "max_turns", 1),
        ("length", "stop", 1),
    ):
        assert trajectory(answered("a", finish_reason=last), stop_reason=stop_reason).truncated == bool(truncated)
