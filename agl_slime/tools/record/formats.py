"""``FORMATS``: a recorded rollout in the form of each trainer, as JSON values. Every form has the same tokens, masks
and log-probs; sampled tokens that are not trained are context in all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.agl1.events import events_of
from agl_slime.gateway.agl1.schemas import ATTEMPT
from agl_slime.tokens.turn import Turn
from agl_slime.tools.record.recorded import RecordedRollout

_FINISH_REASONS = ("stop", "length", "tool_calls")


def openenv_trace(recorded: RecordedRollout) -> dict[str, Any]:
    """OpenEnv's ``TrainingTrace``: an entry per turn, which TRL's ``HarnessRolloutWorker`` reads. Raises
    ``GatewayRequestError`` for turns without log-probs, which the trace needs."""
    turns, untrained = recorded.turns(), recorded.untrained()
    entries = []
    for number, (turn, answer) in enumerate(zip(turns, _answers(turns), strict=True)):
        prompt, sampled = turn.prompt_ids.tolist(), turn.response_ids.tolist()
        entries.append(
            {
                "node_id": f"turn-{number}",
                "prompt_token_ids": prompt,
                "completion_token_ids": sampled,
                "per_token_logps": _log_probs(turn, number, "openenv"),
                "loss_mask": [0] * len(prompt) + [int(number not in untrained)] * len(sampled),
                "request": {"messages": [_openai_message(message) for message in turn.messages or ()]},
                "response": {"choices": [{"message": answer, "finish_reason": turn.finish_reason}]},
                "metadata": {"response_id": turn.request_id, "weight_versions": _versions(turn)},
            }
        )
    return {"schema_version": 1, "turns": entries}


def trl_rows(recorded: RecordedRollout) -> dict[str, list[Any]]:
    """The result of a ``rollout_func`` of TRL's ``GRPOTrainer``, with a row per Sample: mostly one, more after
    forks."""
    rows: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    for segment in recorded.segments():
        if segment.log_probs is None:
            raise GatewayRequestError("a turn has no log-probs, which format trl needs", status=409, param="format")
        start = segment.prompt_length
        rows["prompt_ids"].append(segment.token_ids[:start].tolist())
        rows["completion_ids"].append(segment.token_ids[start:].tolist())
        rows["logprobs"].append(segment.log_probs[start:].tolist())
        rows["env_mask"].append(segment.loss_mask[start:].tolist())
    reward = None if recorded.reward is None else recorded.reward.primary
    return {**rows, "reward": [reward] * len(rows["prompt_ids"])}


def nemo_gym_capture(recorded: RecordedRollout) -> dict[str, Any]:
    """NeMo Gym's token capture of a rollout: ``entries`` (its ``TokenEntry``) of trained turns, the digest of each as
    its ``TokenCaptureStore`` computes it, and ``response`` with the longest conversation as output items for its
    trainers."""
    turns, untrained, times = recorded.turns(), recorded.untrained(), recorded.answer_times()
    entries: dict[int, dict[str, Any]] = {}
    for number, (turn, answer) in enumerate(zip(turns, _answers(turns), strict=True)):
        if number in untrained or not len(turn.response_ids):
            continue
        items = _output_items(answer, call_id=f"turn-{number}")
        entries[number] = {
            "schema_version": 1,
            "rollout_id": recorded.rollout.rollout_id,
            "model_call_id": f"turn-{number}",
            "model": "",
            "prompt_token_ids": turn.prompt_ids.tolist(),
            "generation_token_ids": turn.response_ids.tolist(),
            "generation_log_probs": _log_probs(turn, number, "nemo_gym"),
            "routed_experts": None,
            "output_items": items,
            "token_item_index": len(items) - 1,
            "created_at": times[number],
        }
    digests = {
        entry["model_call_id"]: hashlib.sha256(orjson.dumps(entry, option=orjson.OPT_SORT_KEYS)).hexdigest()
        for entry in entries.values()
    }
    return {
        "rollout_id": recorded.rollout.rollout_id,
        "snapshot_id": hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
        "version": len(entries),
        "incomplete": False,
        "entries": [*entries.values()],
        "entry_digests": digests,
        "reward": None if recorded.reward is None else recorded.reward.primary,
        "response": _response(recorded, entries),
    }


def _response(recorded: RecordedRollout, entries: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """A response of the Responses API with the longest segment: the item that carries an answer's tokens has the whole
    prompt before them."""
    output: list[dict[str, Any]] = []
    main = max(recorded.segments(), key=lambda segment: len(segment.token_ids), default=None)
    for place in main.placements if main is not None else ():
        entry = entries[place.turn]
        names = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
        *first, last = entry["output_items"]
        output += [*first, {**last, **{name: entry[name] for name in names}}]
    return {
        "id": f"resp_{recorded.rollout.rollout_id}",
        "object": "response",
        "created_at": recorded.rollout.start_time,
        "model": "",
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def verifiers_trace(recorded: RecordedRollout) -> dict[str, Any]:
    """verifiers' ``Trace`` (0.4, version 1), for its ``WireTrace``: a branch per Sample. As for verifiers' turns
    without spans of messages, the answer's node has the tokens of the messages before it, under mask 0."""
    turns, times, nodes, calls = recorded.turns(), recorded.answer_times(), [], []
    answers = _answers(turns)
    for segment in recorded.segments():
        parent, messages, tokens = None, 0, 0
        for place in segment.placements:
            turn, timestamp = turns[place.turn], times[place.turn]
            for message in (turn.messages or ())[messages:]:
                nodes.append({"parent": parent, "message": _verifiers_message(message), "timestamp": timestamp})
                parent = len(nodes) - 1
            ids = segment.token_ids[tokens : place.end].tolist()
            nodes.append(
                {
                    "parent": parent,
                    "message": _verifiers_message(answers[place.turn]),
                    "sampled": True,
                    "timestamp": timestamp,
                    "token_ids": ids,
                    "mask": segment.loss_mask[tokens : place.end].astype(bool).tolist(),
                    "logprobs": [] if turn.log_probs is None else turn.log_probs.tolist(),
                }
            )
            parent, messages, tokens = len(nodes) - 1, len(turn.messages or ()) + 1, place.end
            calls.append(_verifiers_call(turn, node=parent, ended=timestamp))
    reward, task = recorded.reward, recorded.rollout.input
    data = task if isinstance(task, dict) else {"task": task}
    return {
        "version": 1,
        "id": recorded.rollout.rollout_id,
        "task": {"type": "Task", "data": data},
        "agent": {"config": {}},
        "nodes": nodes,
        "calls": calls,
        # verifiers adds weighted rewards; the first is the reward of the Samples
        "rewards": {
            name: {"score": value, "weight": float(not place)}
            for place, (name, value) in enumerate(reward.named.items() if reward is not None else ())
        },
        "info": {"metadata": recorded.rollout.metadata, "weight_versions": [_versions(turn) for turn in turns]},
        "is_completed": recorded.finished is not None,
        "ok": recorded.finished is not None and reward is not None and bool(nodes),
        "timing": {"start": recorded.rollout.start_time},
    }


