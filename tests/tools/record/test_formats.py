"""No format of a recorded rollout changes a token, a log-prob or a mask; trainers read them."""

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
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
from tests.harness.environments import ask as ask_environment
from tests.harness.gateway import CALL, TEMPLATE
from tests.harness.tokenizers import small_tokenizer
from tests.harness.trace_strategies import conversations
from tests.tools.record.test_record import ask_with_a_tool, prompts_of, recording

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


def played(url: str) -> None:
    """Two turns with a call of a tool between them, and a reward."""
    ask_with_a_tool(f"{url}/v1")
    assert httpx.post(f"{url}/finish", json={"reward": {"right": 1.0, "short": 0.5}}).status_code == 200


def read(url: str, form: str = "json") -> Any:
    answer = httpx.get(url, params={"format": form})
    assert answer.status_code == 200, answer.text
    return answer.json()


def rows_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Samples with masks and log-probs from the first token on."""
    prompts = [len(sample["tokens"]) - sample["response_length"] for sample in samples]
    return [
        {
            "token_ids": sample["tokens"],
            "mask": [False] * prompt + [bool(used) for used in sample["loss_mask"]],
            "logprobs": [0.0] * prompt + sample["rollout_log_probs"],
        }
        for prompt, sample in zip(prompts, samples, strict=True)
    ]


@pytest.mark.environments
def test_verifiers_training_client_gets_the_engines_ids(tmp_path: Path) -> None:
    small_tokenizer(TEMPLATE).save_pretrained(tmp_path / "model")
    with recording(tmp_path / "recorded", "It is 4.", "Yes.", "Again.") as (gateway, engine):
        url = gateway.rollouts_url.replace("/rollouts", "/v1")
        work = {"url": url, "model": str(tmp_path / "model"), "session": "trace-1"}
        answer = ask_environment("recorder", stdin={**work, "questions": ["2 + 2?", "Is it?", "Sure?"]})
        turns = read(f"{gateway.rollouts_url}/trace-1")["turns"]
        assert [turn["prompt_token_ids"] for turn in turns] == prompts_of(engine)
        assert (answer["turns"], len(turns)) == (3, 3)
        trained = [
            (token, value)
            for sample in answer["samples"]
            for token, used, value in zip(sample["token_ids"], sample["mask"], sample["logprobs"], strict=True)
            if used
        ]
        assert [token for token, _ in trained] == [token for turn in turns for token in turn["token_ids"]]
        assert [value for _, value in trained] == pytest.approx([used for turn in turns for used in turn["log_probs"]])


@pytest.mark.environments
def test_verifiers_reads_a_recorded_trace_as_the_samples(tmp_path: Path) -> None:
    with recording(tmp_path, CALL, "It is warm.") as (gateway, _):
        played(url := f"{gateway.rollouts_url}/one")
        answer = ask_environment("recorder", stdin={"trace": read(url, "verifiers")})
        assert answer["samples"] == rows_of(read(url, "slime"))
        assert (answer["reward"], answer["turns"], answer["ok"]) == (1.0, 2, True)


@pytest.mark.slow
def test_grpo_trainer_learns_from_the_engines_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason='the embedded engine: pip install "agl-slime[local]"')
    pytest.importorskip("trl", reason="TRL: pip install 'trl>=1.16'")
    pytest.importorskip("openai", reason="the client of OpenAI: pip install openai")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    example = importlib.import_module("trl_recorder")
    lines = example.train(steps=3, prompts=4, samples=4, lr=1e-3, seed=0)
    assert [(line["rows"], line["wrong_rows"]) for line in lines] == [(16, 0)] * 3
    # each step's tokens come from the previous step's weights, as the trainer's do
    assert [[*line["weight_versions"]] for line in lines] == [["default"], ["1"], ["2"]]
    for line in lines:
        assert (line["ratio_min"], line["ratio_max"]) == pytest.approx((1, 1), abs=1e-4)
