"""verifiers' own training client at a recorder, and its own reader of a recorded trace:
python -m tests.programs.environments.recorder, with the work as JSON on stdin."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


async def play(url: str, model: str, session: str, questions: list[str]) -> dict[str, Any]:
    """A conversation by ``TrainClient``, committed to a trace as in verifiers' interception server."""
    from verifiers.v1.clients import TrainClientConfig, resolve_client
    from verifiers.v1.dialects import ChatDialect
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.graph import prepare_turn
    from verifiers.v1.trace import WireTrace
    from verifiers.v1.types import SamplingConfig, UserMessage

    os.environ["RECORDER_KEY"] = "none"
    client = resolve_client(TrainClientConfig(base_url=url, api_key_var="RECORDER_KEY", renderer_model_name=model))
    fields = {"id": session, "task": {"type": "Task", "data": {}}, "agent": {"config": {}}}
    trace, messages = WireTrace.model_validate(fields), []
    for question in questions:
        messages.append(UserMessage(content=question))
        body = {"model": model, "messages": [message_to_wire(message) for message in messages]}
        turn = prepare_turn(trace, list(messages))
        response = await client.get_response(
            ChatDialect(), body, SamplingConfig(max_tokens=64, temperature=1.0), session_id=session, turn=turn
        )
        turn.commit(response)
        messages.append(response.message)
    await client.close()
    return rows(trace)


def rows(trace: Any) -> dict[str, Any]:
    """The rows of a trainer, as of prime-rl: one per branch, and a node under several is trained once."""
    trained: set[int] = set()
    samples = []
    for branch in trace.branches:
        mask: list[bool] = []
        for node in branch.nodes:
            mask += [False] * len(node.mask) if id(node) in trained else node.mask
            trained.add(id(node))
        if any(mask):
            samples.append({"token_ids": branch.token_ids, "mask": mask, "logprobs": branch.logprobs})
    return {"samples": samples, "reward": trace.reward, "turns": trace.num_turns, "ok": trace.ok}


def main() -> None:
    work = json.load(sys.stdin)
    if "trace" in work:
        from verifiers.v1.trace import WireTrace

        print(json.dumps(rows(WireTrace.model_validate(work["trace"]))))
    else:
        print(json.dumps(asyncio.run(play(**work))))


if __name__ == "__main__":
    main()
