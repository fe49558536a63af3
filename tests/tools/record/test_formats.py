"""No format of a recorded rollout changes a token, a log-prob or a mask."""

import hashlib
import json
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.support.agl import Rollout, Span
from agl_slime.tokens import attributes as names
from agl_slime.tokens.reward import Reward
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn
from agl_slime.tools.record.formats import FORMATS
from agl_slime.tools.record.recorded import ATTEMPT, RecordedRollout
from tests.harness.trace_strategies import conversations

Row = tuple[list[int], list[int], list[float]]
"""All tokens of a Sample, and masks and log-probs from its first sampled token on."""


@st.composite
def recorded_rollouts(draw: st.DrawFn) -> RecordedRollout:
    turns, encoder = draw(conversations()), TurnEncoder()
    untrained = draw(st.sets(st.integers(0, len(turns) - 1)))
    spans: list[Span] = []
    for number, turn in enumerate(turns):
        listed = {names.UNTRAINED_TURNS: json.dumps([index for index in sorted(untrained) if index <= number])}
        about: dict[str, Any] = {"rollout_id": "ro", "attempt_id": ATTEMPT, "trace_id": "ro", "span_id": str(number)}
        about |= {"sequence_id": number + 1, "end_time": float(number)}
        attributes = {**encoder.encode(turn), **listed}
        spans.append(Span.from_attributes(name=names.GENERATE_SPAN, attributes=attributes, **about))
    reward = draw(st.none() | st.floats(-1, 1).map(lambda value: Reward(value, {"right": value, "short": 0.5})))
    rollout = Rollout(rollout_id="ro", input=draw(st.sampled_from([None, "Why?", {"label": "x"}])), start_time=1.0)
    return RecordedRollout(rollout=rollout, spans=spans, reward=reward, finished="client", running=False)


def formatted(recorded: RecordedRollout, form: str) -> Any:
    """A format as a client reads it."""
    return json.loads(json.dumps(FORMATS[form](recorded)))


def rows_of_samples(recorded: RecordedRollout) -> list[Row]:
    samples, _ = recorded.samples()
    return [(sample["tokens"], sample["loss_mask"], sample["rollout_log_probs"]) for sample in samples]


@given(recorded=recorded_rollouts())
def test_rows_of_trl_are_the_samples(recorded: RecordedRollout) -> None:
    rows = formatted(recorded, "trl")
    together = zip(rows["prompt_ids"], rows["completion_ids"], rows["env_mask"], rows["logprobs"], strict=True)
    assert [(prompt + completion, mask, values) for prompt, completion, mask, values in together] == rows_of_samples(
        recorded
    )


@given(recorded=recorded_rollouts())
def test_branches_of_verifiers_are_the_samples(recorded: RecordedRollout) -> None:
    trace = formatted(recorded, "verifiers")
    nodes, rows = trace["nodes"], []
    for leaf in sorted({*range(len(nodes))} - {node["parent"] for node in nodes}):
        tokens, mask, values, index = [], [], [], leaf
        while index is not None:
            node = nodes[index]
            sampled = iter(node.get("logprobs", []))
            tokens, mask = node.get("token_ids", []) + tokens, node.get("mask", []) + mask
            values = [next(sampled) if number else 0.0 for number in node.get("mask", [])] + values
            assert next(sampled, None) is None
            index = node["parent"]
        first = mask.index(True)
        rows.append((tokens, [int(number) for number in mask[first:]], values[first:]))
    assert rows == rows_of_samples(recorded)
    prompts = [recorded.turns()[segment.placements[0].turn].messages or () for segment in recorded.segments()]
    assert sum(not node.get("sampled") for node in nodes) >= sum(map(len, prompts))
    assert [call["node"] for call in trace["calls"]] == [
        index for index, node in enumerate(nodes) if node.get("sampled")
    ]
    total = sum(reward["score"] * reward["weight"] for reward in trace["rewards"].values())
    assert total == (recorded.reward.primary if recorded.reward is not None else 0.0)


@given(recorded=recorded_rollouts())
def test_turns_of_openenv_merge_to_the_samples(recorded: RecordedRollout) -> None:
    entries, turns = formatted(recorded, "openenv")["turns"], []
    for entry in entries:
        prompt, sampled = entry["prompt_token_ids"], entry["completion_token_ids"]
        assert len(entry["loss_mask"]) == len(prompt) + len(sampled)
        assert not any(entry["loss_mask"][: len(prompt)])
        turns.append(Turn(prompt_ids=prompt, response_ids=sampled, log_probs=entry["per_token_logps"]))
    untrained = {index for index, entry in enumerate(entries) if not any(entry["loss_mask"])}
    assert len({entry["node_id"] for entry in entries}) == len(entries)
    rows = []
    for segment in merge_turns(turns, untrained=untrained):
        if segment.log_probs is not None:
            response = slice(segment.prompt_length, None)
            columns = (segment.token_ids, segment.loss_mask[response], segment.log_probs[response])
            rows.append(tuple(column.tolist() for column in columns))
    assert rows == rows_of_samples(recorded)


@given(recorded=recorded_rollouts())
def test_entries_of_nemo_gym_are_the_trained_turns(recorded: RecordedRollout) -> None:
    capture, untrained = formatted(recorded, "nemo_gym"), recorded.untrained()
    names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
    entries = [tuple(entry[name] for name in names) for entry in capture["entries"]]
    assert entries == [
        (turn.prompt_ids.tolist(), turn.response_ids.tolist(), turn.log_probs.tolist())
        for number, turn in enumerate(recorded.turns())
        if number not in untrained and len(turn.response_ids) and turn.log_probs is not None
    ]
    dumped = [orjson.dumps(entry, option=orjson.OPT_SORT_KEYS) for entry in capture["entries"]]
    assert [*capture["entry_digests"].values()] == [hashlib.sha256(entry).hexdigest() for entry in dumped]
    carriers = [item for item in capture["response"]["output"] if "generation_token_ids" in item]
    rows = [tuple(item[name] for name in names) for item in carriers]
    assert all(row in entries for row in rows)
    if rows:
        assert [*rows[-1][0], *rows[-1][1]] in [tokens for tokens, _, _ in rows_of_samples(recorded)]


@given(recorded=recorded_rollouts())
def test_events_of_agent_lightning_are_the_trained_turns(recorded: RecordedRollout) -> None:
    calls = [event for event in formatted(recorded, "triplet") if event["event_type"] == "model_request"]
    names = ("prompt_token_ids", "response_token_ids", "response_log_probs")
    triplets = [tuple(event["data"][name] for name in names) for event in calls]
    assert triplets == [
        (turn.prompt_ids.tolist(), turn.response_ids.tolist(), turn.log_probs.tolist())
        for number, turn in enumerate(recorded.turns())
        if number not in recorded.untrained() and turn.log_probs is not None
    ]
