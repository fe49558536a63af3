"""SGLang's answers as typed objects, and the client's JSON, which equals the standard library's."""

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.describe import parse_workers
from agl_slime.engine.client.generation import Generation, PartRequest, SamplingParams, WeightSpan, parse_generation
from agl_slime.engine.client.transport import _decoded, _encoded
from agl_slime.errors import EngineError, EngineProtocolError
from tests.harness.engine_faults import Body
from tests.harness.scripted_engine import QUICK, ScriptedEngine


def answer(**meta: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": "4a9f", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 20}
    fields |= {"cached_tokens": 16, "weight_version": "7"}
    fields |= {"output_token_logprobs": [[-1.5, 366, None], [-0.25, 12, None]]}
    return {"text": "ab", "output_ids": [366, 12], "meta_info": fields | meta}


def versions(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def test_a_newer_servers_answer() -> None:
    generation = parse_generation(answer(weight_versions=versions(("6", 0, 1), ("7", 1, 2))), latency_s=0.5)
    assert generation.output_ids == (366, 12)
    assert generation.log_probs == (-1.5, -0.25)
    assert (generation.text, generation.finish_reason, generation.request_id) == ("ab", "length", "4a9f")
    assert (generation.prompt_tokens, generation.cached_tokens, generation.latency_s) == (20, 16, 0.5)
    assert generation.weight_versions == (WeightSpan("6", 0, 1), WeightSpan("7", 1, 2))
    assert generation.weight_version == "7"


def test_one_version_for_all_tokens_and_spans_cut_to_the_tokens() -> None:
    whole = (WeightSpan("7", 0, 2),)
    assert parse_generation(answer()).weight_versions == whole  # an older server
    assert parse_generation(answer(weight_versions=versions(("6", 0, 0), ("7", 0, 9)))).weight_versions == whole


def test_aborted_in_the_queue_has_no_counts() -> None:
    meta = {"id": "x", "finish_reason": {"type": "abort", "message": "Aborted"}}
    generation = parse_generation({"text": "", "output_ids": [], "meta_info": meta})
    assert (generation.output_ids, generation.finish_reason) == ((), "abort")
    assert (generation.prompt_tokens, generation.weight_versions) == (0, ())


REQUEST = PartRequest([*range(20)], SamplingParams(max_new_tokens=4), vocab_size=400, oldest_version=6)
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


def legal() -> dict[str, Any]:
    body = answer(completion_tokens=2, weight_versions=versions(("6", 0, 1), ("7", 1, 2)))
    return copy.deepcopy(body)


def with_pairs(*pairs: Any) -> Change:
    return lambda body, meta: meta.update(output_token_logprobs=[*pairs])


def with_meta(**fields: Any) -> Change:
    return lambda body, meta: meta.update(fields)


def with_id(token: Any) -> Change:
    """All lists agree on the id."""
    pairs = [[-1.5, token, None], [-0.25, 12, None]]
    return lambda body, meta: (body.update(output_ids=[token, 12]), meta.update(output_token_logprobs=pairs))


def doubled(body: dict[str, Any], meta: dict[str, Any]) -> None:
    """All lists agree, and the answer is longer than it may be."""
    body["output_ids"] *= 3
    meta |= {"output_token_logprobs": meta["output_token_logprobs"] * 3, "completion_tokens": 6}
    meta["weight_versions"][-1]["end"] = 6


FALSE_ANSWERS: dict[str, Change] = {
    "tokens twice": lambda body, meta: meta.update(output_token_logprobs=meta["output_token_logprobs"] * 2),
    "a token too many": lambda body, meta: meta["output_token_logprobs"].append([-1.0, 5, None]),
    "a token too few": lambda body, meta: meta["output_token_logprobs"].pop(),
    "no tokens": lambda body, meta: (body.update(output_ids=[]), meta.update(output_token_logprobs=[])),
    "longer than asked": doubled,
    "other output_ids": lambda body, meta: body.update(output_ids=[366, 13]),
    "output_ids no list": lambda body, meta: body.update(output_ids="366"),
    "other completion_tokens": with_meta(completion_tokens=3),
    "completion_tokens as text": with_meta(completion_tokens="2"),
    "other prompt_tokens": with_meta(prompt_tokens=19),
    "prompt_tokens as text": with_meta(prompt_tokens="abc"),
    "cached_tokens as text": with_meta(cached_tokens="abc"),
    "infinite cached_tokens": with_meta(cached_tokens=math.inf),
    "negative spec_verify_ct": with_meta(spec_verify_ct=-1),
    "log-prob 5": with_pairs([5.0, 366, None], [-0.25, 12, None]),
    "log-prob 0.001": with_pairs([1e-3, 366, None], [-0.25, 12, None]),
    "log-prob -1e30": with_pairs([-1e30, 366, None], [-0.25, 12, None]),
    "log-prob -9999": with_pairs([-9999, 366, None], [-0.25, 12, None]),
    "log-prob 10**400": with_pairs([-(10**400), 366, None], [-0.25, 12, None]),
    "log-prob as text": with_pairs(["-1.5", 366, None], [-0.25, 12, None]),
    "log-prob true": with_pairs([True, 366, None], [-0.25, 12, None]),
    "id 366.7": with_id(366.7),
    "id true": with_id(True),
    "id as text": with_id("366"),
    "id 2**40": with_id(2**40),
    "id -1": with_id(-1),
    "id 400 of 400": with_id(400),
    "pairs no list": with_meta(output_token_logprobs={"0": [-1.5, 366]}),
    "versions with a gap": with_meta(weight_versions=versions(("6", 0, 1), ("7", 2, 2))),
    "versions from 1 on": with_meta(weight_versions=versions(("7", 1, 2))),
    "versions overlap": with_meta(weight_versions=versions(("6", 0, 2), ("7", 1, 2))),
    "versions twice": with_meta(weight_versions=versions(("7", 0, 2), ("7", 0, 2))),
    "versions end early": with_meta(weight_versions=versions(("7", 0, 1))),
    "versions backwards": with_meta(weight_versions=versions(("6", 0, 2), ("7", 2, 1))),
    "version places as text": with_meta(weight_versions=versions(("7", "0", "2"))),  # pyright: ignore[reportArgumentType]
    "version true": with_meta(weight_versions=versions((True, 0, 2))),  # pyright: ignore[reportArgumentType]
    "half a character as a version": with_meta(weight_version="\ud800", weight_versions=None),
    "a long version": with_meta(weight_version="9" * 5_000, weight_versions=None),
    "an older version": with_meta(weight_version="5", weight_versions=None),
    "an older version of a token": with_meta(weight_versions=versions(("5", 0, 1), ("6", 1, 2))),
    "stopped at another token": with_meta(finish_reason={"type": "stop", "matched": 366}),
    "finish_reason of a list": with_meta(finish_reason={"type": ["stop"]}),
    "text no text": lambda body, meta: body.update(text=["ab"]),
    "top log-probs of one token": with_meta(output_top_logprobs=[[[-1.5, 366, None]]]),
    "top log-probs as text": with_meta(output_top_logprobs="ab"),
}


def test_an_answer_that_cannot_be_right_is_refused_and_not_asked_for_again() -> None:
    assert parse_generation(legal(), request=REQUEST).output_ids == (366, 12)
    for name, change in FALSE_ANSWERS.items():
        body = legal()
        change(body, body["meta_info"])
        with pytest.raises(EngineProtocolError, match=r"^http://w/generate ") as caught:
            parse_generation(body, request=REQUEST, endpoint="http://w/generate")
        assert (name, caught.value.transient) == (name, False)


def test_legal_answers_at_the_limits_are_read() -> None:
    for change in (
        with_pairs([0.0, 366, None], [-80.0, 12, None]),
        with_pairs([1e-4, 366, None], [-0, 12, None]),
        with_meta(finish_reason={"type": "stop", "matched": 12}),
        with_meta(finish_reason={"type": "stop", "matched": "b"}, output_top_logprobs=[None, [[-math.inf, 9, None]]]),
        with_meta(weight_version=7, weight_versions=None),
        with_meta(weight_version="my run", weight_versions=None),  # no number, which cannot be compared
        # a stream that was aborted in the queue
        lambda body, meta: (body.update(output_ids=[12]), meta.update(finish_reason={"type": "abort"})),
    ):
        body = legal()
        change(body, body["meta_info"])
        assert parse_generation(body, request=REQUEST).output_ids == (366, 12)


def trained(generation: Generation) -> Any:
    return generation.output_ids, generation.log_probs, generation.weight_versions, generation.finish_reason


_WRONG = st.sampled_from([True, -1, 5.7, 2**40, 10**400, math.nan, -math.inf, "\ud800", [], {}, [[]], [None], None])


@given(data=st.data())
def test_a_changed_answer_is_refused_or_trains_the_same(data: st.DataObject) -> None:
    """One place of the answer gets a value that is wrong there, is left out, or is there twice."""
    body: Any = legal()
    parents: list[tuple[Any, Any]] = [(body, "text"), (body, "output_ids")]
    level = [body["meta_info"]]
    while level:
        places = [(one, key) for one in level for key in (one if isinstance(one, dict) else range(len(one)))]
        parents += places
        level = [one[key] for one, key in places if isinstance(one[key], (dict, list))]
    parent, key = data.draw(st.sampled_from(parents))
    kind = data.draw(st.sampled_from(["value", "twice", "missing"]))
    if kind == "value":
        parent[key] = data.draw(_WRONG)
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, parent[key])
    elif key != "weight_versions":  # without it weight_version counts, as of older servers
        del parent[key]
    if body["meta_info"].get("weight_versions") in (None, [], {}):
        return
    try:
        generation = parse_generation(body, request=REQUEST)
    except EngineProtocolError:
        return
    assert trained(generation) == trained(parse_generation(legal(), request=REQUEST))


@pytest.mark.parametrize(
    "body",
    [
        [answer()],  # n > 1
        {},
        answer(finish_reason=None),
        answer(finish_reason={"type": "unheard-of"}),
        answer(output_token_logprobs=None),
        answer(output_token_logprobs=[[-1.0]]),
        answer(output_token_logprobs=[[None, 3, None]]),  # NaN in SGLang's JSON
        answer(output_token_logprobs=[[math.nan, 3, None]]),
        answer(output_token_logprobs=[[-math.inf, 3, None]]),
        answer(weight_versions=["7"]),
        answer(weight_versions=[{"version": "7"}]),
    ],
)
def test_any_other_form_is_refused(body: Any) -> None:
    with pytest.raises(EngineProtocolError):
        parse_generation(body)


def test_nan_logits_are_an_error_not_a_stop() -> None:
    with pytest.raises(EngineError, match="NaN logits") as caught:
        parse_generation(answer(finish_reason={"type": "stop", "matched": "NaN happened"}))
    assert type(caught.value) is EngineError  # a protocol error would be sent again


def test_sampling_params_use_the_engines_names() -> None:
    payload = SamplingParams(stop=("</x>",), stop_token_ids=(5,), extra={"min_new_tokens": 2}).to_payload()
    assert payload["stop"] == ["</x>"]
    assert payload["stop_token_ids"] == [5]
    assert payload["min_new_tokens"] == 2
    assert payload["skip_special_tokens"] is False


def test_workers_of_a_router_are_servers_healthy_or_not() -> None:
    # a shortened answer of sglang-router 0.3.2; the last two are data-parallel ranks of one server
    listed = [
        {"id": "ab6a", "url": "http://127.0.0.1:18702", "is_healthy": True},
        {"id": "0eab", "url": "http://127.0.0.1:18701/", "is_healthy": False},
        {"url": "http://w:8000@0"},
        {"url": "http://w:8000@1"},
    ]
    urls = ("http://127.0.0.1:18702", "http://127.0.0.1:18701", "http://w:8000")
    assert parse_workers({"workers": listed, "total": 4}) == urls


@pytest.mark.parametrize(
    "body",
    [None, {}, {"workers": None}, {"workers": [{"id": 1}]}, {"workers": ["w"]}, {"workers": [{"url": "grpc://w:1"}]}],
)
def test_other_workers_answers_are_refused(body: Any) -> None:
    with pytest.raises(EngineProtocolError):
        parse_workers(body)


@pytest.mark.parametrize(
    "payload",
    [
        {"input_ids": (1, 2), "sampling_params": {"temperature": 0.1, "stop": ["é\u2028"], "extra": None}},
        {"text": "cut \ud83d"},
        {"n": 2**70, "logit_bias": {5: 1.5}},
    ],
)
def test_payload_survives_encoding(payload: Any):
    assert json.loads(_encoded(payload)) == json.loads(json.dumps(payload))


async def test_json_that_is_nested_too_deep_is_an_answer_that_cannot_be_right() -> None:
    async with ScriptedEngine() as engine, SGLangClient(base_url=engine.url, settings=QUICK) as client:
        for status in (Body("[" * 10_000 + "]" * 10_000), Body('{"meta_info": ' + "[" * 900 + "]" * 900 + "}")):
            engine.script("/generate", *[status] * 3)
            with pytest.raises(EngineProtocolError):
                await client.generate([1, 2, 3], SamplingParams(max_new_tokens=8))
            engine._scripts.clear()


@pytest.mark.parametrize("body", [b'[NaN, Infinity, "\\ud83d"]', b'{"a": [1e400]}'])
def test_nonstandard_json_of_servers_is_read(body: bytes):
    assert repr(_decoded(body)) == repr(json.loads(body))
