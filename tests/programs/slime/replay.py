"""Random multi-turn rollouts through our session, spans and converter, beside slime's own ``append_response_tokens`` on
the same engine answers: field by field, then through slime's manager's conversion.

python -m tests.programs.slime.replay ROLLOUTS SEED
"""

from __future__ import annotations

import asyncio
import base64
import random
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from slime.observability.rollout_data_utils import validate_rollout_routed_experts_for_replay
from slime.ray.rollout import RolloutManager
from slime.utils.types import Sample

from agl_slime.agent.session import RolloutSession
from agl_slime.engine.client.generation import Generation, SamplingParams, parse_generation
from agl_slime.engine.client.resumable import ResumableGeneration
from agl_slime.tokens import replay as replay_files
from agl_slime.tokens.converter import convert_trajectory
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.template import ChatTemplate
from agl_slime.tokens.trajectory import Trajectory
from agl_slime.train.slime.replay import with_tensors
from tests.harness.slime_programs import report
from tests.harness.tokenizers import small_tokenizer

LAYERS, TOP_K = 3, 2
ARGS = Namespace(num_layers=LAYERS, moe_router_topk=TOP_K, moe_layer_freq=[1] * LAYERS, rollout_top_p=0.9)
SAMPLING: Any = {"max_new_tokens": 6, "top_p": 0.9, "nucleus": True, "routed_experts": (LAYERS, TOP_K)}
FIELDS = ("tokens", "response_length", "loss_mask", "rollout_log_probs")
TENSORS = ("rollout_routed_experts", "rollout_top_p_token_ids", "rollout_top_p_token_offsets")