def _verifiers_call(turn: Turn, *, node: int, ended: float) -> dict[str, Any]:
    usage = {
        "prompt_tokens": len(turn.prompt_ids) - turn.cached_tokens,
        "completion_tokens": len(turn.response_ids),
        "cached_input_tokens": turn.cached_tokens,
    }
    return {
        "node": node,
        "finish_reason": turn.finish_reason if turn.finish_reason in _FINISH_REASONS else None,
        "usage": usage,
        "time": {"start": ended - turn.latency_s, "end": ended},
    }


def triplet_events(recorded: RecordedRollout) -> list[dict[str, Any]]:
    """The events of Agent Lightning 1.0's ``format=triplet``, of which its trainer takes the last reward."""
    rollout_id = recorded.rollout.rollout_id
    events = events_of(rollout_id, recorded.spans, triplet=True)
    if recorded.reward is not None:
        timestamp = max(recorded.answer_times(), default=recorded.rollout.start_time)
        ids = {"rollout_id": rollout_id, "attempt_id": ATTEMPT}
        events.append(
            {"event_type": "reward", **ids, "timestamp": timestamp, "data": {"value": recorded.reward.primary}}
        )
    return events


FORMATS: Mapping[str, Callable[[RecordedRollout], Any]] = {
    "json": RecordedRollout.to_json,
    "slime": lambda recorded: recorded.samples()[0],
    "triplet": triplet_events,
    "verifiers": verifiers_trace,
    "nemo_gym": nemo_gym_capture,
    "openenv": openenv_trace,
    "trl": trl_rows,
}
"""By the name in ``?format=``."""


# -- messages ---------------------------------------------------------------------------------------------------------


def _answers(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The answer of each turn as a message of OpenAI: as a later request repeats it, with calls of tools; else the
    engine's text."""
    answers = [{"role": "assistant", "content": turn.text} for turn in turns]
    for turn in turns:
        if turn.base_turn is None:
            continue
        index, messages = len(turns[turn.base_turn].messages or ()), turn.messages or ()
        if index < len(messages) and messages[index]["role"] == "assistant":
            answers[turn.base_turn] = _openai_message(messages[index])
    return answers


def _openai_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """``message`` with the arguments of calls as text; the text of a completion is a user's message."""
    as_openai = {**message, "role": "user" if message["role"] == "text" else message["role"]}
    if message.get("tool_calls"):
        as_openai["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _text(call["function"].get("arguments", {}))}}
            for call in message["tool_calls"]
        ]
    return as_openai


def _verifiers_message(message: Mapping[str, Any]) -> dict[str, Any]:
    message = _openai_message(message)
    role, content = message["role"], message.get("content") or ""
    if role == "tool":
        return {"role": "tool", "content": content, "tool_call_id": str(message.get("tool_call_id") or "")}
    if role != "assistant":
        return {"role": "user" if role == "user" else "system", "content": content}
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or ()]
    reasoning = {"reasoning_content": message["reasoning_content"]} if message.get("reasoning_content") else {}
    return {"role": "assistant", "content": content, **reasoning, **({"tool_calls": calls} if calls else {})}


def _output_items(answer: Mapping[str, Any], *, call_id: str) -> list[dict[str, Any]]:
    """An answer as output items of the Responses API, at least one."""
    calls = [
        {
            "type": "function_call",
            "id": call["id"],
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": call["function"]["arguments"],
            "status": "completed",
        }
        for call in answer.get("tool_calls") or ()
    ]
    if calls and not answer.get("content"):
        return calls
    text = {"type": "output_text", "text": answer.get("content") or "", "annotations": []}
    about = {"type": "message", "id": f"msg_{call_id}", "role": "assistant", "status": "completed"}
    return [{**about, "content": [text]}, *calls]


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _log_probs(turn: Turn, number: int, form: str) -> list[float]:
    if turn.log_probs is None:
        message = f"turn {number} has no log-probs, which format {form} needs"
        raise GatewayRequestError(message, status=409, param="format")
    return turn.log_probs.tolist()


def _versions(turn: Turn) -> list[list[Any]]:
    """``[version, start, end]`` over the sampled tokens."""
    return [[span.version, span.start, span.end] for span in turn.weight_versions]
