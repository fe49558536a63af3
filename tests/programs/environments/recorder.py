"""verifiers' own training client at a recorder, its own reader of a recorded trace, and prime-rl's batches of such a
trace: python -m tests.programs.environments.recorder, with the work as JSON on stdin."""

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


def prime_rl(trace: dict[str, Any], *, source: str) -> dict[str, Any]:
    """prime-rl's samples of a trace, and the one micro-batch that it packs them into; ``missing`` where a module that
    it needs is not installed. ``source`` is a checkout of prime-rl with its submodule of verifiers."""
    sys.path[:0] = [f"{source}/{folder}" for folder in ("src", "packages/prime-rl-configs/src", "deps/verifiers")]
    try:
        from prime_rl.orchestrator.trajectories import trace_to_samples
        from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    from verifiers.v1.trace import WireTrace

    samples = trace_to_samples(WireTrace.model_validate(trace), env_name="recorded")
    for sample in samples:  # as its TrainSink and its algorithms do, which need torch
        sample.temperatures = [1.0] * len(sample.token_ids)
        sample.advantages = [float(trained) for trained in sample.mask]
    [[packed]] = prepare_batch(samples, seq_len=4096, num_train_workers=1, bin_cost=build_bin_cost(None))
    names = ("token_ids", "mask", "logprobs")
    return {
        "samples": [{name: getattr(sample, name) for name in names} for sample in samples],
        "packed": dict(zip(names, (packed.input_ids, packed.loss_mask, packed.inference_logprobs), strict=True)),
        "lengths": packed.seq_lens,
    }


def main() -> None:
    work = json.load(sys.stdin)
    if "source" in work:
        print(json.dumps(prime_rl(**work)))
    elif "trace" in work:
        from verifiers.v1.trace import WireTrace

        print(json.dumps(rows(WireTrace.model_validate(work["trace"]))))
    else:
        print(json.dumps(asyncio.run(play(**work))))


if __name__ == "__main__":
    main()