def experts_of(ids: list[int], n_experts: int) -> np.ndarray[Any, Any]:
    """Experts of each token but the last, a function of all ids up to it: ``[len - 1, layers, top_k]``."""
    hashed, rows = 0, []
    for token in ids[:-1]:
        hashed = (hashed * 1_000_003 + token + 1) % 2**31
        rows.append([(hashed // (7 + place)) % n_experts for place in range(LAYERS * TOP_K)])
    return np.array(rows, dtype=np.int32).reshape(-1, LAYERS, TOP_K)


class Engine:
    """Answers as SGLang does; ``calls`` keeps prompt, sampled ids, and the answers of all parts."""

    def __init__(self, rng: random.Random, tokenizer: Any) -> None:
        self.rng, self.tokenizer = rng, tokenizer
        self.n_experts = rng.choice((8, 60, 300))
        self.knows_start = rng.random() < 0.8
        self.version, self.calls = 0, []  # type: tuple[int, list[tuple[list[int], list[int], list[Any]]]]

    async def generate(
        self, input_ids: Any, sampling: SamplingParams, *, experts_start: int = 0, **_: Any
    ) -> Generation:
        resumable = ResumableGeneration(prompt_ids=input_ids, sampling=sampling, experts_start=experts_start)
        answers: list[Any] = []
        while not resumable.done:
            request = resumable.next_request()
            body = self.answer(list(request.input_ids), request.sampling.max_new_tokens, request.experts_start)
            answers.append(body)
            resumable.add(parse_generation(body, request=request))
        generation = resumable.result(latency_s=0.0)
        self.calls.append((list(input_ids), list(generation.output_ids), answers))
        return generation

    def answer(self, prompt: list[int], limit: int, start: int) -> dict[str, Any]:
        rng = self.rng
        self.version += rng.random() < 0.1
        kind = rng.choice(("stop", "stop", "length", "abort"))
        ids = [rng.randrange(250) for _ in range(limit if kind == "length" else rng.randint(0, limit - 1))]
        if kind == "stop":
            ids.append(self.tokenizer.eos_token_id)
        finish: dict[str, Any] = {"type": kind}
        if kind == "stop":
            finish["matched"] = ids[-1]
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "output_token_logprobs": [[-rng.randrange(1, 64) / 16, token, None] for token in ids],
            "prompt_tokens": len(prompt),
            "cached_tokens": rng.randrange(len(prompt)),
            "weight_version": str(self.version),
        }
        if not ids:  # aborted in the queue
            return {"text": "", "meta_info": {"finish_reason": finish}}
        first = start if self.knows_start else 0
        if first:
            meta["routed_experts_start_len"] = first
        rows = experts_of(prompt + ids, self.n_experts)[first:]
        meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        nuclei = [sorted({token, *(rng.randrange(300) for _ in range(rng.randrange(4)))}) for token in ids]
        offsets = np.cumsum([0, *map(len, nuclei)]).astype(np.int32)
        flat = np.array([token for row in nuclei for token in row], dtype=np.int32)
        meta["top_p_token_ids"] = base64.b64encode(flat.tobytes()).decode()
        meta["top_p_token_offsets"] = base64.b64encode(offsets.tobytes()).decode()
        return {"text": self.tokenizer.decode(ids), "meta_info": meta}


async def ours(rng: random.Random, template: ChatTemplate, number: int, directory: Path) -> tuple[list[Sample], Engine]:
    """Several turns with tools' results, edits of the history and branches; every second rollout uses files."""
    engine, spans = Engine(rng, template.tokenizer), list[Any]()
    session = RolloutSession(
        client=engine,
        template=template,
        sampling=SamplingParams(**SAMPLING, replay_files=str(directory) if number % 2 else None),
        messages=[{"role": "user", "content": f"question {rng.randrange(99)}"}],
        rollout_id=f"ro-{number}",
        write=lambda attributes, _: spans.append(SimpleNamespace(attributes=attributes)),
    )
    lines = [session]
    for _ in range(rng.randint(1, 6)):
        line = rng.choice(lines)
        if line.turns and rng.random() < 0.2:
            line = line.branch(line.messages[: rng.randint(1, len(line.messages))])
            lines.append(line)
        kind = rng.random()
        if line.messages[-1]["role"] == "assistant":
            line.add({"role": rng.choice(("tool", "user")), "content": f"said {rng.randrange(99)}"})
        if kind < 0.15:  # the agent edits the history
            edited = [dict(message) for message in line.messages]
            edited[rng.randrange(len(edited))]["content"] = f"edited {rng.randrange(99)}"
            line.messages = edited
        await line.ask()
    untrained = frozenset(index for index in range(len(session.turns)) if rng.random() < 0.05)
    turns = tuple(decode_turns(spans))
    if not any(len(turn.response_ids) and index not in untrained for index, turn in enumerate(turns)):
        return [], engine
    trajectory = Trajectory(rollout_id=str(number), attempt_id="1", task={}, turns=turns, reward=1.0)
    options: Any = {"index": number, "rollout_id": number, "group_index": 0, "replay_files": directory}
    conversion = convert_trajectory(trajectory, untrained_turns=untrained, **options)
    assert all(turn.experts is None and turn.nucleus is None for turn in conversion.trajectory.turns)
    return list(with_tensors(conversion.samples)), engine


def slimes(ours: Sample, engine: Engine, used: set[int]) -> Sample:
    """slime's Sample of the same answers, turn by turn, as its own ``generate`` makes it."""
    prompt_length = len(ours.tokens) - ours.response_length
    sample = Sample(tokens=list(ours.tokens[:prompt_length]), loss_mask=[], rollout_log_probs=[])
    for start, end in ours.metadata["turn_spans"]:
        prompt, ids = ours.tokens[: prompt_length + start], ours.tokens[prompt_length + start : prompt_length + end]
        number = next(i for i, call in enumerate(engine.calls) if i not in used and call[:2] == (prompt, ids))
        used.add(number)
        if between := prompt[len(sample.tokens) :]:
            sample.append_response_tokens(ARGS, tokens=between, trainable=False)
        metas = [body["meta_info"] for body in engine.calls[number][2]]
        begin = next((meta["routed_experts_start_len"] for meta in metas if "routed_experts_start_len" in meta), 0)
        experts = sample.rollout_routed_experts
        if begin > (0 if experts is None else len(experts)):
            # of a fork, or of a turn that is context only: the experts of the turns in front of it
            sample.rollout_routed_experts = torch.from_numpy(experts_of([*sample.tokens, 0], engine.n_experts))[:begin]
        for body, meta in zip(engine.calls[number][2], metas, strict=True):
            pairs = meta.get("output_token_logprobs", [])
            tokens, log_probs = [pair[1] for pair in pairs], [pair[0] for pair in pairs]
            sample.append_response_tokens(ARGS, tokens=tokens, log_probs=log_probs, meta_info=meta, text=body["text"])
    return sample


def differences(ours: Sample, theirs: Sample) -> list[str]:
    names = [name for name in FIELDS if getattr(ours, name) != getattr(theirs, name)]
    for name in TENSORS:
        a, b = getattr(ours, name), getattr(theirs, name)
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a, b):
            names.append(name)
    if tuple(ours.rollout_routed_experts.shape) != (len(ours.tokens) - 1, LAYERS, TOP_K):
        names.append("shape")
    if ours.weight_versions != list(dict.fromkeys(theirs.weight_versions)):
        names.append("weight_versions")
    return names


async def compare(rollouts: int, seed: int, directory: Path) -> dict[str, Any]:
    template = ChatTemplate(tokenizer=small_tokenizer())
    convert = RolloutManager.__ray_metadata__.modified_class._convert_samples_to_train_data
    counts = dict.fromkeys(("rollouts", "forked", "resumed", "converted"), 0)
    different: list[Any] = []
    for number in range(rollouts):
        rng = random.Random(seed * 1_000_003 + number)
        samples, engine = await ours(rng, template, number, directory)
        if not samples:
            continue
        used: set[int] = set()
        for sample in samples:
            if names := differences(sample, slimes(sample, engine, used)):
                different.append([number, names])
        validate_rollout_routed_experts_for_replay([sample.rollout_routed_experts for sample in samples], ARGS)
        manager = SimpleNamespace(
            args=Namespace(**vars(ARGS), use_rollout_routing_replay=True),
            custom_convert_samples_to_train_data_func=None,
            _post_process_rewards=lambda batch: ([1.0] * len(batch), [1.0] * len(batch)),
        )
        data = convert(manager, samples)
        counts["converted"] += len(data["rollout_routed_experts"]) == len(data["rollout_top_p_token_ids"])
        counts["rollouts"] += 1
        counts["forked"] += len(samples) > 1
        counts["resumed"] += any(len(call[2]) > 1 for call in engine.calls)
    return {**counts, "filed": sum(1 for _ in directory.iterdir()), "different": different[:10]}


if __name__ == "__main__":
    replay_files.FILED_FROM_BYTES = 100  # so that some turns are in files
    with tempfile.TemporaryDirectory() as made:
        report(asyncio.run(compare(int(sys.argv[1]), int(sys.argv[2]), Path(made))))
